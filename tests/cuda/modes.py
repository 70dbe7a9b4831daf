"""In which of three ways there are devices in this process: real, simulated, or compiled for and no more.

`MODE` in the environment says which; importing this module sees to it.
"""

import os
import sys

from sweepgrad.kernels import gpu

MODE = os.environ.get("MODE", "simulator")
SIMULATED, ASSEMBLED = MODE == "simulator", MODE == "assembler"
RUNS = not ASSEMBLED
"""Whether kernels compute anything."""

SETTINGS = {
    mode: {"MODE": mode, gpu.SIMULATE: "1" if mode == "simulator" else "0"}
    for mode in ("device", "simulator", "assembler")
}
"""What has to be in the environment of a process from its start."""


def enter():
    """Let this process have the devices that its environment asks for."""
    assert os.environ.get(gpu.SIMULATE) == SETTINGS[MODE][gpu.SIMULATE], f"mode {MODE}: start Python with its SETTINGS"
    if SIMULATED:
        sys.setswitchinterval(1e-6)  # the simulator waits for its threads without letting go of the interpreter
    if ASSEMBLED:
        from assembler import Assembler

        gpu.loaded = Assembler()


def run(files, mode, *options, limit):
    """Run tests in a process of their own, which has a mode; how many have passed."""
    import re

    from launch import python

    # NumPy's numbers warn in a simulated kernel where a GPU's say nothing.
    fixed = ["-n0", "-q", "-W", "ignore", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
    clean = {"PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": "", "PYTEST_PLUGINS": ""}
    done = python("-m", "pytest", *fixed, *options, *files, settings=SETTINGS[mode] | clean, limit=limit)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr
    return int(re.search(r"(\d+) passed", done.stdout)[1])
