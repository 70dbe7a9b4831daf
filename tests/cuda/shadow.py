"""Does each kernel of the CPU a second time, as a kernel of a GPU.

With `NUMBA_ENABLE_CUDASIM=1` from the start of the process it runs on Numba's simulator, and what comes out is
compared. Without, it is compiled to the assembly of two kinds of GPU, for which there need be none.
"""

from collections import Counter

import numpy as np
from numba import cuda

from sweepgrad.kernels.cuda import SIMULATED, Launcher, ptx
from sweepgrad.ops.loop import Loop

TOLERANCES = {"float32": 2e-5, "float64": 1e-13}
CAPABILITIES = [(8, 0), (9, 0)]

over, kernel = Loop.over, Loop.kernel
launchers = {}
compiled = set()


class Shadow:
    """While it is on, what the CPU computes of v, r, c and s has its shadow."""

    def __init__(self, monkeypatch):
        self.ways = Counter()
        shadow = self
        monkeypatch.setattr(Loop, "over", lambda self, inputs, n, **sizes: shadow.over(self, inputs, n, **sizes))
        monkeypatch.setattr(Loop, "kernel", lambda self: shadow.kernel(self))

    def over(self, loop, inputs, n, *, outs=(), **sizes):
        before = [out.copy() for out in outs]
        inputs = [x.copy() if isinstance(x, np.ndarray) else x for x in inputs]
        found = over(loop, inputs, n, outs=outs, **sizes)
        self.follow(loop, inputs, n, before, found, **sizes)
        return found

    def kernel(self, loop):
        """The entry point for few elements, whose outputs come as its last arguments."""
        run = kernel(loop)

        def both(*arguments):
            count = len(arguments) - len(loop.results)
            inputs, outs = arguments[:count], arguments[count:]
            before = [out.copy() for out in outs]
            run(*arguments)
            if "x" not in loop.kinds:  # strided data has no kernels on a GPU yet
                self.follow(loop, inputs, outs[0].size, before, outs)

        return both

    def follow(self, loop, inputs, n, before, expected, **sizes):
        if loop not in launchers:
            launchers[loop] = Launcher(*loop._build.args)
        launcher = launchers[loop]
        self.ways[launcher.grid.way] += 1
        if SIMULATED:
            self.compare(launcher, inputs, n, before, expected, **sizes)
        elif launcher.grid not in compiled:
            compiled.add(launcher.grid)
            for capability in CAPABILITIES:
                check_assembly(launcher, capability)

    def compare(self, launcher, inputs, n, before, expected, **sizes):
        on_device = [cuda.to_device(np.ascontiguousarray(x)) if isinstance(x, np.ndarray) else x for x in inputs]
        found = launcher.over(on_device, n, outs=[cuda.to_device(out) for out in before], **sizes)
        for one, right in zip(found, expected, strict=True):
            tolerance = TOLERANCES["float32" if "float32" in (launcher.dtype, str(right.dtype)) else "float64"]
            scale = np.abs(right[np.isfinite(right)]).max(initial=1)
            np.testing.assert_allclose(
                one.copy_to_host(), right, rtol=tolerance, atol=tolerance * scale, err_msg=launcher.grid.first
            )


DOUBLES = ("sin", "cos", "tan", "pow")
"""Whose functions of float32 in NVIDIA's library take a few steps in float64."""


def check_assembly(launcher, capability):
    made = launcher.grid
    for text in ptx(made, launcher.dtype, capability):
        assert f".target sm_{capability[0]}{capability[1]}" in text
        assert ".entry" in text
        types = {launcher.dtype, *(dtype for _, dtype in (*made.inputs, *made.outputs))}
        if types == {"float32"} and not any(f"m.{name}" in made.first + (made.last or "") for name in DOUBLES):
            assert ".f64" not in text, made.first
