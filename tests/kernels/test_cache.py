"""The kernel cache: what is kept is found again, what is damaged is rebuilt, what is not the user's own is refused."""

import errno
import itertools
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from functools import cache as cached
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launch import LIMIT, python
from sweepgrad.config import CACHE_DIR
from sweepgrad.errors import SweepgradError
from sweepgrad.kernels import cache, cpu, loader
from sweepgrad.kernels.cache import Folder

POSIX = pytest.mark.skipif(os.name != "posix", reason="owners and modes as POSIX has them")
NUMBERS = itertools.count(1000)
SIGNATURE = ["float64:1C", "float64:1C"]


def source_of(number, line="o[i] = x[i] + {number}"):
    return f"def kernel(x, o):\n    for i in range(o.size):\n        {line.format(number=number)}\n"


class Process:
    """This process as one that has just started with an empty cache folder: what it compiled and what it found."""

    def __init__(self, monkeypatch, base):
        self.monkeypatch = monkeypatch
        self.base = base
        self.number = next(NUMBERS)  # so that no other test has loaded the same code
        self.restart()

    def restart(self):
        self.monkeypatch.setenv(CACHE_DIR, str(self.base))
        self.monkeypatch.setattr(cpu, "_kernels", {})
        self.monkeypatch.setattr(cpu, "_announced", set())
        self.monkeypatch.setattr(cpu, "COUNTS", Counter(compiled=0, lost=0, loaded=0))
        for one in (cpu._folder, cpu._identity, cpu._versions):
            one.cache_clear()
        return self

    def use(self, **options):
        """Run a kernel, and tell how many were compiled, lost and loaded in this process."""
        out = np.zeros(3)
        cpu.compile_kernel(source_of(self.number), SIGNATURE, **options)(np.arange(3.0), out)
        assert out.tolist() == [self.number, self.number + 1, self.number + 2]
        return tuple(cpu.COUNTS[name] for name in ("compiled", "lost", "loaded"))

    def entries(self):
        return sorted(self.base.glob("*/*"))


COMPILED, LOST, LOADED = (1, 0, 0), (1, 1, 0), (0, 0, 1)


@pytest.fixture
def process(monkeypatch, tmp_path):
    yield Process(monkeypatch, tmp_path / "cache")
    monkeypatch.undo()
    for one in (cpu._folder, cpu._identity, cpu._versions):
        one.cache_clear()


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "cache", "here")


# --- found again ----------------------------------------------------------------------------------------------------

STEP = """
import logging, sys
logging.basicConfig(level=logging.INFO)
logging.getLogger("numba").setLevel(logging.WARNING)
import sweepgrad as sg
from sweepgrad.kernels.cpu import COUNTS
x = sg.ones((3,), requires_grad=True)
sg.sum(sg.exp(x) * x).backward()
print(x.grad, COUNTS["compiled"], COUNTS["lost"], COUNTS["loaded"], "numba" in sys.modules, sep="|")
"""


def test_a_second_process_compiles_nothing_and_does_without_numba(tmp_path):
    first, second = (python("-c", STEP, settings={CACHE_DIR: str(tmp_path / "cache")}) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    grad, compiled, *rest = first.stdout.strip().split("|")
    assert rest == ["0", "0", "True"]
    assert int(compiled) >= 3
    assert second.stdout.strip().split("|") == [grad, "0", "0", compiled, "False"]
    (said,) = first.stderr.splitlines()
    assert said.startswith("INFO:sweepgrad:sweepgrad: compiling kernels ")
    assert str(tmp_path / "cache") in said
    assert "`sweepgrad warmup`" in said
    assert second.stderr == ""


def test_one_compilation_makes_both_entry_points(process):
    assert process.use() == process.use(nogil=True) == COMPILED
    assert process.restart().use(nogil=True) == process.use() == LOADED
    assert len(process.entries()) == 1


def test_threads_that_ask_at_once_compile_once(process):
    barrier, counts = threading.Barrier(4, timeout=LIMIT), []

    def ask():
        barrier.wait()
        counts.append(process.use())

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert counts == [COMPILED] * 4


def test_processes_that_write_at_once(tmp_path):
    """Each finds what it needs, and what they leave is whole."""
    environment = os.environ | {CACHE_DIR: str(tmp_path / "cache"), "SWEEPGRAD_AUTO_SWEEP": ""}
    options = {"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", STEP], **options) for _ in range(4)]
    outputs = [one.communicate(timeout=2 * LIMIT) for one in running]
    assert [one.returncode for one in running] == [0] * 4, outputs
    assert len({out.split("|")[0] for out, _ in outputs}) == 1
    last = python("-c", STEP, settings={CACHE_DIR: str(tmp_path / "cache")})
    _, compiled, lost, loaded, _ = last.stdout.strip().split("|")
    assert (compiled, lost) == ("0", "0")
    entries = list((tmp_path / "cache").glob("*/*"))
    assert len(entries) == int(loaded)
    assert not [path for path in entries if path.suffix == ".tmp"]


# --- damaged --------------------------------------------------------------------------------------------------------


def swap(path, data):
    path.unlink()
    path.write_bytes(data)


class Bomb:
    """What runs when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a cache entry was unpickled",)


def make_folder(path, *, full=False):
    path.unlink()
    path.mkdir()
    if full:
        (path / "inside").write_text("")


def make_link(path):
    other = path.with_name("other")
    path.rename(other)
    path.symlink_to(other)


def make_pipe(path):
    path.unlink()
    os.mkfifo(path)


DAMAGE = {
    "gone": Path.unlink,
    "empty": lambda path: swap(path, b""),
    "half": lambda path: swap(path, path.read_bytes()[: path.stat().st_size // 2]),
    "only the head": lambda path: swap(path, path.read_bytes()[: len(cache._MAGIC) + 32]),
    "one byte short": lambda path: swap(path, path.read_bytes()[:-1]),
    "one byte more": lambda path: swap(path, path.read_bytes() + b"\0"),
    "one bit": lambda path: swap(path, path.read_bytes()[:-9] + bytes([path.read_bytes()[-9] ^ 1]) + b"\0" * 8),
    "noise": lambda path: swap(path, np.random.default_rng(0).bytes(4000)),
    "zeros": lambda path: swap(path, bytes(path.stat().st_size)),
    "a pickle": lambda path: swap(path, pickle.dumps(Bomb())),
    "a folder": make_folder,
    "a full folder": lambda path: make_folder(path, full=True),
    "a link": pytest.param(make_link, marks=POSIX),
    "a pipe": pytest.param(make_pipe, marks=POSIX),
    "unreadable": pytest.param(lambda path: path.chmod(0), marks=POSIX),
    "written by others": pytest.param(lambda path: path.chmod(0o622), marks=POSIX),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_entry_is_rebuilt_once(damage, process):
    assert process.use() == COMPILED
    (path,) = process.entries()
    damage(path)
    process.restart()
    if path.is_file() and not path.is_symlink() and os.access(path, os.R_OK) and path.stat().st_mode & 0o777 == 0:
        assert process.use() == LOADED  # root reads everything
        return
    assert process.use() == COMPILED
    assert process.restart().use() == LOADED
    assert path.is_file()
    assert not path.is_symlink()


def test_an_entry_for_another_kernel_is_not_used(process):
    assert process.use() == COMPILED
    (theirs,) = process.entries()
    process.number = next(NUMBERS)
    process.use()
    (ours,) = set(process.entries()) - {theirs}
    ours.write_bytes(theirs.read_bytes())
    assert process.restart().use() == COMPILED
    assert process.restart().use() == LOADED


def test_an_entry_that_needs_what_is_not_there_is_rebuilt(process, monkeypatch):
    """LLVM would end the process."""
    pack = loader.Code.pack

    def needing(code):
        return pack(loader.Code(code.name, (*code.needs, "sweepgrad_no_such_symbol"), code.binary))

    monkeypatch.setattr(loader.Code, "pack", needing)
    assert process.use() == COMPILED
    monkeypatch.setattr(loader.Code, "pack", pack)
    assert process.restart().use() == COMPILED
    assert process.restart().use() == LOADED


@given(content=st.binary(max_size=200), key=st.binary(max_size=20), change=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_what_is_read_is_what_was_written_or_nothing(folder, content, key, change):
    folder.write("one", key, content)
    assert folder.read("one", key) == content
    path = folder.path / "one"
    data = bytearray(path.read_bytes())
    position = change.draw(st.integers(0, len(data) - 1))
    match change.draw(st.sampled_from(["cut", "flip", "insert", "other key"])):
        case "cut":
            del data[position:]
        case "flip":
            data[position] ^= 1 << change.draw(st.integers(0, 7))
        case "insert":
            data.insert(position, change.draw(st.integers(0, 255)))
        case "other key":
            assert folder.read("one", key + b"x") is None
            return
    path.write_bytes(data)
    assert folder.read("one", key) is None
    folder.write("one", key, content)
    assert folder.read("one", key) == content
    assert os.listdir(folder.path) == ["one"]


def test_key_and_content_are_told_apart(folder):
    folder.write("one", b"key", b"content")
    assert folder.read("one", b"keyc") is None
    assert folder.read("absent", b"key") is None


# --- what an entry is good for --------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["_versions", "_sources", "target"])
def test_other_versions_sources_and_processors_have_other_folders(what, process, monkeypatch):
    assert process.use() == COMPILED
    own = getattr(cpu, what)
    value = own()
    changed = (*value[:-1], "other") if isinstance(value, tuple) else "other"
    monkeypatch.setattr(cpu, what, cached(lambda: changed))
    assert process.restart().use() == COMPILED
    monkeypatch.setattr(cpu, what, own)
    assert process.restart().use() == LOADED
    assert len({path.parent for path in process.entries()}) == 2


def test_the_digest_of_the_sources_covers_what_kernels_import(monkeypatch, tmp_path):
    folder = tmp_path / "some_kernels"
    folder.mkdir()
    for name in ("__init__.py", "a.py", "b.py"):
        (folder / name).write_text(f"# {name}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cpu, "__package__", "some_kernels")
    seen = [cpu._sources()]
    for change in (
        lambda: (folder / "b.py").write_text("# b.py "),
        lambda: (folder / "c.py").write_text(""),
        lambda: (folder / "c.py").rename(folder / "d.py"),
        lambda: (folder / "d.py").rename(folder / "d.pyc"),
    ):
        change()
        seen.append(cpu._sources())
    assert len(set(seen)) == 5
    assert None not in seen
    for path in folder.iterdir():
        path.unlink()
    assert cpu._sources() is None
    del sys.modules["some_kernels"]


def test_numbas_settings_count(process, monkeypatch):
    assert process.use() == COMPILED
    monkeypatch.setenv("NUMBA_CPU_NAME", "generic")
    cpu._identity.cache_clear()
    assert process.restart().use() == COMPILED


# --- whose folder it is ---------------------------------------------------------------------------------------------


def refused(process, folder):
    """That `folder` is refused with an error that says what to do, and nothing is compiled or loaded."""
    with pytest.raises(SweepgradError) as found:
        process.restart().use()
    for part in (str(folder), "what it holds is executed", CACHE_DIR):
        assert part in str(found.value)
    assert not +cpu.COUNTS
    return True


@POSIX
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o1777, 0o720])
def test_a_folder_that_others_can_write_to_is_refused(mode, process):
    assert process.use() == COMPILED
    own = process.entries()[0].parent
    for folder in (process.base, own):
        folder.chmod(mode)
        assert refused(process, folder)
        folder.chmod(0o700)
    assert process.restart().use() == LOADED


@POSIX
def test_a_new_folder_is_closed(process):
    before = os.umask(0)
    try:
        process.use()
    finally:
        os.umask(before)
    (entry,) = process.entries()
    assert [path.stat().st_mode & 0o777 for path in (process.base, entry.parent, entry)] == [0o700, 0o700, 0o600]


@POSIX
def test_another_users_folder_is_refused(process, monkeypatch):
    assert process.use() == COMPILED
    own = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: own + 1)
    assert refused(process, process.base)


@POSIX
def test_the_folder_is_looked_at_again_at_each_use(process):
    """Not by its name: what was looked at is what is read."""
    process.use()
    process.number = next(NUMBERS)
    process.base.chmod(0o777)
    with pytest.raises(SweepgradError, match="can be written by other users"):
        process.use()


@POSIX
def test_a_link_is_as_good_as_what_it_leads_to(process, tmp_path):
    assert process.use() == COMPILED
    own = process.entries()[0].parent
    elsewhere = tmp_path / "elsewhere"
    own.rename(elsewhere)
    own.symlink_to(elsewhere)
    assert process.restart().use() == LOADED
    elsewhere.chmod(0o777)
    assert refused(process, own)


@POSIX
@pytest.mark.skipif(os.name == "posix" and os.geteuid() != 0, reason="only root can give files away")
def test_what_another_user_left_in_the_folder_is_not_used(process):
    assert process.use() == COMPILED
    (entry,) = process.entries()
    os.chown(entry, 12345, -1)
    assert process.restart().use() == COMPILED
    assert entry.stat().st_uid == os.getuid()
    os.chown(entry.parent, 12345, -1)
    assert refused(process, entry.parent)


# --- where nothing can be kept --------------------------------------------------------------------------------------


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("what", ["file", "under a file"])
def test_no_folder_is_said_once(what, process, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    process.base = tmp_path / "file" if what == "file" else tmp_path / "file" / "cache"
    assert process.restart().use() == LOST
    process.number = next(NUMBERS)
    assert process.use() == (2, 2, 0)
    (said,) = warnings(caplog)
    assert str(process.base) in said
    assert CACHE_DIR in said


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EDQUOT])
def test_a_folder_that_takes_nothing_is_said_once(code, process, monkeypatch, caplog):
    def fail(*args, **options):
        raise OSError(code, os.strerror(code))

    process.use()
    (kept,) = process.entries()
    monkeypatch.setattr(os, "replace", fail)
    assert process.restart().use() == LOADED
    first = process.number
    for _ in range(2):
        process.number = next(NUMBERS)
        process.use()
    assert cpu.COUNTS == {"compiled": 2, "lost": 2, "loaded": 1}
    (said,) = warnings(caplog)
    assert os.strerror(code) in said
    assert process.entries() == [kept]
    process.number = first
    assert process.restart().use() == LOADED


def test_a_folder_that_is_removed_meanwhile_is_made_again(process):
    process.use()
    for path in process.entries():
        path.unlink()
        path.parent.rmdir()
    process.base.rmdir()
    process.number = next(NUMBERS)
    assert process.use() == (2, 0, 0)
    assert process.restart().use() == LOADED


def test_an_unknown_numba_still_compiles(process, monkeypatch, caplog):
    from sweepgrad.kernels import compiler

    def fail(*args, **options):
        raise AttributeError("CPUCodeLibrary has changed")

    monkeypatch.setattr(compiler, "compile_code", fail)
    assert process.use() == process.use(nogil=True) == LOST
    (said,) = warnings(caplog)
    assert "CPUCodeLibrary has changed" in said


def test_memory_that_runs_short_is_no_unknown_numba(process, monkeypatch, caplog):
    from sweepgrad.kernels import compiler

    def fail(*args, **options):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(compiler, "compile_code", fail)
        with pytest.raises(MemoryError):
            process.use()
    assert warnings(caplog) == []
    assert process.use() == (2, 0, 0)


def test_a_fault_in_the_source_is_raised(process):
    from numba.core.errors import TypingError

    with pytest.raises(TypingError, match="nowhere"):
        cpu.compile_kernel(source_of(0, "o[i] = nowhere"), SIGNATURE)


# --- entry points ---------------------------------------------------------------------------------------------------

EXTREMES = [
    (name, value)
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
    for value in (np.iinfo(name).min, -1 if name[0] == "i" else 1, np.iinfo(name).max)
] + [
    ("float32", -1.0), ("float32", np.inf), ("float64", -1.0), ("float64", 1e308), ("float64", 3), ("bool", True),
    ("bool", False),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "value"), EXTREMES)
@pytest.mark.parametrize("nogil", [False, True])
def test_numbers_arrive_as_they_are(dtype, value, nogil):
    source = "def kernel(x, o):\n    o[0] = x\n"
    out = np.zeros(1, dtype)
    cpu.compile_kernel(source, [dtype, f"{dtype}:1C"], nogil=nogil)(np.dtype(dtype).type(value).item(), out)
    assert out[0] == np.dtype(dtype).type(value)


def test_strided_arrays_arrive_as_they_are():
    source = """
def kernel(x, o):
    for i in range(o.shape[0]):
        for j in range(o.shape[1]):
            o[i, j] = x[i, j]
"""
    x = np.arange(24.0).reshape(4, 6)[::-2, 1::2].T
    out = np.zeros(x.shape)
    cpu.compile_kernel(source, ["float64:2A", "float64:2C"])(x, out)
    assert out.tolist() == x.tolist()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), TypeError),
        ((1.0,), TypeError),
        ((1.0, 1, np.zeros(1), 0), TypeError),
        (("1", 1, np.zeros(1)), TypeError),
        ((1.0, 1.5, np.zeros(1)), TypeError),
        ((1.0, 1 << 63, np.zeros(1)), OverflowError),
        ((1.0, 1, [0.0]), TypeError),
        ((1.0, 1, None), TypeError),
    ],
)
def test_wrong_arguments_raise(arguments, error):
    kernel = cpu.compile_kernel("def kernel(x, n, o):\n    o[0] = x + n\n", ["float64", "int64", "float64:1C"])
    with pytest.raises(error):
        kernel(*arguments)
    out = np.zeros(1)
    kernel(-1.0, -1, out)
    assert out[0] == -2.0


def test_a_call_leaves_reference_counts_alone():
    kernel = cpu.compile_kernel(source_of(0), SIGNATURE)
    x, out = np.zeros(3), np.zeros(3)
    objects = [x, out, None]
    before = list(map(sys.getrefcount, objects))
    for _ in range(1000):
        kernel(x, out)
    after = list(map(sys.getrefcount, objects))
    assert all(abs(a - b) < 500 for a, b in zip(before, after, strict=True))


def test_a_released_kernel_lets_other_threads_run():
    """It counts until another thread interferes, or gives up after some ten seconds."""
    source = """
import sweepgrad.kernels.primitives as p
def kernel(x, o):
    n = 0
    while n < 1_000_000_000 and p.take(x, 0) < 1 << 61:
        n += 1
    o[0] = n < 1_000_000_000
"""
    kernel = cpu.compile_kernel(source, ["int64:1C", "bool:1C"], nogil=True)
    x, out = np.zeros(1, "int64"), np.zeros(1, "bool")
    thread = threading.Thread(target=kernel, args=(x, out))
    thread.start()
    while x[0] == 0:
        pass
    x[0] = 1 << 61
    thread.join(LIMIT)
    assert out[0]
