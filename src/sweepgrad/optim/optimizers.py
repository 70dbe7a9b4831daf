"""The update rules, as expressions of scalars, and the loop over parameters.

An update reads the parameter, its gradient and the state, and writes a new array for the parameter, which then
replaces the old one: whatever a graph saved of the old values stays as it was. State is updated in place. Numbers
that change from step to step, such as the learning rate, are arguments of the kernel, so a change compiles nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sweepgrad.arrays import empty, filled
from sweepgrad.dtypes import Array, DType
from sweepgrad.elements import dense, flat
from sweepgrad.errors import ArgumentError, DTypeError, VariableError
from sweepgrad.graph import process
from sweepgrad.kernels.expr import Expr, call, symbol
from sweepgrad.ops.loop import Loop
from sweepgrad.shortage import again
from sweepgrad.tensor import Tensor


class Optimizer:
    """What all optimisers share: the parameters, `zero_grad`, and a `step` over those that have a gradient.

    A subclass names its state arrays and its numbers, and gives the update as an expression.
    """

    state_names: tuple[str, ...] = ()
    """Arrays kept for each parameter, of its shape, zero at first."""
    number_names: tuple[str, ...] = ()
    """Numbers handed to the kernel at each step."""

    def __init__(self, params: Iterable[Tensor], lr: float) -> None:
        if isinstance(params, Tensor):
            raise DTypeError(f"`{type(self).__name__}` needs a list of tensors; found one tensor: put it in a list")
        self.params = list(params)
        if not self.params:
            raise ArgumentError(f"`{type(self).__name__}` got no parameters")
        for param in self.params:
            if not isinstance(param, Tensor):
                raise DTypeError(f"`{type(self).__name__}` needs tensors; found {type(param).__name__}")
            if not param.is_variable:
                raise VariableError(
                    f"`{type(self).__name__}` needs variables; found a tensor of shape {param.shape} that "
                    f"{'is the result of an operation' if param.requires_grad else 'does not require a gradient'}"
                )
        if len({id(param) for param in self.params}) != len(self.params):
            raise ArgumentError(f"`{type(self).__name__}` got a parameter twice")
        self.lr = lr
        self.steps = [0] * len(self.params)
        self._state: list[tuple[Array, ...] | None] = [None] * len(self.params)
        self._loops: dict[DType, Loop] = {}

    @property
    def lr(self) -> float:
        """Learning rate; may be changed between steps."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._lr = self._checked("lr", value, 0.0, float("inf"))

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_loops": {}}  # compiled kernels are not pickled

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.params)} parameters, lr={self.lr:g}>"

    def _checked(self, name: str, value: float, low: float, high: float) -> float:
        if not isinstance(value, (int, float)) or not low <= value < high:
            raise ArgumentError(f"`{type(self).__name__}` got {name}={value!r}; needed is {low} <= {name} < {high}")
        return float(value)

    def zero_grad(self) -> None:
        """Set the gradient of every parameter to None."""
        process.registry.set_gradients(self.params, None)

    def step(self) -> None:
        """Update every parameter that has a gradient.

        Raises:
            MemoryError: if there is not enough memory (`OutOfMemoryError`); each parameter has been updated or not.
        """
        process.registry.finish()
        counted = 0
        numbers: tuple[float, ...] = ()
        for k, param in enumerate(self.params):
            gradient = param._grad
            if gradient is None:
                continue
            steps = self.steps[k] + 1
            if steps != counted:  # mostly all parameters have been updated as often
                counted = steps
                numbers = self.numbers(counted)
            try:
                self._move(k, param, gradient, numbers)
            except MemoryError as error:
                again(error, f"{type(self).__name__}.step", self._move, k, param, gradient, numbers)
            self.steps[k] = steps

    def _move(self, k: int, param: Tensor, gradient: Tensor, numbers: tuple[float, ...]) -> None:
        """Update parameter number `k`. All memory is asked for before the kernel runs, which changes the state."""
        dtype = param._dtype
        array, old, toward = dense(param), flat(param), flat(gradient)
        state = self._state[k]
        if state is None:
            state = tuple([filled(old.size, 0, dtype, old) for _ in self.state_names])
        updated = empty(old.size, dtype, old)
        array = updated.reshape(array.shape)
        loop = self._loops.get(dtype)
        if loop is None:
            loop = self._loops[dtype] = self._loop(dtype.name)
        loop.over([old, toward, *numbers], old.size, outs=[updated, *state])
        self._state[k] = state
        param._replace(updated, array)

    def _loop(self, dtype: str) -> Loop:
        inputs = [("x0", "v", dtype), ("x1", "v", dtype)] + [(name, "s", dtype) for name in self.number_names]
        state = [f"o{k + 1}" for k in range(len(self.state_names))]  # the outputs after the parameter, changed in place
        outputs = self.update(*(symbol(name) for name in ["x0", "x1", *state, *self.number_names]))
        return Loop(outputs, inputs, dtype, dtype)

    def numbers(self, step: int) -> tuple[float, ...]:
        """The values of `number_names` for a parameter's update number `step`, counted from 1."""
        raise NotImplementedError

    def update(self, *values: Expr) -> tuple[Expr, ...]:
        """The new parameter and the new state, from p, g, the state and the numbers."""
        raise NotImplementedError


class SGD(Optimizer):
    """Gradient descent with optional momentum.

    v = momentum * v + g;  p = p - lr * v

    Args:
        params: variables to update.
        lr: learning rate.
        momentum: share of the last step's direction that is kept, 0 <= momentum < 1.

    Example:
        >>> import sweepgrad as sg
        >>> w = sg.asarray([1.0, 2.0], requires_grad=True)
        >>> optimizer = sg.optim.SGD([w], lr=0.1)
        >>> (w * w).sum().backward()
        >>> optimizer.step()
        >>> w
        Tensor([0.8, 1.6], requires_grad=True)
    """

    number_names = ("lr", "momentum")

    def __init__(self, params: Iterable[Tensor], lr: float, *, momentum: float = 0.0) -> None:
        super().__init__(params, lr)
        self.momentum = self._checked("momentum", momentum, 0.0, 1.0)
        if momentum:
            self.state_names = ("v",)

    def numbers(self, step: int) -> tuple[float, ...]:
        """Learning rate and momentum."""
        return self.lr, self.momentum

    def update(self, *values: Expr) -> tuple[Expr, ...]:
        """One step."""
        if not self.state_names:
            p, g, lr, _ = values
            return (p - lr * g,)
        p, g, v, lr, momentum = values
        v = momentum * v + g
        return p - lr * v, v


class Adam(Optimizer):
    """Adam: steps scaled by running means of the gradient and of its square.

    Source: Kingma and Ba, arXiv:1412.6980, algorithm 1; with `weight_decay`, decay * p is added to the gradient.

    Args:
        params: variables to update.
        lr: learning rate.
        betas: how much of the two running means is kept at each step, 0 <= beta < 1.
        eps: added to the denominator.
        weight_decay: factor of the L2 penalty's gradient.
    """

    state_names = ("m", "v")
    number_names = ("lr", "rate1", "rate2", "eps", "decay", "bias1", "bias2")

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr)
        if not isinstance(betas, (tuple, list)) or len(betas) != 2:
            raise ArgumentError(f"`{type(self).__name__}` got betas={betas!r}; needed are two numbers")
        self.betas = (self._checked("beta1", betas[0], 0.0, 1.0), self._checked("beta2", betas[1], 0.0, 1.0))
        self.eps = self._checked("eps", eps, 0.0, float("inf"))
        self.weight_decay = self._checked("weight_decay", weight_decay, 0.0, float("inf"))

    def numbers(self, step: int) -> tuple[float, ...]:
        """The settings, and how much of the two means there is since they began at zero."""
        beta1, beta2 = self.betas
        # 1 - beta is taken here, in float64: in a float32 kernel, 1 - 0.999 would be wrong in the fifth digit.
        return self.lr, 1 - beta1, 1 - beta2, self.eps, self.weight_decay, 1 - beta1**step, 1 - beta2**step

    def update(self, *values: Expr) -> tuple[Expr, ...]:
        """One step."""
        p, g, m, v, lr, rate1, rate2, eps, decay, bias1, bias2 = values
        return self._moved(p, g + decay * p, (m, v), (lr, rate1, rate2, eps, bias1, bias2))

    def _moved(self, start: Expr, g: Expr, state: tuple[Expr, Expr], numbers: tuple[Expr, ...]) -> tuple[Expr, ...]:
        """`start` moved by the gradient `g`, and the new means."""
        m, v = state
        lr, rate1, rate2, eps, bias1, bias2 = numbers
        m = m + rate1 * (g - m)
        v = v + rate2 * (g * g - v)
        return start - lr * (m / bias1) / (call("sqrt", v / bias2) + eps), m, v


class AdamW(Adam):
    """Adam with weight decay applied to the parameter itself rather than through the gradient.

    Source: Loshchilov and Hutter, arXiv:1711.05101.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, lr, betas=betas, eps=eps, weight_decay=weight_decay)

    def update(self, *values: Expr) -> tuple[Expr, ...]:
        """One step."""
        p, g, m, v, lr, rate1, rate2, eps, decay, bias1, bias2 = values
        return self._moved(p - lr * decay * p, g, (m, v), (lr, rate1, rate2, eps, bias1, bias2))
