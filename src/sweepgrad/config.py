"""Every setting that comes from the environment, and the parsers behind them.

Variables are read when they are needed, not cached; a value that cannot be understood raises `ArgumentError`, which
names the variable, the value and the accepted forms.
"""

import math
import os
import re
import sys
from pathlib import Path

from sweepgrad.errors import ArgumentError

AUTO_SWEEP = "SWEEPGRAD_AUTO_SWEEP"
CACHE_DIR = "SWEEPGRAD_CACHE_DIR"
SETTINGS = (AUTO_SWEEP, CACHE_DIR)

DEFAULT_INTERVAL = 1.0
"""Seconds between two sweeps of the daemon thread when nothing else is said."""

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0}
_INTERVAL = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|)", re.ASCII)
_FORMS = (
    "seconds (`0.5`, `5`), a number with a unit (`500ms`, `2s`, `1m`), "
    f"`on` ({DEFAULT_INTERVAL:g} s), or `off`, `0`, or empty"
)
_MAX_INTERVAL = 7 * 24 * 3600.0


def parse_interval(value: str | float, *, subject: str) -> float | None:
    """Seconds meant by `value`, or None for "do not sweep on a schedule".

    `subject` is what an error message calls the value: the variable's or the parameter's name.
    """
    if isinstance(value, str):
        text = value.strip().lower()
        if text in ("", "off"):
            return None
        if text == "on":
            return DEFAULT_INTERVAL
        match = _INTERVAL.fullmatch(text)
        seconds = float(match[1]) * _UNITS[match[2]] if match else math.nan
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(min(value, 2 * _MAX_INTERVAL))  # an integer may be too large for a float
    else:
        seconds = math.nan
    if seconds == 0:
        return None
    if not 0 < seconds <= _MAX_INTERVAL:
        raise ArgumentError(f"`{subject}` is {value!r}; accepted are {_FORMS}, up to a week")
    return seconds


def auto_sweep_interval() -> float | None:
    """Interval in seconds from `SWEEPGRAD_AUTO_SWEEP`, or None where no daemon thread is wanted."""
    return parse_interval(os.environ.get(AUTO_SWEEP, ""), subject=AUTO_SWEEP)


def cache_dir() -> Path:
    """Folder for compiled kernels: `SWEEPGRAD_CACHE_DIR`, or `sweepgrad` in the user's cache directory."""
    chosen = os.environ.get(CACHE_DIR)
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "sweepgrad"
