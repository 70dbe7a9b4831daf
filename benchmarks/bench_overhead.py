"""Overhead of an operation

Small arrays, where the interpreter and the graph are all there is to pay for. The stress iteration is that of the
stress loop below: two tracked `zeros((2, 2))`, one dropped, `sum().backward()` on the other.
"""

import numpy as np

import sweepgrad as sg
from benchmarks.measure import Comparison, each

DEPTH, SIZE = 50, 16
START, ONES = np.full(SIZE, 1.01), np.ones(SIZE)
BATCH, WIDTHS = 32, (64, 64, 10)


def power(x):
    """50 multiplications by x."""
    y = x
    for _ in range(DEPTH):
        y = y * x
    return y


def chain_sweepgrad():
    return chain(sg.asarray(START, requires_grad=True), sg.asarray(ONES))


def chain_torch():
    import torch

    return chain(torch.tensor(START, requires_grad=True), torch.tensor(ONES))


def chain(x, ones):
    """With an interface like PyTorch's."""

    def run():
        x.grad = None
        power(x).backward(ones)
        return [x.grad]

    return run


def chain_mygrad():
    import mygrad

    x = mygrad.tensor(START)

    def run():
        power(x).backward(ONES)
        return [x.grad]

    return run


def chain_autograd():
    import autograd

    return lambda: [autograd.make_vjp(power)(START)[0](ONES)]


def digits():
    """A batch like that of `examples/digits.py`, its labels, and the parameters of two layers."""
    rng = np.random.default_rng(0)
    inputs, hidden, outputs = WIDTHS
    first, second = rng.normal(0, 0.2, (inputs, hidden)), rng.normal(0, 0.2, (hidden, outputs))
    parameters = [first, np.zeros(hidden), second, np.zeros(outputs)]
    images, labels = rng.random((BATCH, inputs)), rng.integers(0, outputs, BATCH)
    return images.astype("float32"), labels, [array.astype("float32") for array in parameters]


def step_sweepgrad():
    images, labels, arrays = digits()
    parameters = [sg.asarray(array, requires_grad=True) for array in arrays]
    optimizer = sg.optim.Adam(parameters, lr=2e-3)
    w1, b1, w2, b2 = parameters

    def run():
        scores = sg.relu(images @ w1 + b1) @ w2 + b2
        loss = -sg.log_softmax(scores)[np.arange(len(labels)), labels].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.detach()]

    return run


def step_torch():
    import torch

    images, labels, arrays = digits()
    images, labels = torch.from_numpy(images), torch.from_numpy(labels)
    inputs, hidden, outputs = WIDTHS
    model = torch.nn.Sequential(torch.nn.Linear(inputs, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, outputs))
    with torch.no_grad():
        for parameter, array in zip(model.parameters(), arrays, strict=True):
            parameter.copy_(torch.from_numpy(array.T))
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

    def run():
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return [loss.detach()]

    return run


def stress_sweepgrad():
    return stress(sg)


def stress_torch():
    import torch

    return stress(torch)


def stress(library):
    def run():
        library.zeros((2, 2), requires_grad=True)
        b = library.zeros((2, 2), requires_grad=True)
        b.sum().backward()
        return [b.grad]

    return run


@each(
    Comparison(
        "one of 50 multiplications of 16 elements, forward and backward",
        {"sweepgrad": chain_sweepgrad, "PyTorch": chain_torch, "autograd": chain_autograd, "MyGrad": chain_mygrad},
        targets={"PyTorch": 0.5, "autograd": 0.25, "MyGrad": 0.25},
        parts=DEPTH,
        rounds=41,
    ),
    Comparison(
        "training step, batch of 32, layers 64-64-10, float32, Adam",
        {"sweepgrad": step_sweepgrad, "PyTorch": step_torch},
        targets={"PyTorch": 0.5},
        rounds=41,
    ),
    Comparison(
        "stress iteration",
        {"sweepgrad": stress_sweepgrad, "PyTorch": stress_torch},
        targets={"PyTorch": 0.5},
        rounds=41,
    ),
)
def bench_overhead(comparison, contender, measure):
    measure(comparison, contender)
