"""The command line, in processes of its own; `run` is compared with Python itself, run on the same script."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import pytest

from launch import python
from sweepgrad import __version__, cli, warmup
from sweepgrad.cli import _cache, main
from sweepgrad.errors import SweepgradError

INTERVAL = "import sweepgrad as sg; print(sg.sweeper.is_running(), sg.sweeper.interval)\n"

SUMMARY = re.compile(
    r"sweepgrad: ([\d,]+) nodes registered: ([\d,]+) consumed, ([\d,]+) swept, ([\d,]+) still live \((.*) saved\)\n"
    r"sweepgrad: ([\d,]+) nodes at the peak; ([\d,.]+) ms spent in ([\d,]+) sweeps\n"
)

# What pip installs as `sweepgrad`: here the runner is itself a script, which differs from `-m` in how Python ends it.
WRAPPER = "import sys\nfrom sweepgrad.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


@pytest.fixture
def wrapper(tmp_path_factory):
    path = tmp_path_factory.mktemp("bin") / "sweepgrad"
    path.write_text(WRAPPER)
    return path


def sweepgrad(*arguments, **options):
    return python("-m", "sweepgrad", *arguments, **options)


def split(stderr):
    """What the script wrote to standard error, and the summary's match."""
    found = re.search(SUMMARY.pattern + r"\Z", stderr)
    assert found, stderr
    return stderr[: found.start()], found


def assert_same(folder, *command, entry=("-m", "sweepgrad"), flags=()):
    """Run a command line as Python does and under `run`: only the summary may differ. Returns Python's own outcome."""
    own = python(*flags, *command, cwd=folder)
    ours = python(*flags, *entry, "run", *command, cwd=folder)
    stderr, _ = split(ours.stderr)
    addresses = r"\b0x[0-9a-f]+"
    assert (ours.returncode, ours.stdout) == (own.returncode, own.stdout)
    assert re.sub(addresses, "", stderr) == re.sub(addresses, "", own.stderr)
    return own


# --- what a script sees and leaves behind ---------------------------------------------------------------------------

SCRIPTS = {
    "arguments": "import sys\nprint(sys.argv)",
    "path": "import sys\nprint(sys.path)",
    "module": (
        "import sys, __main__\n"
        "print(__main__ is sys.modules['__main__'], vars(__main__) is globals())\n"
        "names = [n for n in globals() if n.startswith('__') and n.endswith('__') and n != '__main__']\n"
        "print({n: str(globals()[n]).split(' at ')[0] for n in sorted(names)})\n"
        "print(__loader__.name, __loader__.path, __spec__, type(__builtins__))"
    ),
    "neighbour": "import neighbour\nprint(neighbour.__file__)",
    "standard input": "import sys\nprint(repr(sys.stdin.read()))",
    "no future imports": "def f(x: print('evaluated')): pass",
    "no exception in sight": "import sys\nprint(sys.exc_info(), sys.exception())",
    "pickle": (
        "import pickle\n"
        "class Point:\n"
        "    def __init__(self, x): self.x = x\n"
        "copy = pickle.loads(pickle.dumps(Point(3)))\n"
        "print(copy.x, type(copy) is Point, Point.__module__, pickle.dumps(Point).hex())"
    ),
    "warning": "import warnings\nwarnings.warn('old', DeprecationWarning)",
    "exit handlers": (
        "import atexit, sys\n"
        "atexit.register(print, 'to standard output')\n"
        "atexit.register(print, 'to standard error', file=sys.stderr)"
    ),
    "thread": (
        "import sys, threading\n"
        "go = threading.Event()\n"
        "def late():\n"
        "    go.wait()\n"
        "    print('late', file=sys.stderr)\n"
        "threading.Thread(target=late).start()\n"
        "threading.Timer(0.05, go.set).start()"
    ),
    "redirected": "import io, sys\nsys.stdout = io.StringIO()\nsys.stderr = io.StringIO()\nprint('gone')",
    "closed": "import sys\nsys.stdout.close()",
}

ENDINGS = {
    "end": "pass",
    "exit": "import sys; sys.exit()",
    "exit 0": "import sys; sys.exit(0)",
    "exit 3": "import sys; sys.exit(3)",
    "exit True": "import sys; sys.exit(True)",
    "exit 259": "import sys; sys.exit(259)",
    "exit text": "import sys; sys.exit('no such thing')",
    "exit object": "import sys; sys.exit(('a', 1))",
    "exit while handling": "import sys\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    sys.exit(4)",
    "raise SystemExit": "raise SystemExit",
    "error": "def f(x):\n    return 1 / x\n\nf(0)",
    "error with a cause": "try:\n    1 / 0\nexcept ArithmeticError as error:\n    raise ValueError('é', 1) from error",
    "error while handling": "try:\n    1 / 0\nexcept ArithmeticError:\n    {}['key']",
    "error in a neighbour": "import broken",
    "error in a finaliser": "class A:\n    def __del__(self): 1 / 0\ndel (a := A()), a",
    "group": "raise ExceptionGroup('two', [ValueError(1), TypeError(2)])",
    "notes": "error = KeyError('x')\nerror.add_note('a note')\nraise error",
    "error named alike": "class ValueError(Exception): pass\nraise ValueError('mine')",
    "hook": "import sys\nsys.excepthook = lambda kind, error, tb: print(kind, error, tb.tb_lineno, tb.tb_next)\n1 / 0",
    "hook that exits": "import sys\nsys.excepthook = lambda *_: sys.exit(7)\n1 / 0",
    "syntax": "x = 1\ndef\n",
    "indentation": "if True:\nx = 1\n",
    "unclosed": "print((1, 2)\n",
    "syntax in a neighbour": "import unreadable",
    "interrupt": "raise KeyboardInterrupt",
    "interrupt by signal": "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)",
    "generator exit": "raise GeneratorExit('early')",
    "thread that fails": "import threading\nt = threading.Thread(target=lambda: 1 / 0, name='t')\nt.start()\nt.join()",
    "exit handler that fails": "import atexit\natexit.register(lambda: 1 / 0)",
}


def write(folder, source):
    (folder / "neighbour.py").write_text("")
    (folder / "broken.py").write_text("def fail():\n    raise OSError(2, 'gone')\n\nfail()\n")
    (folder / "unreadable.py").write_text("def\n")
    (folder / "script.py").write_text(source, encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_sees_what_python_shows_it(name, tmp_path):
    assert_same(write(tmp_path, SCRIPTS[name]), "script.py", "a b", "--sweep", "-h", "--", "--version", "")


@pytest.mark.parametrize("name", ENDINGS)
def test_a_script_ends_as_python_ends_it(name, tmp_path):
    assert_same(write(tmp_path, ENDINGS[name]), "script.py")


@pytest.mark.parametrize("name", ["end", "exit 3", "exit text", "error", "hook that exits", "syntax", "interrupt"])
def test_a_script_ends_alike_under_the_installed_command(name, tmp_path, wrapper):
    assert_same(write(tmp_path, ENDINGS[name]), "script.py", entry=[wrapper])


def test_endings_are_what_they_seem(tmp_path):
    """The table's scripts do what their names say, so that the comparison above compares something."""
    codes = {
        "exit 3": 3,
        "exit 259": 3,
        "exit text": 1,
        "error": 1,
        "syntax": 1,
        "hook that exits": 7,
        "interrupt by signal": -signal.SIGINT,
    }
    for name, code in codes.items():
        assert python("-c", ENDINGS[name]).returncode == code


@pytest.mark.parametrize(
    "path", ["sub/script.py", "./sub/script.py", "../here/sub/script.py", "link.py", "{here}/sub/script.py"]
)
def test_paths(path, tmp_path):
    here = tmp_path / "here"
    (here / "sub").mkdir(parents=True)
    write(here / "sub", "import sys, neighbour\nprint(__file__, sys.argv, sys.path)\n1 / 0")
    (here / "link.py").symlink_to(here / "sub" / "script.py")
    own = assert_same(here, path.format(here=here))
    assert "ZeroDivisionError" in own.stderr


def test_python_flags(tmp_path):
    write(tmp_path, "import sys\nprint(sys.path, sys.flags, __debug__)")
    assert_same(tmp_path, "script.py", flags=["-P"])
    assert_same(tmp_path, "script.py", flags=["-O", "-W", "error"])


def test_an_undecodable_script(tmp_path):
    (tmp_path / "script.py").write_bytes(b"x = '\xff'\n")
    done = sweepgrad("run", "script.py", cwd=tmp_path)
    assert done.returncode == 1
    stderr, _ = split(done.stderr)
    assert "SyntaxError" in stderr
    assert "cli.py" not in stderr


def test_folders_and_archives(tmp_path):
    source = "import sys\nprint(__name__, __file__, __package__, __spec__.name, sys.argv, sys.path, type(__builtins__))"
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text(source)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as archive:
        archive.writestr("__main__.py", source)
    assert_same(tmp_path, "app", "x")
    assert_same(tmp_path, "app.pyz", "x")
    (tmp_path / "empty").mkdir()
    own, ours = python("empty", cwd=tmp_path), sweepgrad("run", "empty", cwd=tmp_path)
    assert (ours.returncode, ours.stderr) == (own.returncode, own.stderr)
    assert own.returncode == 1


@pytest.mark.parametrize("path", ["absent.py", "script.py/x", "-"])
def test_a_script_that_cannot_be_read(path, tmp_path):
    write(tmp_path, "pass")
    done = sweepgrad("run", path, cwd=tmp_path)
    assert done.returncode == 2
    usage, message = done.stderr.splitlines()
    assert usage == "usage: sweepgrad run [-h] [--sweep INTERVAL] script.py [args ...]"
    assert message.startswith(f"sweepgrad run: error: can't open file '{tmp_path / path}': [Errno ")
    assert done.stdout == ""


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="needs a file that this user may not read")
def test_a_script_without_permission(tmp_path):
    write(tmp_path, "pass").joinpath("script.py").chmod(0)
    done = sweepgrad("run", "script.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "Permission denied" in done.stderr


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_multiprocessing(method, tmp_path):
    import multiprocessing

    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    source = f"""
import multiprocessing, sys

class Point:
    def __init__(self, x):
        self.x = x

def work(point):
    return Point(point.x * 2), __name__, sys.argv

if __name__ == "__main__":
    with multiprocessing.get_context({method!r}).Pool(1) as pool:
        point, name, argv = pool.apply(work, [Point(21)])
    print(point.x, type(point) is Point, name, argv)
"""
    own = assert_same(write(tmp_path, source), "script.py", "x", flags=["-W", "ignore"])
    assert own.stdout.startswith("42 True ")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_writes_no_summary(tmp_path):
    source = """
import os, sys
import sweepgrad as sg
child = os.fork()
if not child:
    print("child", sg.sweeper.is_running(), flush=True)
    sys.exit(5)
print("parent", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    # Since 3.12 Python warns of a fork while there are threads, such as the sweeper's.
    done = python("-W", "ignore", "-m", "sweepgrad", "run", write(tmp_path, source) / "script.py")
    assert (done.returncode, done.stdout) == (0, "child True\nparent 5\n")
    assert split(done.stderr)[0] == ""


# --- the sweeper ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "variable", "shown"),
    [
        ([], None, "True 1.0"),
        ([], "", "True 1.0"),
        ([], "3s", "True 3.0"),
        ([], "off", "False"),
        (["--sweep", "250ms"], None, "True 0.25"),
        (["--sweep=2s"], None, "True 2.0"),
        (["--sweep", ".5"], None, "True 0.5"),
        (["--sweep", "1m"], None, "True 60.0"),
        (["--sweep", "on"], "off", "True 1.0"),
        (["--sweep", "5"], "3s", "True 5.0"),
        (["--sweep", "off"], "3s", "False"),
        (["--sweep", "0"], None, "False"),
        (["--sweep", ""], "3s", "False"),
    ],
)
def test_sweep_option(option, variable, shown, tmp_path):
    settings = {} if variable is None else {"SWEEPGRAD_AUTO_SWEEP": variable}
    done = sweepgrad("run", *option, write(tmp_path, INTERVAL) / "script.py", settings=settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(shown)


def test_child_processes_sweep_alike(tmp_path):
    source = f"""
import multiprocessing, subprocess, sys

def show():
    {INTERVAL.strip()}

if __name__ == "__main__":
    subprocess.run([sys.executable, "-c", {INTERVAL!r}], check=True)
    child = multiprocessing.get_context("spawn").Process(target=show)
    child.start()
    child.join()
"""
    done = sweepgrad("run", "--sweep", "4s", write(tmp_path, source) / "script.py")
    assert (done.stdout, done.returncode) == ("True 4.0\n" * 2, 0)
    assert split(done.stderr)[0] == ""


@pytest.mark.parametrize("value", ["fast", "-1", "1h", "nan"])
def test_a_bad_interval(value):
    done = sweepgrad("run", "--sweep", value, "script.py")
    assert done.returncode == 2
    assert "sweepgrad run: error: argument --sweep: " in done.stderr
    for part in (repr(value), "`0.5`", "`500ms`", "`1m`", "`off`"):
        assert part in done.stderr


def test_a_bad_variable(tmp_path):
    done = sweepgrad("run", write(tmp_path, "pass") / "script.py", settings={"SWEEPGRAD_AUTO_SWEEP": "fast"})
    assert done.returncode == 1
    assert "`SWEEPGRAD_AUTO_SWEEP` is 'fast'" in done.stderr


# --- the summary ----------------------------------------------------------------------------------------------------

GRAPH = """
import sys
import sweepgrad as sg

x = sg.ones((4,), requires_grad=True)
y = x * x
z = y.sum()
z.backward()                     # consumes two nodes
for _ in range(1000):
    x * 2.0                      # an orphan
cycle = [x * 2.0]
cycle.append(cycle)              # an orphan once Python's garbage collector has come by
del cycle
kept = sg.exp(x)
print(sg.graph.stats().saved_bytes)
"""


@pytest.mark.parametrize(
    ("ending", "code"), [("", 0), ("sys.exit(3)", 3), ("1 / 0", 1), ("raise KeyboardInterrupt", -signal.SIGINT)]
)
def test_summary(ending, code, tmp_path):
    done = sweepgrad("run", "--sweep", "off", write(tmp_path, GRAPH + ending) / "script.py")
    assert done.returncode == code
    assert int(done.stdout) < 1024
    _, found = split(done.stderr)
    # x and kept live; the peak is x, kept and all orphans at once, which are fewer than the threshold
    assert found.groups()[:6] == ("1,005", "2", "1,001", "2", "32 B", "1,003")
    assert float(found[7]) > 0
    assert int(found[8]) >= 1


def test_summary_of_a_script_without_a_graph(tmp_path):
    done = sweepgrad("run", write(tmp_path, "print('hello')") / "script.py")
    assert (done.stdout, done.returncode) == ("hello\n", 0)
    assert split(done.stderr)[1].groups()[:6] == ("0", "0", "0", "0", "0 B", "0")


@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(3)", 3)])
@pytest.mark.parametrize(
    "before",
    ["", "sys.stderr.close()", "sys.stderr = None", "import os; os.close(2)", "sys.__stderr__ = None"],
)
def test_closed_standard_error_changes_nothing(before, ending, code, tmp_path):
    source = f"import sys\nprint('out')\n{before}\n{ending}"
    command = [sys.executable, "-m", "sweepgrad", "run", str(write(tmp_path, source) / "script.py")]
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command] if os.name == "posix" and not before else command
    done = subprocess.run(shell, check=False, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (code, "out\n")


@pytest.mark.parametrize("ending", ["", "sys.exit(3)"])
def test_a_reader_of_standard_error_that_has_gone(ending, tmp_path):
    script = write(tmp_path, f"import sys\nprint('out')\n{ending}") / "script.py"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = sweepgrad("run", script, stderr=writing)
    finally:
        os.close(writing)
    assert (done.returncode, done.stdout) == (3 if ending else 0, "out\n")


# --- warmup ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def some_tasks(monkeypatch):
    """Two tasks with few kernels, in the place of all."""
    tasks = [("abs", "float32"), ("greater", "float32")]
    monkeypatch.setattr(warmup, "tasks", lambda dtypes: tasks)
    monkeypatch.setattr(warmup, "SHAPES", ((2, 3),))
    return tasks


def warm(capsys, *arguments):
    """The exit status of `sweepgrad warmup`, the counts that it told, and what it wrote to both streams."""
    status = 0
    try:
        main(["warmup", *arguments])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    counts = re.match(r"([\d,]+) kernels compiled and ([\d,]+) found in [\d.]+ s; they are kept in ", out)
    return status, tuple(map(int, counts.groups())) if counts else None, out, err


def test_warmup_in_a_process_of_its_own(tmp_path):
    """What it compiles is what the operations need, and compiled once; processes share the work."""
    code = """
import sys
from sweepgrad import cli, warmup
if __name__ == "__main__":
    warmup.tasks = lambda dtypes: [("abs", dtypes[0]), ("greater", dtypes[0]), ("negative", dtypes[0])]
    cli.main(sys.argv[1:])
"""
    script = tmp_path / "script.py"
    script.write_text(code)
    settings = {"SWEEPGRAD_CACHE_DIR": str(tmp_path / "cache")}
    first, second = (
        python(script, "warmup", "--dtype", "float64", "--jobs", jobs, settings=settings) for jobs in ("2", "1")
    )
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    compiled = [re.match(r"(\d+) kernels compiled and (\d+) found", done.stdout).groups() for done in (first, second)]
    assert int(compiled[0][0]) >= 5
    assert compiled[1][0] == "0"
    for done in (first, second):
        assert str(tmp_path / "cache") in done.stdout
        assert done.stderr.splitlines()[-1] == "sweepgrad warmup: 3 of 3 tasks done"
    use = """
import sweepgrad as sg
from sweepgrad.kernels.cpu import COUNTS
x = sg.ones((5,), requires_grad=True)
y = abs(x) - (-x)
x > 0.5
y.backward(sg.ones((5,)))
print(x.grad, COUNTS["loaded"] > 0)
"""
    done = python("-c", use, settings=settings)
    assert (done.returncode, done.stdout) == (0, "Tensor([2., 2., 2., 2., 2.]) True\n"), done.stderr


def test_warmup_tells_of_tasks_that_fail(some_tasks, capsys):
    some_tasks.append(("no such", "float32"))
    status, counts, _, err = warm(capsys, "--jobs", "1")
    assert status == 1
    assert counts is not None
    assert "sweepgrad warmup: no such in float32: KeyError: 'no such'\n" in err


def test_warmup_where_nothing_can_be_kept(some_tasks, capsys, monkeypatch):
    monkeypatch.setattr(cli, "kept_in", lambda: None)
    status, counts, out, _ = warm(capsys)
    assert (counts, out) == (None, "")
    assert "nowhere to keep kernels" in status


def test_warmup_of_a_refused_folder(some_tasks, capsys, monkeypatch):
    def refuse():
        raise SweepgradError("the folder is not your own")

    monkeypatch.setattr(cli, "kept_in", refuse)
    assert warm(capsys)[0] == "sweepgrad warmup: the folder is not your own"


def test_warmup_that_is_interrupted(some_tasks, capsys, monkeypatch):
    def interrupt(todo, jobs):
        yield warmup.perform(todo[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(warmup, "perform_all", interrupt)
    status, counts, *_ = warm(capsys)
    assert counts is None
    assert "interrupted; what was compiled is kept in" in status


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs process groups")
def test_warmup_stops_at_once_when_interrupted(tmp_path):
    settings = {**os.environ, "SWEEPGRAD_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "sweepgrad", "warmup", "--dtype", "float32", "--jobs", "2"]
    process = subprocess.Popen(
        command, env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        limit = time.monotonic() + 100
        while len(list((tmp_path / "cache").glob("*/*"))) < 3:
            assert time.monotonic() < limit
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=30)
        assert process.returncode == 1
        assert "interrupted; what was compiled is kept in" in err
        assert "Traceback" not in err
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def test_warmup_says_what_was_lost(some_tasks, capsys, monkeypatch):
    lost = warmup.Outcome(some_tasks[0], compiled=3, lost=2)
    monkeypatch.setattr(warmup, "perform_all", lambda todo, jobs: iter([lost]))
    status, counts, _, err = warm(capsys)
    assert (status, counts) == (1, (3, 0))
    assert "2 kernels could not be kept" in err


def test_warmup_shows_a_bar_on_a_terminal(some_tasks, capsys, monkeypatch):
    pytest.importorskip("tqdm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    status, _, _, err = warm(capsys, "--jobs", "1")
    assert status == 0
    assert "2/2" in err
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert "2 of 2 tasks done" in warm(capsys, "--jobs", "1")[3]


def test_warmup_names_every_row_that_computes_in_floats():
    names = {name for name, _ in warmup.tasks(["float32"])}
    for name in ("exp", "add", "where", "clip", "equal", "sum", "max", "softmax", "updates", "layers and losses"):
        assert name in names
    assert "bitwise_and" not in names
    assert len(warmup.tasks(["float32", "float64"])) == 2 * len(names)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_task_of_warmup_can_be_done():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outcomes = [warmup.perform(task) for task in warmup.tasks(["float32"])]
    assert not [one for one in outcomes if one.error is not None]


# --- the rest -------------------------------------------------------------------------------------------------------


def test_words_after_the_script_belong_to_it(tmp_path):
    write(tmp_path, "import sys; print(sys.argv)")
    done = sweepgrad("run", "--sweep", "2s", "--", "script.py", "--", "--sweep", "x", "-h", cwd=tmp_path)
    assert done.stdout == "['script.py', '--', '--sweep', 'x', '-h']\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: command"),
        (["walk"], "invalid choice: 'walk'"),
        (["run"], "the following arguments are required: script.py"),
        (["run", "--"], "the following arguments are required: script.py"),
        (["run", "--sweep"], "argument --sweep: expected one argument"),
        (["run", "--fast", "script.py"], "--fast"),
        (["info", "more"], "more"),
        (["warmup", "more"], "more"),
        (["warmup", "--dtype", "int64"], "invalid choice: 'int64'"),
        (["warmup", "--jobs", "0"], "argument --jobs: '0' is not a number of processes"),
        (["warmup", "--jobs", "many"], "argument --jobs: 'many' is not a number of processes"),
    ],
)
def test_a_wrong_command_line(arguments, message, tmp_path):
    write(tmp_path, "print('ran')")
    done = sweepgrad(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr


def test_version(wrapper):
    for entry in (["-m", "sweepgrad"], [wrapper]):
        done = python(*entry, "--version")
        assert (done.stdout, done.stderr, done.returncode) == (f"sweepgrad {__version__}\n", "", 0)


def test_help_names_the_commands():
    done = sweepgrad("--help")
    assert done.returncode == 0
    assert re.search(r"^ +run ", done.stdout, re.MULTILINE)
    assert re.search(r"^ +warmup ", done.stdout, re.MULTILINE)
    assert re.search(r"^ +info ", done.stdout, re.MULTILINE)
    assert "SWEEPGRAD_AUTO_SWEEP" in sweepgrad("run", "--help").stdout


@pytest.mark.parametrize("command", ["--help", "--version", "info", "warmup --help"])
def test_numba_is_not_imported(command):
    done = python("-X", "importtime", "-m", "sweepgrad", *command.split())
    modules = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "sweepgrad" in modules
    assert not modules & {"numba", "llvmlite"}
    assert "scipy" not in modules or command == "info"  # where CuPy is asked for devices, it imports SciPy


def info(**settings):
    done = sweepgrad("info", settings=settings)
    assert (done.returncode, done.stderr) == (0, "")
    return dict(re.split(r"  +", line, maxsplit=1) for line in done.stdout.splitlines())


def test_info(tmp_path):
    from importlib.metadata import version

    folder = tmp_path / "kernels"
    shown = info(SWEEPGRAD_CACHE_DIR=str(folder))
    assert shown["sweepgrad"] == __version__
    assert shown["devices"].startswith("cpu")
    assert shown["Python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert (shown["NumPy"], shown["Numba"]) == (version("numpy"), version("numba"))
    assert shown["cache"] == f"{folder} (not there yet)"
    assert info(SWEEPGRAD_CACHE_DIR="kernels")["cache"] == f"{Path('kernels').absolute()} (not there yet)"
    assert shown["sweeper"] == "off"
    assert shown["thresholds"] == "2,000 dropped nodes, 64.0 MiB saved since the last sweep"
    assert shown["SWEEPGRAD_CACHE_DIR"] == repr(str(folder))
    assert shown["SWEEPGRAD_AUTO_SWEEP"] == "not set"
    assert not folder.exists()


def test_info_on_settings_and_a_used_cache(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "a").write_bytes(bytes(1000))
    (tmp_path / "sub" / "b").write_bytes(bytes(1048))
    shown = info(SWEEPGRAD_CACHE_DIR=str(tmp_path), SWEEPGRAD_AUTO_SWEEP="500ms", SWEEPGRAD_SWEEP="1")
    assert shown["cache"] == f"{tmp_path} (2 files, 2.0 KiB)"
    assert shown["sweeper"] == "every 0.5 s"
    assert shown["SWEEPGRAD_AUTO_SWEEP"] == "'500ms'"
    assert shown["SWEEPGRAD_SWEEP"] == "'1' (not a setting of sweepgrad)"


def test_info_on_an_unusable_cache(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "kernels"):
        assert _cache(folder) == f"{folder} (unusable: {file} is not a folder)"
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    if hasattr(os, "getuid"):
        assert f"{shared} (unusable: the cache folder {shared} can be written by other users" in _cache(shared)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # `root` may write anywhere
    for folder in (shared, shared / "a" / "b"):
        assert _cache(folder) == f"{folder} (unusable: {shared} cannot be written to)"
