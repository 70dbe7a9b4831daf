"""Fused functions

Value and gradients of a function that sweepgrad compiles into kernels (`sweepgrad.fuse`). The peers run its operations
one by one (PyTorch) or compile it, too (torch.compile, jax.jit). float64 unless said.
"""

from functools import partial
from types import SimpleNamespace

import numpy as np

from benchmarks.measure import BEST, Comparison, each

DEPTH = 50


# --- the functions, of a library and its arrays ---------------------------------------------------------------------


def expression(lib, x, y):
    return lib.sum(lib.exp(-(x * x)) * y + x * y)


def power(lib, x):
    y = x
    for _ in range(DEPTH):
        y = y * x
    return lib.sum(y)


def mixture(lib, x, means, log_scales, log_weights):
    """Log-likelihood of a Gaussian mixture, less its constant."""
    z = (x - means) * lib.exp(-log_scales)
    return lib.sum(lib.logsumexp(log_weights - log_scales - 0.5 * (z * z), axis=1))


def layer(lib, x, gamma, beta, weights):
    """Layer norm, then GELU."""
    return lib.sum(lib.gelu(lib.layer_norm(x, gamma, beta)) * weights)


def layer_norm(lib, x, gamma, beta):
    """For libraries that have none."""
    centred = x - lib.mean(x, axis=1, keepdims=True)
    variance = lib.mean(centred * centred, axis=1, keepdims=True)
    return centred / lib.sqrt(variance + 1e-5) * gamma + beta


# --- the libraries --------------------------------------------------------------------------------------------------


def in_sweepgrad(function, make, by):
    import sweepgrad as sg
    from sweepgrad import fuse

    sg_lib = library(sg, sg.logsumexp, sg.gelu, partial(layer_norm, sg))
    compute = sg.value_and_grad(fuse(lambda *arrays: function(sg_lib, *arrays)), argnums=by)
    inputs = [sg.asarray(array) for array in make()]
    return values_of(compute, inputs)


def in_torch(function, make, by, *, through=lambda torch, f: f):
    import torch
    from torch.nn import functional

    def norm(x, gamma, beta):
        return functional.layer_norm(x, gamma.shape, gamma, beta)

    torch_lib = library(torch, torch.logsumexp, functional.gelu, norm)
    forward = through(torch, lambda *arrays: function(torch_lib, *arrays))
    inputs = [torch.from_numpy(array).requires_grad_(k in by) for k, array in enumerate(make())]
    variables = [inputs[k] for k in by]

    def compute(*arrays):
        value = forward(*arrays)
        return value.detach(), torch.autograd.grad(value, variables)

    return values_of(compute, inputs)


def in_compiled_torch(function, make, by):
    return in_torch(function, make, by, through=lambda torch, f: torch.compile(f))


def in_jax(function, make, by):
    import jax

    jax.config.update("jax_enable_x64", True)
    jax_lib = library(
        jax.numpy, jax.nn.logsumexp, partial(jax.nn.gelu, approximate=False), partial(layer_norm, jax.numpy)
    )
    compute = jax.jit(jax.value_and_grad(lambda *arrays: function(jax_lib, *arrays), argnums=by))
    inputs = [jax.numpy.asarray(array) for array in make()]
    return values_of(lambda *arrays: jax.block_until_ready(compute(*arrays)), inputs)


def library(module, logsumexp, gelu, layer_norm):
    """What the functions above need: NumPy's functions from the module, and others that have different homes."""
    return SimpleNamespace(sum=module.sum, exp=module.exp, logsumexp=logsumexp, gelu=gelu, layer_norm=layer_norm)


def values_of(compute, inputs):
    def run():
        value, gradients = compute(*inputs)
        return [value, *gradients]

    return run


CONTENDERS = {
    "sweepgrad": in_sweepgrad,
    "PyTorch": in_torch,
    "torch.compile": in_compiled_torch,
    "jax.jit": in_jax,
}


# --- the comparisons ------------------------------------------------------------------------------------------------


def uniform(*shapes, dtype="float64"):
    """Arrays of these shapes, of numbers from 0 to 1."""
    rng = np.random.default_rng(0)
    return [rng.random(shape, dtype=dtype) for shape in shapes]


def comparison(title, function, make, by, targets):
    """`make` returns the inputs, `by` are the positions of those that the gradients are by."""
    contenders = {name: partial(f, function, make, by) for name, f in CONTENDERS.items()}
    return Comparison(title, contenders, targets)


@each(
    comparison(
        "sum(exp(-(x * x)) * y + x * y), 4M elements",
        expression,
        partial(uniform, 4_000_000, 4_000_000),
        by=(0, 1),
        targets={"PyTorch": 1 / 15, "torch.compile": 0.4, "jax.jit": 1 / 8},
    ),
    comparison(
        "50 multiplications of 16 elements, sum", power, partial(uniform, 16), by=(0,), targets={"PyTorch": 0.05}
    ),
    comparison(
        "Gaussian mixture, 8 components, 200,000 points",
        mixture,
        partial(uniform, (200_000, 1), 8, 8, 8),
        by=(1, 2, 3),
        targets={BEST: 0.6},
    ),
    comparison(
        "layer norm and GELU of 4096 x 1024, float32",
        layer,
        partial(uniform, (4096, 1024), 1024, 1024, (4096, 1024), dtype="float32"),
        by=(0, 1, 2),
        targets={BEST: 0.6},
    ),
)
def bench_fuse(comparison, contender, measure):
    measure(comparison, contender)
