"""Compiles kernel source with Numba and keeps the machine code on disk. The only module that executes source.

Guarantees
- Nothing is compiled before it is called for, and Numba is not imported before that.
- A kernel comes back as its entry point: a C function that takes exactly the arrays and numbers it was compiled for,
  checks nothing, and holds the interpreter's lock unless `nogil` was asked for.
- The cache holds pickles, so its folder is the user's own, closed to others, or it is refused. A damaged entry is
  rebuilt, and a folder that cannot be written means compiling anew, never a crash.
"""

import hashlib
import logging
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from sweepgrad.config import CACHE_DIR, cache_dir
from sweepgrad.errors import SweepgradError

log = logging.getLogger("sweepgrad")

Kernel = Callable[..., None]

_lock = threading.RLock()  # one compilation at a time: Numba's own lock is global, too
_kernels: dict[tuple[str, tuple[str, ...], bool], Kernel] = {}
_state: dict[str, Any] = {"folder": None, "announced": False}


if hasattr(os, "register_at_fork"):  # a fork waits until no thread is compiling, so the child can
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def compile_kernel(source: str, signature: Sequence[str], *, nogil: bool = False) -> Kernel:
    """The compiled `kernel` of `source` for arguments of the types `signature`.

    A type is a dtype's name for a number, and `name:1C`, `name:4A` for an array with its dimensions and layout.
    """
    key = (source, tuple(signature), nogil)
    with _lock:
        found = _kernels.get(key)
        if found is None:
            found = _kernels[key] = _build(*key)
    return found


def _build(source: str, signature: tuple[str, ...], nogil: bool) -> Kernel:
    import numba

    njit: Any = numba.njit
    types = tuple(_numba_type(name) for name in signature)
    options = {"error_model": "numpy", "nogil": nogil}
    digest = hashlib.sha256(repr((source, signature, nogil)).encode()).hexdigest()[:32]
    path = _source_file(f"k{digest}.py", source)
    # A module that can be imported, since Numba does that when it loads the cache entry, and one for each kernel, since
    # its name is part of the machine code's symbols.
    module = sys.modules[f"sweepgrad_kernel_{digest}"] = ModuleType(f"sweepgrad_kernel_{digest}")
    exec(compile(source, str(path or f"<sweepgrad kernel {digest}>"), "exec"), module.__dict__)
    kernel = module.kernel
    if path is not None:
        try:
            dispatcher: Any = njit(types, cache=True, **options)(kernel)
        except Exception as error:  # a damaged entry can raise anything at all; a real fault raises again below
            log.info("sweepgrad: the cache entry of %s is not usable (%r) and is rebuilt", path.name, error)
            for stale in path.parent.glob(f"__pycache__/{path.stem}*"):
                stale.unlink(missing_ok=True)
        else:
            return dispatcher.overloads[types].entry_point  # type: ignore[no-any-return]
    dispatcher = njit(types, **options)(kernel)
    return dispatcher.overloads[types].entry_point  # type: ignore[no-any-return]


def _numba_type(name: str) -> Any:
    import numba

    dtype, _, layout = name.partition(":")
    array: Any = numba.types.Array
    scalar: Any = numba.boolean if dtype == "bool" else getattr(numba, dtype)
    return array(scalar, int(layout[:-1]), layout[-1]) if layout else scalar


def _source_file(name: str, source: str) -> Path | None:
    """The file that stands for `source` in the cache folder, written if new; None where nothing can be kept."""
    folder = _state["folder"]
    if folder is None:
        folder = _state["folder"] = _open_folder()
    if folder is False:
        return None
    path: Path = folder / name
    if not path.exists():
        try:
            descriptor, temporary = tempfile.mkstemp(dir=folder, suffix=".tmp")
            with os.fdopen(descriptor, "w") as file:
                file.write(source)
            Path(temporary).replace(path)
        except OSError as error:
            _announce_no_cache(folder, error)
            return None
    return path


def _open_folder() -> Path | bool:
    """The folder of this sweepgrad, Numba and Python, made if need be; False if there cannot be one."""
    import numba

    from sweepgrad._version import __version__

    base = cache_dir()
    tag = f"{__version__}-numba{numba.__version__}-{sys.implementation.cache_tag}"
    try:
        base.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_private(base)
        folder = base / tag
        folder.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        _announce_no_cache(base, error)
        return False
    return folder


def _announce_no_cache(folder: Path, error: OSError) -> None:
    if not _state["announced"]:
        _state["announced"] = True
        log.warning(
            "sweepgrad: kernels cannot be kept in %s (%s) and are compiled anew in each process; set %s to a folder "
            "of your own",
            folder,
            error,
            CACHE_DIR,
        )


def check_private(folder: Path) -> None:
    """Raise SweepgradError if another user owns `folder` or can write into it."""
    if not hasattr(os, "getuid"):
        return
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise SweepgradError(
            f"the cache folder {folder} can be written by other users, and what it holds is executed; "
            f"close it (chmod 700) or set `{CACHE_DIR}` to a folder of your own"
        )
