"""Bandwidth on a GPU

float32, without graphs but where gradients are taken. Beside each stands a copy, on the device, of as many bytes as the
operation has to read and write: a ratio to it of 1.18 is 85 % of the copy's bandwidth.
"""

import math
from functools import partial

import numpy as np

import sweepgrad as sg
from benchmarks.gpu.libraries import REPEATS, CuPy, Sweepgrad, Torch, repeated
from benchmarks.measure import Comparison, each

SIZES = (64 << 20, 256 << 20, 1 << 30)
"""Bytes of each input."""
WIDTH = 4096
TARGET = 1 / 0.85


def chain(lib, x, y):
    return lib.sin(x) * y + x


def loss(lib, x, y):
    return lib.sum(lib.exp(-(x * x)) * y + x * y)


class Case:
    """An operation, as sweepgrad, CuPy and PyTorch do it, and how many arrays of its inputs' size it moves."""

    def __init__(self, title, inputs, moved, ours, theirs=None, *, cupy=None, torch=None, target=None):
        self.title, self.inputs, self.moved, self.ours, self.target = title, inputs, moved, ours, target
        self.cupy, self.torch = cupy or theirs, torch or theirs


def sums(axis):
    return {
        "ours": lambda x: [sg.sum(x, axis=axis)],
        "cupy": lambda cupy, x: [cupy.sum(x, axis=axis)],
        "torch": lambda torch, x: [torch.sum(x) if axis is None else torch.sum(x, dim=axis)],
    }


def torch_gradients(torch, x, y, f=None):
    x.grad = y.grad = None
    result = f(x, y) if f else loss(torch, x, y)
    result.backward()
    return [result, x.grad, y.grad]


_chain = sg.fuse(partial(chain, sg))
_gradients = sg.value_and_grad(sg.fuse(partial(loss, sg)), argnums=(0, 1))


def gradients(x, y):
    value, grads = _gradients(x, y)
    return [value, *grads]


CASES = [
    Case("exp", 1, 2, lambda x: [sg.exp(x)], lambda lib, x: [lib.exp(x)]),
    Case("x * y", 2, 3, lambda x, y: [x * y], lambda lib, x, y: [x * y]),
    Case("fused sin(x) * y + x", 2, 3, lambda *xs: [_chain(*xs)], lambda lib, *xs: [chain(lib, *xs)], target=TARGET),
    Case("fused loss and gradients", 2, 4, gradients, torch=torch_gradients, target=TARGET),
    Case(
        f"softmax of rows of {WIDTH}", 1, 2, lambda x: [sg.softmax(x, axis=-1)],
        torch=lambda torch, x: [torch.softmax(x, -1)], target=TARGET,
    ),
    Case("sum", 1, 1, **sums(None), target=TARGET),
    Case(f"sum of rows of {WIDTH}", 1, 1, **sums(1), target=TARGET),
    Case(f"sum of columns, {WIDTH} of them", 1, 1, **sums(0), target=TARGET),
]  # fmt: skip


def data(nbytes, k):
    """An input, of whole rows."""
    width = min(WIDTH, math.isqrt(nbytes // 4))
    return np.random.default_rng(k).random((nbytes // 4 // width, width), dtype="float32")


def in_sweepgrad(case, nbytes, device="cuda"):
    library = Sweepgrad(device)
    xs = [library.array(data(nbytes, k)) for k in range(case.inputs)]
    return repeated(library, lambda: case.ours(*xs))


def in_cupy(case, nbytes):
    library = CuPy()
    xs = [library.array(data(nbytes, k)) for k in range(case.inputs)]
    return repeated(library, lambda: case.cupy(library.cupy, *xs))


def in_torch(case, nbytes, compiled=False):
    library = Torch()
    xs = [library.array(data(nbytes, k), tracked=case.torch is torch_gradients) for k in range(case.inputs)]
    call = partial(case.torch, library.torch)
    if compiled:
        if case.torch is torch_gradients:
            call = partial(call, f=library.torch.compile(lambda x, y: loss(library.torch, x, y)))
        else:
            call = library.torch.compile(call)
    return repeated(library, lambda: call(*xs))


def copy(case, nbytes):
    """A copy that reads and writes as many bytes together."""
    library = CuPy()
    source = library.cupy.zeros(case.moved * nbytes // 2, np.uint8)
    target = library.cupy.empty_like(source)

    def run():
        for _ in range(REPEATS):
            target.data.copy_from_device_async(source.data, source.nbytes, library.cupy.cuda.get_current_stream())
        library.synchronize()

    return run


def comparison(case, nbytes):
    contenders = {"sweepgrad": partial(in_sweepgrad, case, nbytes), "copy": partial(copy, case, nbytes)}
    if case.cupy:
        contenders["CuPy"] = partial(in_cupy, case, nbytes)
    contenders["PyTorch"] = partial(in_torch, case, nbytes)
    contenders["torch.compile"] = partial(in_torch, case, nbytes, compiled=True)
    targets = {} if case.target is None else {"copy": case.target}
    return Comparison(f"{case.title}, {nbytes >> 20} MiB", contenders, targets, parts=REPEATS)


@each(*(comparison(case, nbytes) for case in CASES for nbytes in SIZES))
def bench_bandwidth(comparison, contender, measure):
    measure(comparison, contender)
