"""The folder in which machine code is kept, and its entries. Knows bytes, not kernels.

Guarantees
- What is read was written by this user and came out whole. Folders belong to the user and are closed to others, and so
  is each entry; both are looked at through the descriptors that are then read from, so nothing can be put in their
  place in between. An entry begins with a digest of its key and its content. Nothing is ever unpickled.
- A reader finds a whole entry or none, whatever other processes write at the same time, and whenever they end.
- An entry that is damaged, cannot be read or is something else than a file counts as absent, and writing replaces it.
"""

import hashlib
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sweepgrad.config import CACHE_DIR
from sweepgrad.errors import SweepgradError

log = logging.getLogger("sweepgrad")

_MAGIC = b"sweepgrad kernel 1\n"
_SHARED = stat.S_IWGRP | stat.S_IWOTH
_OWNED = hasattr(os, "getuid")
_DESCRIPTORS = _OWNED and {os.open, os.mkdir, os.unlink, os.rename} <= os.supports_dir_fd
_READ = os.O_RDONLY | getattr(os, "O_BINARY", 0)
_READ_ENTRY = _READ | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # not to wait for a pipe's writer
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


class Folder:
    """The folder `name` within the folder `base`, which are made if need be."""

    def __init__(self, base: Path, name: str) -> None:
        """Raise SweepgradError if other users can write to either, OSError if there can be no such folder."""
        self.base = base
        self.path = base / name
        self._make()

    def read(self, name: str, key: bytes) -> bytes | None:
        """The content of the entry `name` if it is whole and was written for `key`."""
        try:
            with self._opened() as within:
                descriptor = os.open(self._at(name, within), _READ_ENTRY, dir_fd=within)
        except FileNotFoundError:
            return None
        except OSError as error:
            tell(logging.INFO, "sweepgrad: the kernel %s cannot be read (%s)", self.path / name, error)
            return None
        try:
            with open(descriptor, "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or _fault(status):
                    raise OSError("not a file of this user alone")
                data = file.read()
            head, content = data[: len(_MAGIC) + 32], data[len(_MAGIC) + 32 :]
            if head != _head(key, content):
                raise OSError("damaged")
        except OSError as error:
            tell(logging.INFO, "sweepgrad: the kernel %s is of no use (%s)", self.path / name, error)
            return None
        return content

    def write(self, name: str, key: bytes, content: bytes) -> None:
        """Keep `content` as the entry `name`; OSError if that cannot be done."""
        try:
            self._write(name, _head(key, content) + content)
        except FileNotFoundError:  # somebody has removed the folder since
            self._make()
            self._write(name, _head(key, content) + content)

    def _write(self, name: str, data: bytes) -> None:
        with self._opened() as within:
            temporary = self._at(f"{name}.{secrets.token_hex(8)}.tmp", within)
            final = self._at(name, within)
            try:
                with open(os.open(temporary, _WRITE, 0o600, dir_fd=within), "wb") as file:
                    file.write(data)
                try:
                    os.replace(temporary, final, src_dir_fd=within, dst_dir_fd=within)
                except OSError:
                    if not self._is_folder(final, within):
                        raise
                    shutil.rmtree(final, dir_fd=within)
                    os.replace(temporary, final, src_dir_fd=within, dst_dir_fd=within)
            except BaseException:
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=within)
                raise

    def _make(self) -> None:
        self.base.mkdir(parents=True, exist_ok=True, mode=0o700)
        check_private(self.base)  # before anything is put into it
        self.path.mkdir(exist_ok=True, mode=0o700)
        with self._opened():
            pass

    @staticmethod
    def _is_folder(name: str, within: int | None) -> bool:
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=within, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def _at(self, name: str, within: int | None) -> str:
        return str(self.path / name) if within is None else name

    @contextmanager
    def _opened(self) -> Iterator[int | None]:
        """A descriptor of this folder, once it and its parent are known to be private; None where there are none."""
        if not _DESCRIPTORS:
            yield None
            return
        base = os.open(self.base, os.O_RDONLY | os.O_DIRECTORY)
        try:
            _require_private(self.base, os.fstat(base))
            own = os.open(self.path.name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=base)
        finally:
            os.close(base)
        try:
            _require_private(self.path, os.fstat(own))
            yield own
        finally:
            os.close(own)


def tell(level: int, message: str, *args: object) -> None:
    """Log; where that fails, as it does with a standard error that is closed, no computation fails with it."""
    with suppress(Exception):
        log.log(level, message, *args)


def _head(key: bytes, content: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(b"%d\n%b%b" % (len(key), key, content)).digest()


def _fault(status: os.stat_result) -> str | None:
    """What lets other users write to a file or folder, if anything does."""
    if not _OWNED:
        return None
    if status.st_uid != os.getuid():
        return f"belongs to another user (id {status.st_uid})"
    return "can be written by other users" if status.st_mode & _SHARED else None


def _require_private(folder: Path, status: os.stat_result) -> None:
    fault = _fault(status)
    if fault is not None:
        raise SweepgradError(
            f"the cache folder {folder} {fault}, and what it holds is executed; close it (chmod 700), "
            f"or set `{CACHE_DIR}` to a folder of your own"
        )


def check_private(folder: Path) -> None:
    """Raise SweepgradError if another user owns `folder` or can write into it."""
    _require_private(folder, os.stat(folder))
