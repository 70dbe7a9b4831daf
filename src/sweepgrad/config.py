"""Every setting that comes from the environment, and the parsers behind them.

Variables are read when they are needed: `SWEEPGRAD_AUTO_SWEEP` by `import sweepgrad`, the others when something is
first computed that depends on them. A value that cannot be understood then raises `ArgumentError`, which names the
variable, the value and the accepted forms. One that is blank counts as not set.
"""

import errno
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from sweepgrad.errors import ArgumentError

AUTO_SWEEP = "SWEEPGRAD_AUTO_SWEEP"
CACHE_DIR = "SWEEPGRAD_CACHE_DIR"
POOL_LIMIT = "SWEEPGRAD_POOL_LIMIT"
NUM_THREADS = "SWEEPGRAD_NUM_THREADS"

DEFAULT_INTERVAL = 1.0
"""Seconds between two sweeps of the daemon thread when nothing else is said."""

_UNITS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0}
_INTERVAL = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|m|)", re.ASCII)
_FORMS = (
    "seconds (`0.5`, `5`), a number with a unit (`500ms`, `2s`, `1m`), "
    f"`on` ({DEFAULT_INTERVAL:g} s), or `off`, `0`, or empty"
)
_MAX_INTERVAL = 7 * 24 * 3600.0

DEFAULT_POOL_LIMIT = 1 << 30
"""Bytes that the pool of buffers keeps idle when nothing else is said, or an eighth of the memory if that is less."""

_SIZE_UNITS = {"": 1, "b": 1} | {
    f"{prefix}{unit}": base**power
    for power, prefix in enumerate("kmgt", start=1)
    for unit, base in (("b", 1000), ("ib", 1024))
}
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]i?b|b|)", re.ASCII)
_SIZE_FORMS = "bytes (`1048576`), a number with a unit (`256MB`, `1.5GiB`; kB to TB, KiB to TiB), or `off` or `0`"
_MAX_SIZE = 1 << 50  # below which floats are exact


_COUNT = re.compile(r"\d{1,6}", re.ASCII)


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


def interval_at_import() -> float | None:
    """The same for `import sweepgrad`; of a bad value, the command line tells in its own way."""
    try:
        return auto_sweep_interval()
    except ArgumentError:
        if _is_command_line():
            return None
        raise


def _is_command_line() -> bool:
    """Whether this process was started as `sweepgrad` or as `python -m sweepgrad`."""
    started = getattr(sys, "argv", None) or [""]
    if started[0] == "-m":  # which stands there until the module that was asked for is found
        return re.search(r"(^| )-\w*m ?sweepgrad( |$)", " ".join(sys.orig_argv)) is not None
    return Path(started[0]).name.removesuffix(".exe").removesuffix("-script.py") == "sweepgrad"


def parse_size(value: str | int, *, subject: str) -> int:
    """Bytes meant by `value`; 0 for "off".

    `subject` is what an error message calls the value: the variable's or the parameter's name.
    """
    size: float = -1
    if isinstance(value, str):
        text = value.strip().lower()
        match = _SIZE.fullmatch(text)
        if text == "off":
            size = 0
        elif match:
            size = float(match[1]) * _SIZE_UNITS[match[2]]
    elif isinstance(value, int) and not isinstance(value, bool):
        size = value
    if not 0 <= size <= _MAX_SIZE:
        raise ArgumentError(f"`{subject}` is {value!r}; accepted are {_SIZE_FORMS}, up to 1024 TiB")
    return int(size)


def pool_limit() -> int:
    """Bytes that the pool of buffers may keep idle: `SWEEPGRAD_POOL_LIMIT`, or what suits this machine's memory."""
    chosen = os.environ.get(POOL_LIMIT, "")
    if chosen.strip():
        return parse_size(chosen, subject=POOL_LIMIT)
    try:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # a system that does not say
        return DEFAULT_POOL_LIMIT
    return min(DEFAULT_POOL_LIMIT, memory // 8) if memory > 0 else DEFAULT_POOL_LIMIT


def cache_dir() -> Path:
    """Folder for compiled kernels, absolute: `SWEEPGRAD_CACHE_DIR`, or `sweepgrad` in the user's cache directory.

    Raises:
        OSError: if nothing tells where the user's files are.
    """
    chosen = os.environ.get(CACHE_DIR, "")
    if chosen.strip():
        try:
            return Path(chosen).expanduser().absolute()
        except RuntimeError:
            raise ArgumentError(
                f"`{CACHE_DIR}` is {chosen!r}; accepted are paths of folders, and no user is known whose home `~` is"
            ) from None
    if sys.platform == "win32":
        given, usual = os.environ.get("LOCALAPPDATA", ""), ("AppData", "Local")
    elif sys.platform == "darwin":
        given, usual = "", ("Library", "Caches")
    else:
        given, usual = os.environ.get("XDG_CACHE_HOME", ""), (".cache",)
    if os.path.isabs(given):  # a relative one is not valid, says the standard of the XDG
        return Path(given) / "sweepgrad"
    try:
        return Path.home().absolute().joinpath(*usual, "sweepgrad")
    except RuntimeError:
        raise FileNotFoundError(errno.ENOENT, "there is no home directory") from None


def num_threads() -> int:
    """Threads that one kernel may use: `SWEEPGRAD_NUM_THREADS`, or the cores that this process may run on."""
    chosen = os.environ.get(NUM_THREADS, "").strip()
    if chosen:
        if not _COUNT.fullmatch(chosen) or int(chosen) < 1:
            raise ArgumentError(
                f"`{NUM_THREADS}` is {chosen!r}; accepted are integers from 1 to 999999, or nothing for all cores"
            )
        return int(chosen)
    return usable_cores()


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SETTINGS: dict[str, Callable[[], object]] = {
    AUTO_SWEEP: auto_sweep_interval,
    CACHE_DIR: cache_dir,
    NUM_THREADS: num_threads,
    POOL_LIMIT: pool_limit,
}
"""Every variable, and what reads it."""
