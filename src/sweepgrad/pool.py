"""The pool of memory for large results: what it holds, and how much it may keep.

Shaped like Python's `gc`: `stats`, `empty`, `set_limit`, `get_limit`. The memory of an array of 256 KiB or more goes to
the pool once the array and all that shares its memory are dead, and is used for the next result of its size.
"""

from sweepgrad import config as _config
from sweepgrad.arrays import empty_idle as _empty_idle
from sweepgrad.kernels.buffers import PoolStats
from sweepgrad.kernels.buffers import pool as _pool


def stats() -> PoolStats:
    """The pool's counts, read together.

    Example:
        >>> import sweepgrad as sg
        >>> sg.pool.stats().idle_bytes <= sg.pool.get_limit()
        True
    """
    return _pool.stats()


def empty() -> int:
    """Free all memory that is idle in the pool, and on GPUs; the bytes that were freed.

    Example:
        >>> import sweepgrad as sg
        >>> freed = sg.pool.empty()
        >>> sg.pool.stats().idle_bytes
        0
    """
    return _pool.clear() + _empty_idle()


def set_limit(limit: int | str) -> None:
    """Set the most bytes that are kept idle; where there are more, the memory that is idle longest is freed.

    `limit` takes the same forms as `SWEEPGRAD_POOL_LIMIT`: `1048576`, `"256MB"`, `"1.5GiB"`; 0 or `"off"` to keep
    nothing. What is returned to the pool is counted against the limit at the next operation or call of this module.

    Raises:
        ValueError: if `limit` is none of these.

    Example:
        >>> import sweepgrad as sg
        >>> before = sg.pool.get_limit()
        >>> sg.pool.set_limit("256MiB")
        >>> sg.pool.get_limit()
        268435456
        >>> sg.pool.set_limit(before)
    """
    _pool.limit = _config.parse_size(limit, subject="limit")


def get_limit() -> int:
    """The most bytes that are kept idle: by default 1 GiB, or an eighth of the machine's memory if that is less."""
    return _pool.limit


__all__ = ["PoolStats", "empty", "get_limit", "set_limit", "stats"]
