"""Overhead of an operation: small arrays, where the interpreter and the graph are all there is to pay for."""

import autograd
import mygrad
import numpy as np
import torch

import sweepgrad as sg
from benchmarks.harness import compare, times

DEPTH, SIZE = 50, 16


def chain():
    """50 multiplications of 16 elements by a variable, forward and backward."""
    start = np.full(SIZE, 1.01)
    ones = np.ones(SIZE)
    x = sg.asarray(start, requires_grad=True)
    ones_sg = sg.asarray(ones)
    t = torch.tensor(start, requires_grad=True)
    ones_torch = torch.tensor(ones)
    m = mygrad.tensor(start)

    def run_sweepgrad():
        x.grad = None
        y = x
        for _ in range(DEPTH):
            y = y * x
        y.backward(ones_sg)

    def run_torch():
        t.grad = None
        y = t
        for _ in range(DEPTH):
            y = y * t
        y.backward(ones_torch)

    def run_mygrad():
        y = m
        for _ in range(DEPTH):
            y = y * m
        y.backward(ones)

    def function(v):
        y = v
        for _ in range(DEPTH):
            y = y * v
        return y

    def run_autograd():
        autograd.make_vjp(function)(start)[0](ones)

    return {"sweepgrad": run_sweepgrad, "PyTorch": run_torch, "autograd": run_autograd, "MyGrad": run_mygrad}


def stress():
    """Two tracked 2 x 2 zeros, one dropped, `sum().backward()` on the other."""

    def run_sweepgrad():
        sg.zeros((2, 2), requires_grad=True)
        b = sg.zeros((2, 2), requires_grad=True)
        b.sum().backward()

    def run_torch():
        torch.zeros((2, 2), requires_grad=True)
        b = torch.zeros((2, 2), requires_grad=True)
        b.sum().backward()

    return {"sweepgrad": run_sweepgrad, "PyTorch": run_torch}


def report():
    """The section of this module."""
    return "\n\n".join(
        [
            "## Overhead of an operation",
            f"{DEPTH} multiplications of {SIZE} float64 elements by a variable, forward and backward:",
            times(compare(chain(), rounds=41, calls=20), "us per multiplication", 1e6 / DEPTH),
            "The stress loop's iteration, two tracked `zeros((2, 2))`, one dropped, `sum().backward()` on the other:",
            times(compare(stress(), rounds=41, calls=500), "us per iteration", 1e6),
        ]
    )
