"""Optimisers: each updates all its parameters in one compiled pass per parameter."""

from sweepgrad.optim.optimizers import SGD, Adam, AdamW, Optimizer

__all__ = ["SGD", "Adam", "AdamW", "Optimizer"]
