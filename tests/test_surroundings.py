"""What a program is put into must not matter: folders, homes, clocks, settings, importers, hosts, closed streams.

Processes share one folder of compiled kernels where they can, since to compile one takes a second or more.
"""

import ast
import asyncio
import compileall
import errno
import json
import os
import shutil
import sys
import threading
import zipfile
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import sweepgrad as sg
from launch import LIMIT, program, python
from sweepgrad import config, graph
from sweepgrad.config import AUTO_SWEEP, CACHE_DIR, NUM_THREADS, POOL_LIMIT, SETTINGS
from sweepgrad.kernels import workers
from sweepgrad.kernels.buffers import Pool

SOURCE = Path(sg.__file__).parent
POSIX = pytest.mark.skipif(os.name != "posix", reason="streams, homes and modes as POSIX has them")

STEP = """
import sweepgrad as sg
x = sg.asarray([1.0, 2.0], requires_grad=True)
sg.sum(x * x).backward()
assert x.grad.tolist() == [2.0, 4.0], x.grad
"""
"""A program that needs few kernels, which the folder of `kept` has."""

SMALL = """
import sweepgrad as sg
assert (sg.ones((2,)) + sg.ones((2,))).tolist() == [2.0, 2.0]
"""
"""A program that needs one kernel."""

COUNT = """
from sweepgrad.kernels.cpu import COUNTS
print(COUNTS["compiled"], COUNTS["lost"], COUNTS["loaded"] > 0)
"""
COUNTED = STEP + COUNT


def passes(done, stdout=""):
    assert (done.returncode, done.stdout, done.stderr) == (0, stdout, "")


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """Settings with a folder of kernels that has those of `STEP`."""
    kernels = {CACHE_DIR: str(tmp_path_factory.mktemp("kept") / "kernels")}
    passes(program(STEP, settings=kernels))
    passes(program(COUNTED, settings=kernels), "0 0 True\n")
    return kernels


# --- the folder of kernels --------------------------------------------------------------------------------------------

# One process that begins anew several times, with an empty folder: Numba is imported but once.
ANEW = """
import json, logging, os, sys
import numpy as np
from sweepgrad.errors import SweepgradError
from sweepgrad.kernels import cpu

said = []
class Keep(logging.Handler):
    def emit(self, record):
        said.append(record.getMessage())
logging.getLogger("sweepgrad").addHandler(Keep(logging.WARNING))

def use(number):
    out = np.zeros(3)
    source = f"def kernel(x, o):\\n    for i in range(o.size):\\n        o[i] = x[i] + {number}\\n"
    cpu.compile_kernel(source, ["float64:1C", "float64:1C"])(np.arange(3.0), out)
    assert out.tolist() == [number, number + 1, number + 2]

def anew(*numbers):
    said.clear()
    cpu._kernels.clear()
    cpu._announced.clear()
    cpu.COUNTS.update(compiled=0, lost=0, loaded=0)
    for one in (cpu._folder, cpu._identity, cpu._versions):
        one.cache_clear()
    for number in numbers or [1]:
        use(number)
    return cpu.COUNTS["lost"], list(said)
"""


@POSIX
def test_a_full_disk(tmp_path):
    """The system refuses to write what would be too long; nothing half-written is left."""
    source = (
        ANEW
        + """
import resource
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
print(json.dumps(anew(1, 2)))
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
print(json.dumps(anew(1, 2)))
"""
    )
    done = program(source, settings={CACHE_DIR: str(tmp_path / "kernels")})
    assert done.returncode == 0, done.stderr
    (lost, said), room = map(json.loads, done.stdout.splitlines())
    assert lost == 2
    assert len(said) == 1
    for part in ("cannot be kept in", str(tmp_path), os.strerror(errno.EFBIG), CACHE_DIR):
        assert part in said[0]
    assert room == [0, []]
    assert len([path for path in tmp_path.rglob("*") if path.is_file()]) == 2


REFUSALS = ["EROFS", "EACCES", "ENOSPC"]


@POSIX
def test_a_folder_that_cannot_be_made_or_written_to(tmp_path):
    """Whatever the system says, and whichever step it refuses: said once, and everything else goes on."""
    source = (
        ANEW
        + """
from pathlib import Path
real = {name: getattr(os, name) for name in ("mkdir", "open", "replace")}

def refusing(name, code):
    def refuse(path, *args, **options):
        if name == "open" and not str(path).endswith(".tmp"):
            return real[name](path, *args, **options)
        raise OSError(code, os.strerror(code), str(path))
    return refuse

import errno
for name in json.loads(sys.argv[1]):
    code = getattr(errno, name)
    for step in real:
        os.environ["SWEEPGRAD_CACHE_DIR"] = str(Path(sys.argv[2]) / name / step)
        setattr(os, step, refusing(step, code))
        try:
            lost, said = anew()
        finally:
            setattr(os, step, real[step])
        assert lost == 1 and len(said) == 1, (name, step, lost, said)
        assert os.strerror(code) in said[0] and os.environ["SWEEPGRAD_CACHE_DIR"] in said[0], said
        assert not [path for path in Path(sys.argv[2]).rglob("*") if path.is_file()], (name, step)
"""
    )
    done = program(source, json.dumps(REFUSALS), tmp_path)
    assert done.returncode == 0, done.stderr


@POSIX
@pytest.mark.skipif(os.name == "posix" and os.geteuid() == 0, reason="root may write into any folder")
@pytest.mark.parametrize("there", [False, True], ids=["home", "folder"])
def test_a_home_without_permission_to_write(there, tmp_path):
    home = tmp_path / "home"
    (home / ".cache" / "sweepgrad" if there else home).mkdir(parents=True)
    for folder in (home / ".cache" / "sweepgrad", home):
        if folder.exists():
            folder.chmod(0o500)
    source = ANEW + "print(json.dumps(anew()))"
    settings = {CACHE_DIR: "", "XDG_CACHE_HOME": "", "HOME": str(home)}
    try:
        done = program(source, settings=settings)
    finally:
        for folder in (home, home / ".cache" / "sweepgrad"):
            if folder.exists():
                folder.chmod(0o700)
    lost, said = json.loads(done.stdout)
    assert lost == 1
    assert len(said) == 1
    assert str(home) in said[0]


@POSIX
def test_homes_of_every_kind(tmp_path):
    """A home that is a file, one that is not there, none at all; a `~` that is nobody's is an error."""
    (tmp_path / "file").write_text("")
    source = (
        ANEW
        + """
import pwd
def nobody(*args): raise KeyError
for home in (sys.argv[1] + "/file", sys.argv[1] + "/file/below", None):
    os.environ.update({"XDG_CACHE_HOME": "relative", "SWEEPGRAD_CACHE_DIR": " ", "HOME": home or ""})
    if home is None:
        del os.environ["HOME"]
        pwd.getpwuid = pwd.getpwnam = nobody
    lost, said = anew()
    assert lost == 1 and len(said) == 1 and (home or "there is no home directory") in said[0], said
for value in ("~", "~nobody/x"):
    os.environ["SWEEPGRAD_CACHE_DIR"] = value
    for again in range(2):
        try:
            anew()
        except SweepgradError as error:
            text = str(error)
        assert f"`SWEEPGRAD_CACHE_DIR` is {value!r}; accepted are paths of folders" in text, text
"""
    )
    done = program(source, tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_folder_is_where_it_was_at_first(monkeypatch, tmp_path):
    monkeypatch.setenv(CACHE_DIR, "kernels")
    monkeypatch.chdir(tmp_path)
    assert config.cache_dir() == tmp_path / "kernels"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv(CACHE_DIR, "~/kernels")
    assert config.cache_dir() == tmp_path / "kernels"
    if sys.platform == "linux":
        monkeypatch.setenv(CACHE_DIR, "")
        monkeypatch.setenv("XDG_CACHE_HOME", "elsewhere")
        assert config.cache_dir() == tmp_path / ".cache" / "sweepgrad"
        monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
        assert config.cache_dir() == Path("/elsewhere/sweepgrad")


@POSIX
def test_a_relative_folder_does_not_move_with_the_process(tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    source = (
        ANEW
        + """
use(1)
os.chdir(sys.argv[1])
use(2)
"""
    )
    done = program(source, tmp_path / "second", settings={CACHE_DIR: "kernels"}, cwd=tmp_path / "first")
    assert done.returncode == 0, done.stderr
    assert list((tmp_path / "second").iterdir()) == []
    assert len([path for path in (tmp_path / "first").rglob("*") if path.is_file()]) == 2


# --- clocks -----------------------------------------------------------------------------------------------------------


def modules():
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text("utf-8")) for path in SOURCE.rglob("*.py")}


def test_no_module_asks_what_time_it_is():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time":
                assert node.attr in {"perf_counter", "monotonic", "sleep"}, name
            names = [alias.name for alias in node.names] if isinstance(node, (ast.Import, ast.ImportFrom)) else []
            assert "datetime" not in names, name
            assert not (isinstance(node, ast.ImportFrom) and node.module == "time"), name


@pytest.mark.parametrize("clock", ["backwards", "to and fro"])
def test_a_clock_that_is_changed(clock, kept):
    """The daemon sweeps on, and what is measured stays sensible. Files come from the future, or from long ago."""
    for k, path in enumerate(Path(kept[CACHE_DIR]).rglob("*")):
        seconds = 4e9 if k % 2 else 1e8
        os.utime(path, (seconds, seconds))
    source = (
        """
import itertools, sys, time
ticks = itertools.count()
year = 365 * 24 * 3600.0
def now():
    k = next(ticks)
    return {"backwards": -k, "to and fro": (-1) ** k * k}[sys.argv[1]] * year + 2e9
time.time = now
time.time_ns = lambda: int(now() * 1e9)
"""
        + COUNTED
        + """
sg.sweeper.start("1ms")
del x
while sg.graph.stats().nodes:
    time.sleep(0.001)
stats = sg.graph.stats()
assert 0 <= stats.sweep_seconds < 1000, stats
sg.sweeper.stop()
"""
    )
    passes(program(source, clock, settings=kept), "0 0 True\n")


# --- settings ---------------------------------------------------------------------------------------------------------

GARBAGE = {
    AUTO_SWEEP: ["fast", "-1", "1h", "nan", "\u0661", "1" * 5000],
    NUM_THREADS: ["many", "0", "-1", "1.5", "1e3", "0x10", "٣", "+2", "1 2", "1" * 5000],
    POOL_LIMIT: ["much", "-1", "1QB", "nan", "inf", "1e9", "1 2", "٣MB", "1" * 5000],
    CACHE_DIR: ["~nobody-of-this-name/x"],
}
FORMS = {AUTO_SWEEP: "`500ms`", NUM_THREADS: "integers from 1", POOL_LIMIT: "`256MB`", CACHE_DIR: "paths of folders"}


def told(name, value, error):
    assert isinstance(error, ValueError)
    assert str(error).startswith(f"`{name}` is {value!r}; accepted are ")
    assert FORMS[name] in str(error)
    return True


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in GARBAGE.items() for value in values])
def test_garbage_is_refused_where_it_is_read(name, value, monkeypatch):
    monkeypatch.setenv(name, value)
    monkeypatch.setitem(workers._state, "threads", None)
    first_use = {NUM_THREADS: sg.get_num_threads, POOL_LIMIT: lambda: Pool().stats()}.get(name, SETTINGS[name])
    for read in (SETTINGS[name], first_use):
        with pytest.raises(sg.ArgumentError) as caught:
            read()
        assert told(name, value, caught.value)


@pytest.mark.parametrize("name", SETTINGS)
@settings(max_examples=200, deadline=None)
@given(value=st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])))
def test_any_text_is_understood_or_refused(name, value):
    result = refusal = None
    with mock.patch.dict(os.environ, {name: value}):
        try:
            result = SETTINGS[name]()
        except sg.ArgumentError as error:
            refusal = error
    if refusal is not None:
        assert told(name, value.strip() if name == NUM_THREADS else value, refusal)
    else:
        kinds = {AUTO_SWEEP: (float, type(None)), NUM_THREADS: int, POOL_LIMIT: int, CACHE_DIR: Path}
        assert isinstance(result, kinds[name])


def test_a_blank_setting_is_none(monkeypatch):
    for name, read in SETTINGS.items():
        monkeypatch.delenv(name, raising=False)
        usual = read()
        monkeypatch.setenv(name, "  ")
        assert read() == usual


def lines_of_info(**options):
    done = python("-m", "sweepgrad", "info", **options)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


def test_info_shows_what_is_wrong_with_settings():
    bad = {name: values[0] for name, values in GARBAGE.items()}
    shown = lines_of_info(settings=bad)
    lines = {AUTO_SWEEP: "sweeper", CACHE_DIR: "cache", NUM_THREADS: "threads", POOL_LIMIT: "pool"}
    for name, line in lines.items():
        assert shown[line] == f"unknown, for {name} is not understood"
        assert shown[name].startswith(f"{bad[name]!r} (not understood; accepted are ")
        assert FORMS[name] in shown[name]


def test_info_shows_what_is_in_force(tmp_path):
    good = {AUTO_SWEEP: "2s", CACHE_DIR: str(tmp_path), NUM_THREADS: " 3 ", POOL_LIMIT: "1.5 GiB"}
    shown = lines_of_info(settings=good)
    assert shown["sweeper"] == "every 2 s"
    assert shown["cache"] == f"{tmp_path} (0 files, 0 B)"
    assert shown["threads"] == "up to 3 for one kernel"
    assert shown["pool"] == "keeps up to 1.5 GiB"
    assert {name: shown[name] for name in good} == {name: repr(value) for name, value in good.items()}


@pytest.mark.parametrize(("command", "name"), [("run", AUTO_SWEEP), ("warmup", AUTO_SWEEP), ("warmup", POOL_LIMIT)])
def test_commands_end_with_one_line_about_a_bad_setting(command, name, tmp_path):
    (tmp_path / "script.py").write_text("print('not run')")
    words = [command, tmp_path / "script.py"] if command == "run" else [command]
    done = python("-m", "sweepgrad", *words, settings={name: GARBAGE[name][0]})
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"sweepgrad {command}: `{name}` is {GARBAGE[name][0]!r}; accepted are ")


def test_an_option_takes_the_place_of_a_bad_setting(tmp_path):
    (tmp_path / "script.py").write_text("import sweepgrad as sg; print(sg.sweeper.interval)")
    done = python("-m", "sweepgrad", "run", "--sweep", "3s", tmp_path / "script.py", settings={AUTO_SWEEP: "fast"})
    assert (done.returncode, done.stdout) == (0, "3.0\n")


def test_a_scripts_own_error_is_not_taken_for_one_of_the_command_line(tmp_path):
    (tmp_path / "script.py").write_text("import sweepgrad as sg\nsg.arange(0, 1, 0)")
    done = python("-m", "sweepgrad", "run", tmp_path / "script.py")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert 'script.py", line 2' in done.stderr


@pytest.mark.parametrize(
    ("argv", "original", "expected"),
    [
        (["-m", "info"], ["python", "-m", "sweepgrad", "info"], True),
        (["-m"], ["python", "-Im", "sweepgrad"], True),
        (["-m"], ["python", "-msweepgrad"], True),
        (["-m"], ["python", "-m", "pytest", "sweepgrad"], False),
        (["-m"], ["python", "-m", "sweepgrad2"], False),
        (["/usr/bin/sweepgrad", "info"], ["python", "/usr/bin/sweepgrad", "info"], True),
        (["sweepgrad.exe"], ["sweepgrad.exe"], True),
        (["sweepgrad-script.py"], ["python", "sweepgrad-script.py"], True),
        (["train.py"], ["python", "train.py"], False),
        (["-c"], ["python", "-c", "import sweepgrad"], False),
        ([""], ["python"], False),
        ([], [], False),
    ],
)
def test_which_processes_are_the_command_line(argv, original, expected, monkeypatch):
    """Elsewhere, `import sweepgrad` raises where it finds a bad interval."""
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", original)
    monkeypatch.setenv(AUTO_SWEEP, "fast")
    with nullcontext() if expected else pytest.raises(sg.ArgumentError):
        assert config.interval_at_import() is None


# --- imported twice, again, from elsewhere ----------------------------------------------------------------------------


def test_reload(kept):
    """Same registry, the same operators on the same class, and a sweeper as it was."""
    source = (
        STEP
        + """
import importlib, os
y = x * x
before = {name: getattr(sg, name) for name in sg.__all__}
operators = {name: value for name, value in vars(sg.Tensor).items()}
from sweepgrad.graph.process import registry
for setting, running in (("2s", False), ("fast", False), ("2s", True)):
    if running:
        sg.sweeper.start(5)
        thread = sg.sweeper._worker
    os.environ["SWEEPGRAD_AUTO_SWEEP"] = setting
    assert importlib.reload(sg) is sg
    assert sg.sweeper.is_running() is running
    assert {name: value for name, value in vars(sg.Tensor).items()} == operators
    assert all(getattr(sg, name) is value for name, value in before.items())
assert sg.sweeper._worker is thread and thread.is_alive() and sg.sweeper.interval == 5
from sweepgrad.graph.process import registry as same
assert same is registry
x.grad = None
sg.sum(y).backward()
assert x.grad.tolist() == [2.0, 4.0]
sg.graph.audit()
"""
    )
    passes(program(source, settings=kept))


def test_the_same_files_under_another_name(kept):
    """The package's modules import each other by their own name: the other one is a second name for the same things."""
    source = (
        STEP
        + """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("other", sg.__file__, submodule_search_locations=sg.__path__)
other = sys.modules["other"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(other)
assert other.Tensor is sg.Tensor and other.graph is sg.graph and other.sweeper is sg.sweeper
y = x * x
other.sum(y).backward()
assert x.grad.tolist() == [4.0, 8.0]
try:
    import other.ops.elementwise
except AssertionError as error:
    assert "is declared twice" in str(error), error
else:
    raise AssertionError("operations were declared a second time")
other.sum(x * x).backward()
assert x.grad.tolist() == [6.0, 12.0]
sg.graph.audit()
"""
    )
    passes(program(source, settings=kept))


COPIES = (
    STEP
    + """
import os, sys, threading
first = sg
kept = x * x
for name in [name for name in sys.modules if name.partition(".")[0] == "sweepgrad"]:
    del sys.modules[name]
import sweepgrad as second
assert second.Tensor is not first.Tensor and second.sweeper is not first.sweeper
for one in (first, second):
    one.sweeper.start("1ms")
assert [thread.name for thread in threading.enumerate()].count("sweepgrad-sweeper") == 2

def work(one):
    x = one.asarray([1.0, 2.0], requires_grad=True)
    dropped = [x * x for _ in range(300)]
    del dropped
    one.sum(x * x).backward()
    assert x.grad.tolist() == [2.0, 4.0]
    one.graph.audit()

def work_on_both():
    threads = [threading.Thread(target=work, args=(one,)) for one in (first, second) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in (first, second):
        one.sweep(collect_cycles=True)

work_on_both()
x.grad = None
first.sum(kept).backward()
assert x.grad.tolist() == [2.0, 4.0]
y = second.ones((2,), requires_grad=True)
for mix in (lambda: x + y, lambda: y * x, lambda: second.add(y, x), lambda: second.asarray(x), lambda: y.backward(x)):
    try:
        mix()
    except (TypeError, RuntimeError) as error:
        assert str(error)
    else:
        raise AssertionError("a tensor of one copy was taken by the other")
assert second.asarray(x.detach()).tolist() == [1.0, 2.0]
"""
)


def test_two_copies_do_not_disturb_each_other(kept):
    passes(program(COPIES, settings=kept))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_two_copies_in_a_forked_child(kept):
    source = (
        COPIES
        + """
import warnings
warnings.simplefilter("ignore")  # newer Pythons warn of a fork while threads are alive
for _ in range(5):
    child = os.fork()
    if not child:
        try:
            work_on_both()
            assert first.sweeper.is_running() and second.sweeper.is_running()
        except BaseException:
            import traceback
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
work_on_both()
"""
    )
    passes(program(source, settings=kept))


def test_a_copy_that_is_gone_leaves_its_kernels_to_its_tensors(kept):
    source = (
        STEP
        + """
import gc, sys
y = x * x
for name in [name for name in sys.modules if name.partition(".")[0] == "sweepgrad"]:
    del sys.modules[name]
del sg
gc.collect()
x.grad = None
(y * y).sum().backward()
assert x.grad.tolist() == [4.0, 32.0]
"""
    )
    passes(program(source, settings=kept))


def packed(tmp_path, form):
    """The package as an archive, as bytecode alone, or both: what `sys.path` has to have."""
    root = tmp_path / "lib"
    shutil.copytree(SOURCE, root / "sweepgrad", ignore=shutil.ignore_patterns("__pycache__", "*.pyi"))
    if "bytecode" in form:
        assert compileall.compile_dir(root, quiet=1, legacy=True)
        for path in root.rglob("*.py"):
            path.unlink()
    if "archive" not in form:
        return root
    with zipfile.ZipFile(tmp_path / "lib.zip", "w") as archive:
        for path in root.rglob("*"):
            archive.write(path, path.relative_to(root))
    shutil.rmtree(root)
    return tmp_path / "lib.zip"


@pytest.mark.parametrize("form", ["archive", "bytecode", "archive of bytecode"])
def test_other_forms_of_the_package(form, tmp_path, kept):
    """They keep kernels too; an archive with the same sources finds those that are there."""
    root = packed(tmp_path, form)
    source = (
        f"import sys; sys.path.insert(0, {str(root)!r})"
        + (STEP if form == "archive" else SMALL)
        + COUNT
        + f"""
assert sg.__file__.startswith({str(root)!r}), sg.__file__
from sweepgrad.cli import main
main(["--version"])
"""
    )
    before = set(Path(kept[CACHE_DIR]).iterdir())
    shown = [program(source, flags=["-I"], settings=kept) for _ in range(1 if form == "archive" else 2)]
    assert all(done.returncode == 0 for done in shown), shown[0].stderr
    assert shown[-1].stdout.startswith("0 0 True\n")
    assert len(set(Path(kept[CACHE_DIR]).iterdir()) - before) == (0 if form == "archive" else 1)


FROZEN = """
import importlib.abc, importlib.machinery, sys
from pathlib import Path

codes = {}
root = Path(sys.argv[1])
for path in root.rglob("*.py"):
    parts = ("sweepgrad", *path.relative_to(root).with_suffix("").parts)
    package = parts[-1] == "__init__"
    code = compile(path.read_text("utf-8"), "<frozen>", "exec")
    codes[".".join(parts[:-1] if package else parts)] = (code, package)

class Frozen(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name in codes:
            return importlib.machinery.ModuleSpec(name, self, origin="frozen", is_package=codes[name][1])

    def exec_module(self, module):
        exec(codes[module.__name__][0], vars(module))

sys.meta_path.insert(0, Frozen())
"""


def test_a_frozen_program_without_files(tmp_path):
    """As nothing tells which version of the package compiled them, kernels are not kept."""
    source = (
        FROZEN
        + SMALL
        + COUNT
        + """
for module in (sg, sys.modules["sweepgrad.kernels.cpu"]):
    assert not hasattr(module, "__file__")
from sweepgrad.cli import info
assert "SWEEPGRAD_CACHE_DIR" in info()
"""
    )
    done = program(source, SOURCE, settings={CACHE_DIR: str(tmp_path / "kernels")})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "1 1 False\n"
    assert done.stderr == (
        "sweepgrad: kernels cannot be kept (the files of this package, which tell its versions apart, cannot be read) "
        "and are compiled anew in each process\n"
    )
    assert not (tmp_path / "kernels").exists()


def test_a_numba_without_metadata(kept):
    """As in programs that were put together without it: it is then imported, to be asked itself."""
    source = (
        """
import importlib.metadata as metadata
real = metadata.version
def version(name):
    if name == "numba":
        raise metadata.PackageNotFoundError(name)
    return real(name)
metadata.version = version
"""
        + COUNTED
        + """
from sweepgrad.cli import info
assert "Numba" in info()
"""
    )
    passes(program(source, settings=kept), "0 0 True\n")


# --- hosts ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [["-O"], ["-OO"], ["-I"], ["-bb", "-X", "dev", "-W", "error"]])
def test_flags_of_python(flags, kept):
    """-O leaves out assertions, -OO docstrings, too."""
    passes(program(COUNTED, flags=flags, settings=kept), "0 0 True\n")


def test_a_program_from_standard_input(kept, tmp_path):
    (tmp_path / "program").write_text(COUNTED)
    with open(tmp_path / "program") as program_file:
        passes(python("-", stdin=program_file, settings=kept), "0 0 True\n")


@POSIX
@pytest.mark.parametrize("closed", [(2,), (0, 1, 2)])
def test_streams_that_were_never_open(closed, kept, tmp_path):
    """As in a daemon, or under `pythonw`: the numbers of their descriptors go to other files."""
    source = f"""
import os, sys
for k in {closed}:
    os.close(k)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
    made = tmp_path / "made"
    inner = STEP + f"sg.sweeper.start('1ms')\nopen({str(made)!r}, 'w').close()"
    done = program(source, "-c", inner, settings=kept)
    assert (done.returncode, done.stderr) == (0, "")
    assert made.exists()


def test_streams_that_take_nothing(tmp_path):
    """Not even a warning has to be heard: kernels cannot be kept, commands say how far they are, and all goes on."""
    source = (
        ANEW
        + """
from sweepgrad import cli
logging.getLogger("sweepgrad").handlers.clear()  # so that what is said goes to standard error
streams = {
    "none": lambda: None,
    "closed": lambda: os.fdopen(os.dup(1), "w"),
    "full": lambda: open("/dev/full", "w", buffering=1),
    "something else": object,
}
before = sys.stdout, sys.stderr
for kind, make in streams.items():
    if kind == "full" and not os.path.exists("/dev/full"):
        continue
    sys.stdout = sys.stderr = make()
    if kind == "closed":
        sys.stdout.close()
    try:
        lost, _ = anew()
        assert list(cli._progress([1, 2], 2)) == [1, 2]
        cli._note("something")
    finally:
        unusable, (sys.stdout, sys.stderr) = sys.stdout, before
        if kind == "full":
            try:
                unusable.close()
            except OSError:
                pass
    assert lost == 1, kind
"""
    )
    (tmp_path / "file").write_text("")
    passes(program(source, settings={CACHE_DIR: str(tmp_path / "file" / "kernels")}))


@POSIX
def test_a_folder_that_was_removed_under_the_process(kept, tmp_path):
    source = (
        "import os, sys\nos.rmdir(os.getcwd())\n"
        + COUNTED
        + """
from sweepgrad import cli
assert f"cache                  {os.environ['SWEEPGRAD_CACHE_DIR']}" in cli.info()
os.environ["SWEEPGRAD_CACHE_DIR"] = "relative"
assert "none: No such file or directory" in cli.info()
sys.argv[1:] = ["run", sys.argv[1]]
cli.main()
"""
    )
    (tmp_path / "gone").mkdir()
    (tmp_path / "script.py").write_text("print('ran')")
    done = program(source, tmp_path / "script.py", cwd=tmp_path / "gone", settings=kept)
    assert (done.returncode, done.stdout) == (0, "0 0 True\nran\n"), done.stderr


PROJECT = """
import pytest
import sweepgrad as sg

@pytest.fixture(autouse=True)
def sweeping():
    sg.sweeper.start("1ms")
    yield
    sg.sweeper.stop()

@pytest.mark.parametrize("k", range(6))
def test_gradient(k):
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    for _ in range(50):
        x * x
    sg.sum(x * x).backward()
    assert x.grad.tolist() == [2.0, 4.0]
    sg.graph.audit()
"""


def test_under_pytest_xdist(kept, tmp_path):
    (tmp_path / "test_project.py").write_text(PROJECT)
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    clean = {"PYTEST_ADDOPTS": "", "PYTEST_XDIST_WORKER": "", "PYTEST_PLUGINS": ""}
    done = python("-m", "pytest", "-q", "-p", "xdist", "-n2", cwd=tmp_path, settings=kept | clean)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout


CELLS = [
    "import asyncio, threading, warnings\nimport sweepgrad as sg\nx = sg.asarray([1.0, 2.0], requires_grad=True)",
    "@sg.fuse(fallback=True)\ndef f(x):\n    return sg.sum(x * x) if x.tolist() else x\n"
    "with warnings.catch_warnings(record=True) as said:\n    warnings.simplefilter('always')\n    f(x).backward()\n"
    "where = [(one.filename, one.lineno) for one in said]",
    "async def step():\n    sg.sum(x * x).backward()\n    await asyncio.sleep(0)\n    return x.grad.tolist()\n"
    "first, second = await asyncio.gather(step(), step())",
    "before = sg.graph.stats().nodes\nfor _ in range(100):\n    x * x\n"
    "sg.sweeper.start('1ms')\nwhile sg.graph.stats().nodes > before:\n    await asyncio.sleep(0.001)\n"
    "sg.sweeper.stop()",
    "with sg.no_grad():\n    await asyncio.sleep(0)\n    x -= 1.0\nsg.graph.audit()",
]


def test_in_the_thread_of_a_notebook():
    """Cells run in a thread that is not the main one, inside a running event loop, and their files do not exist."""
    failed = []
    scope = {"__name__": "__main__"}

    async def run_cells():
        for k, cell in enumerate(CELLS, 1):
            code = compile(cell, f"<ipython-input-{k}-0123456789ab>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            result = eval(code, scope)
            if result is not None:
                await result

    def serve():
        try:
            asyncio.run(run_cells())
        except BaseException as error:
            failed.append(error)

    running = sg.sweeper.is_running()
    thread = threading.Thread(target=serve)
    thread.start()
    thread.join(LIMIT)
    assert not thread.is_alive(), sg.graph.stats()
    if failed:
        raise failed[0]
    assert scope["where"] == [("<ipython-input-2-0123456789ab>", 6)]
    assert (scope["first"], scope["second"]) == ([6.0, 12.0], [6.0, 12.0])
    assert scope["x"].tolist() == [0.0, 1.0]
    assert sg.is_grad_enabled()
    assert sg.sweeper.is_running() is running


# --- what is loaded ---------------------------------------------------------------------------------------------------

UNSAFE = {
    "pickle",
    "cPickle",
    "_pickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "copyreg",
    "pickletools",
}


def test_no_module_unpickles():
    for name, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found = {alias.name.split(".")[0] for alias in node.names} | {
                    str(getattr(node, "module", "")).split(".")[0]
                }
                assert not found & UNSAFE, name
            if isinstance(node, ast.Call):
                assert "allow_pickle" not in {keyword.arg for keyword in node.keywords}, name
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id in {"np", "numpy"}
            ):
                assert node.attr not in {"load", "fromfile", "memmap", "loads"}, name
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "__import__"}, name
                assert node.func.id != "exec" or name in {"kernels/cpu.py", "kernels/assembly.py", "cli.py"}, name


def test_entries_of_the_cache_are_not_unpickled(kept):
    """Neither those that are whole, nor what somebody has put in their place."""
    source = (
        """
import os, pickle, sys
from pathlib import Path

class Payload:
    def __reduce__(self):
        return os._exit, (13,)

def refuse(event, arguments):
    if event == "pickle.find_class":
        raise RuntimeError(f"{event} {arguments}")
sys.addaudithook(refuse)
"""
        + COUNTED
    )
    passes(program(source, settings=kept), "0 0 True\n")
    spoil = source.replace(
        "sys.addaudithook",
        """
for k, path in enumerate(sorted(Path(os.environ["SWEEPGRAD_CACHE_DIR"]).glob("*/*"))):
    path.write_bytes(path.read_bytes()[: 51 * (k % 2)] + pickle.dumps(Payload()))
sys.addaudithook""",
        1,
    )
    done = program(spoil.replace("sys.addaudithook(refuse)", ""), settings=kept)
    assert (done.returncode, done.stderr) == (0, "")
    compiled, lost, _ = done.stdout.split()
    assert int(compiled) > 0 == int(lost)


# --- what the command line prints -------------------------------------------------------------------------------------


@POSIX
@pytest.mark.parametrize("command", [["info"], ["--help"]])
def test_a_reader_that_has_gone(command):
    """`sweepgrad info | head -1` says nothing more than what was read."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = python("-m", "sweepgrad", *command, stdout=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no such device here")
@pytest.mark.parametrize("command", ["info", "--help"])
def test_a_full_disk_under_standard_output(command):
    with open("/dev/full", "w") as full:
        done = python("-m", "sweepgrad", command, stdout=full)
    assert done.returncode == 1
    assert done.stderr == f"sweepgrad: standard output cannot be written to: [Errno 28] {os.strerror(errno.ENOSPC)}\n"


@POSIX
def test_an_encoding_that_cannot_show_a_path(tmp_path):
    folder = os.path.join(os.fsencode(tmp_path), "é".encode(), b"\xff")
    shown = lines_of_info(settings={CACHE_DIR: os.fsdecode(folder), "PYTHONIOENCODING": "ascii"})
    assert shown["cache"].endswith(r"\xe9/\udcff (not there yet)")


def test_the_graph_is_as_it_was_after_all_this():
    graph.audit()
