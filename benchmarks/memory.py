"""Memory of this process in bytes, as Linux counts it; `getrusage` would count that of the process which started it."""

import resource
from pathlib import Path


def resident():
    """What is resident now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak():
    """The most that was resident so far."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))
