"""The libraries that are compared on a GPU: how each makes an array, waits, and fetches a result."""

import numpy as np

import sweepgrad as sg
from sweepgrad.kernels import gpu

REPEATS = 20
"""Calls of which one lap consists, before one wait."""


class OnDevice:
    """A result that is fetched only if somebody looks at it."""

    def __init__(self, fetch):
        self.fetch = fetch

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.fetch(), dtype)


class Sweepgrad:
    """This library, on the device asked for."""

    def __init__(self, device="cuda"):
        self.device = device

    def array(self, data, tracked=False):
        return sg.asarray(data, device=self.device, requires_grad=tracked)

    def synchronize(self):
        if self.device != "cpu":
            gpu.driver().synchronize()

    def fetch(self, result):
        return result.numpy()


class CuPy:
    """CuPy, which has no gradients."""

    def __init__(self):
        import cupy

        self.cupy = cupy

    def array(self, data, tracked=False):
        return self.cupy.asarray(data)

    def synchronize(self):
        self.cupy.cuda.get_current_stream().synchronize()

    def fetch(self, result):
        return self.cupy.asnumpy(result)


class Torch:
    """PyTorch, where it was built for CUDA."""

    def __init__(self):
        import torch

        if not torch.cuda.is_available():
            raise ImportError("PyTorch here has no CUDA")
        self.torch = torch

    def array(self, data, tracked=False):
        return self.torch.from_numpy(data).to("cuda").requires_grad_(tracked)

    def synchronize(self):
        self.torch.cuda.synchronize()

    def fetch(self, result):
        return result.detach().cpu().numpy()


def repeated(library, once):
    """A lap: `once` several times, and one wait at the end. It returns the last results."""

    def run():
        for _ in range(REPEATS):
            results = once()
        library.synchronize()
        return [OnDevice(lambda one=one: library.fetch(one)) for one in results]

    return run
