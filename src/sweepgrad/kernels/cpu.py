"""Hands out compiled kernels, from the cache folder or newly compiled. The only module that executes source.

Guarantees
- Nothing is compiled before it is called for. Numba is not imported before that, and not at all for what is in the
  cache.
- A kernel comes back as its entry point: a C function that takes exactly the arrays and numbers it was compiled for,
  does not look at dtypes or shapes, and holds the interpreter's lock unless `nogil` was asked for.
- Code is only used by the version of sweepgrad, Numba, Python and NumPy that it was compiled by, from the same source,
  and on the same kind of processor (a network home has many).
- Where nothing can be kept, because there is no folder that can be used or nothing that tells versions of this package
  apart, each process compiles anew, and says so once. A folder that others can write to is refused.
"""

import hashlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sweepgrad.config import CACHE_DIR, cache_dir
from sweepgrad.kernels.cache import Folder, check_private, tell
from sweepgrad.kernels.loader import Code, Kernel, UnresolvedError, load, target

__all__ = ["COUNTS", "Kernel", "check_private", "compile_kernel", "kept", "kept_in"]

COUNTS = {"compiled": 0, "lost": 0, "loaded": 0}
"""How many kernels this process has compiled, how many of these could not be kept, how many were in the cache."""

# Numba's settings that change what code comes out.
_SETTINGS = ("OPT", "LOOP_VECTORIZE", "SLP_VECTORIZE", "CPU_NAME", "CPU_FEATURES", "ENABLE_AVX", "BOUNDSCHECK")

_lock = threading.RLock()  # one compilation at a time: Numba's own lock is global, too
_kernels: dict[tuple[str, tuple[str, ...]], tuple[Kernel, Kernel]] = {}
_announced: set[str] = set()


if hasattr(os, "register_at_fork"):  # a fork waits until no thread is compiling, so the child can
    os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release)


def compile_kernel(source: str, signature: Sequence[str], *, nogil: bool = False) -> Kernel:
    """The compiled `kernel` of `source` for arguments of the types `signature`.

    A type is a dtype's name for a number, and `name:1C`, `name:4A` for an array with its dimensions and layout. The
    source may import this package's modules `sweepgrad.kernels.*`. With `nogil` and without, it is the same code.
    No array that a kernel writes to may share memory with another: with many arrays, loops that had to check that
    would not be vectorised.
    """
    key = (source, tuple(signature))
    with _lock:
        found = _kernels.get(key)
        if found is None:
            found = _kernels[key] = _obtain(*key)
    return found[nogil]


def kept_in() -> Path | None:
    """The folder in which kernels are kept, made if need be; None if they cannot be kept, which is logged.

    Raises:
        SweepgradError: if other users can write to the folder.
    """
    with _lock:
        folder = _folder()
        return None if folder is None else folder.path


def kept(key: object, make: Callable[[], bytes]) -> bytes:
    """What `make` gives, from the cache folder if it is there: the code of a kernel of another kind.

    `key` is all that it depends on beside what kernels of the processor depend on.
    """
    whole = repr((_identity(), key)).encode()
    name = f"sweepgrad_{hashlib.sha256(whole).hexdigest()[:32]}"
    with _lock:
        folder = _folder()
        content = folder.read(name, whole) if folder is not None else None
        if content is not None:
            COUNTS["loaded"] += 1
            return content
        _announce_compiling(folder)
        content = make()
        COUNTS["compiled"] += 1
        _keep(folder, name, whole, content)
        return content


def _obtain(source: str, signature: tuple[str, ...]) -> tuple[Kernel, Kernel]:
    key = repr((_identity(), source, signature)).encode()
    name = f"sweepgrad_{hashlib.sha256(key).hexdigest()[:32]}"
    folder = _folder()
    content = folder.read(name, key) if folder is not None else None
    if content is not None:
        try:
            kernels = load(Code.unpack(name, content))
        except UnresolvedError as error:
            tell(logging.INFO, "sweepgrad: the kernel %s cannot be loaded (%s) and is compiled anew", name, error)
        else:
            COUNTS["loaded"] += 1
            return kernels
    return _compile(name, key, source, signature, folder)


def _compile(
    name: str, key: bytes, source: str, signature: tuple[str, ...], folder: Folder | None
) -> tuple[Kernel, Kernel]:
    _announce_compiling(folder)
    scope: dict[str, Any] = {"__name__": name}
    exec(compile(source, f"<{name}>", "exec"), scope)
    function = scope["kernel"]
    COUNTS["compiled"] += 1
    try:
        from sweepgrad.kernels.compiler import compile_code

        code = compile_code(name, function, signature)
        kernels = load(code)
    except MemoryError:
        raise  # no fault of Numba's: the caller makes room, and tries again
    except Exception as error:
        return _compile_plainly(function, signature, error)
    _keep(folder, name, key, code.pack())
    return kernels


def _announce_compiling(folder: Folder | None) -> None:
    if "compiling" not in _announced:
        _announced.add("compiling")
        place = f"and keeping them in {folder.path}" if folder is not None else "for this process alone"
        tell(logging.INFO, "sweepgrad: compiling kernels %s; `sweepgrad warmup` compiles the common ones ahead", place)


def _keep(folder: Folder | None, name: str, key: bytes, content: bytes) -> None:
    if folder is None:
        COUNTS["lost"] += 1
        return
    try:
        folder.write(name, key, content)
    except OSError as error:
        COUNTS["lost"] += 1
        _announce_no_cache(f" in {folder.path}", error)


def _compile_plainly(function: Any, signature: tuple[str, ...], error: Exception) -> tuple[Kernel, Kernel]:
    """By Numba's documented functions alone: for a Numba whose inside is not what `kernels.compiler` expects.

    If the fault is the source's, this raises.
    """
    import numba

    from sweepgrad.kernels.compiler import numba_type

    COUNTS["lost"] += 1
    types = tuple(map(numba_type, signature))
    dispatchers: list[Any] = [numba.njit(types, error_model="numpy", nogil=nogil)(function) for nogil in (False, True)]
    if "unknown Numba" not in _announced:
        _announced.add("unknown Numba")
        tell(
            logging.WARNING,
            "sweepgrad: kernels compiled by this Numba (%s) cannot be kept and are compiled anew in each process (%r)",
            numba.__version__,
            error,
        )
    held, released = (dispatcher.overloads[types].entry_point for dispatcher in dispatchers)
    return held, released


@cache
def _identity() -> tuple[object, ...]:
    """All that code depends on beside its source and its types."""
    return (
        *_versions(),
        _sources(),
        sys.version_info[:2],
        getattr(sys, "abiflags", ""),
        object.__basicsize__,
        *target(),
        *(f"{name}={os.environ.get(f'NUMBA_{name}')}" for name in _SETTINGS),
    )


@cache
def _versions() -> tuple[str, str, str, str]:
    import llvmlite
    import numpy

    from sweepgrad._version import __version__

    numba: Any = sys.modules.get("numba")
    if numba is not None and hasattr(numba, "__version__"):
        version = numba.__version__
    else:  # asked of its metadata, since importing it takes half a second
        from importlib.metadata import PackageNotFoundError
        from importlib.metadata import version as version_of

        try:
            version = version_of("numba")
        except PackageNotFoundError:  # as in a program that was put together without it
            import numba as found

            version = found.__version__
    return __version__, version, llvmlite.__version__, numpy.__version__


def _sources() -> str | None:
    """A digest of this folder's modules, some of which kernels import; None where their files cannot be read.

    They may be in an archive, be bytecode without source, or, in a frozen program, be no files at all.
    """
    from importlib.resources import files

    digest = hashlib.sha256()
    count = 0
    try:
        for path in sorted(files(__package__).iterdir(), key=lambda path: path.name):
            if path.name.endswith((".py", ".pyc")):
                text = path.read_bytes()
                digest.update(b"%b %d\n%b" % (path.name.encode(), len(text), text))
                count += 1
    except (OSError, TypeError, AttributeError, NotImplementedError):  # what loaders say that do not know of files
        return None
    return digest.hexdigest() if count else None


@cache
def _folder() -> Folder | None:
    """The folder for code of this identity; None if there cannot be one."""
    own, numba, _, _, sources, *_ = _identity()
    if sources is None:
        _announce_no_cache("", "the files of this package, which tell its versions apart, cannot be read", remedy="")
        return None
    digest = hashlib.sha256(repr(_identity()).encode()).hexdigest()[:12]
    base = None
    try:
        base = cache_dir()
        return Folder(base, f"{own}-numba{numba}-{sys.implementation.cache_tag}-{digest}")
    except OSError as error:
        _announce_no_cache("" if base is None else f" in {base}", error)
        return None


def _announce_no_cache(place: str, why: object, remedy: str = f"; set {CACHE_DIR} to a folder of your own") -> None:
    if "no cache" not in _announced:
        _announced.add("no cache")
        tell(
            logging.WARNING,
            "sweepgrad: kernels cannot be kept%s (%s) and are compiled anew in each process%s",
            place,
            why,
            remedy,
        )
