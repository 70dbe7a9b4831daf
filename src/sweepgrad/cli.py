"""The command line.

`sweepgrad run` sweeps the graph of any script, `sweepgrad warmup` compiles the common kernels ahead, and
`sweepgrad info` describes this installation, whatever state it is in.

Guarantees of `run`
- The script sees what `python script.py args` would show it: `sys.argv`, `sys.path`, a fresh `__main__` module. Its
  exit status, its traceback and its standard output are its own.
- The summary is the last thing written, after the script's own exit handlers and threads, and goes to standard error;
  where that is closed it is left out, and it never changes the exit status.

What `run` cannot undo: NumPy is imported before the script starts, so settings that NumPy reads from the environment
when it is imported, such as the number of BLAS threads, have to be made outside the script.
"""

from __future__ import annotations

import argparse
import atexit
import builtins
import io
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from sweepgrad import config, graph
from sweepgrad._version import __version__
from sweepgrad.config import AUTO_SWEEP, CACHE_DIR, NUM_THREADS, POOL_LIMIT, SETTINGS
from sweepgrad.dtypes import FLOATS
from sweepgrad.errors import ArgumentError, DeviceError, MissingDependencyError, SweepgradError
from sweepgrad.graph import sweep
from sweepgrad.graph.process import sweeper
from sweepgrad.graph.report import format_bytes
from sweepgrad.kernels import gpu
from sweepgrad.kernels.cpu import check_private, kept_in

if TYPE_CHECKING:
    from sweepgrad.warmup import Outcome

PREFIX = "SWEEPGRAD_"

# The `__main__` in whose place the script's was put. It must stay alive: where a script raised, CPython 3.11 still
# deletes `__file__` from its dictionary after it has dropped its own reference, and the process crashes at exit.
_replaced: list[ModuleType] = []


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line `argv`, by default that of the process."""
    try:
        options = _parser().parse_args(argv)
    except SystemExit:
        _flush()  # what `--help` and `--version` print
        raise
    options.function(options)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sweepgrad", description="Automatic differentiation with a graph that never grows unseen."
    )
    parser.add_argument("--version", action="version", version=f"sweepgrad {__version__}")
    commands = parser.add_subparsers(metavar="command", required=True)
    _add_run(commands)
    _add_warmup(commands)
    info_parser = commands.add_parser("info", help="show versions, the kernel cache and the settings in force")
    info_parser.set_defaults(function=lambda _: _say(info()))
    return parser


def _add_run(commands: Any) -> None:
    parser = commands.add_parser(
        "run",
        help="run a script with the sweeper on, and sum up its graph at the end",
        usage="%(prog)s [-h] [--sweep INTERVAL] script.py [args ...]",
        description="Run a script as `python script.py args` would, with the sweeper on; at the end, say on standard "
        "error what became of the nodes of its graph.",
    )
    parser.add_argument(
        "--sweep",
        metavar="INTERVAL",
        type=_interval,
        help=f"time between two sweeps: 0.5, 500ms, 2s, 1m, on (1 s) or off; by default {AUTO_SWEEP}, or on. "
        f"The script and its child processes find it in {AUTO_SWEEP}",
    )
    # The script's name is part of the remainder, so that argparse leaves every word after it alone, `--` included.
    parser.add_argument("command", metavar="script.py [args ...]", nargs=argparse.REMAINDER)
    parser.set_defaults(function=lambda options: run(options.command, options.sweep, parser.error))


def _add_warmup(commands: Any) -> None:
    floats = [dtype.name for dtype in FLOATS]
    parser = commands.add_parser(
        "warmup",
        help="compile the common kernels ahead",
        description="Compile the kernels of the common operations, of the optimisers and of common losses, forward and "
        f"backward, for small and large arrays. They are kept in {CACHE_DIR}; what is there already is not compiled "
        "again.",
    )
    parser.add_argument(
        "--dtype", metavar="DTYPE", dest="dtypes", nargs="+", choices=floats, default=floats,
        help=f"{' or '.join(floats)}; by default both",
    )  # fmt: skip
    parser.add_argument(
        "--jobs", metavar="N", type=_jobs, help="processes to compile in; by default one for each processor, up to 8"
    )
    parser.set_defaults(function=lambda options: warmup(list(dict.fromkeys(options.dtypes)), options.jobs))


def _interval(text: str) -> str:
    """`text`, once it is known to be an interval."""
    try:
        config.parse_interval(text, subject="--sweep")
    except ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _jobs(text: str) -> int:
    """The number `text`, which must be at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of processes")
    return int(text)


def _say(text: str) -> None:
    """Print `text` to standard output, with escapes for what that cannot take."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    _flush(text.encode(encoding, "backslashreplace").decode(encoding) + "\n")


def _flush(text: str = "") -> None:
    """Write out `text` after what was printed. A reader that has gone, such as `head`, has had what it wanted."""
    try:
        if sys.stdout is not None:
            sys.stdout.write(text)
            sys.stdout.flush()
    except (OSError, ValueError) as error:  # the latter where it is closed
        with suppress(OSError, ValueError):
            # Lest Python try again, at exit, to write what it still has.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):
            raise SystemExit(f"sweepgrad: standard output cannot be written to: {error}") from None


def _note(text: str) -> None:
    """Print `text` to standard error, if there is one."""
    with suppress(OSError, ValueError, AttributeError):
        print(text, file=sys.stderr, flush=True)


def _is_terminal(stream: Any) -> bool:
    """Whether somebody watches `stream`, which may be anything."""
    try:
        return bool(stream.isatty())
    except (OSError, ValueError, AttributeError):
        return False


# --- run ------------------------------------------------------------------------------------------------------------


def run(command: Sequence[str], interval: str | None, fail: Callable[[str], NoReturn]) -> None:
    """Run the script `command[0]` with the arguments that follow it; `fail` reports an unusable command line."""
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        fail("the following arguments are required: script.py")
    path = command[0]
    try:
        if not os.path.isabs(path):
            path = os.path.join(os.getcwd(), path)  # not normalised, as Python does not: it is part of every traceback
        module, folder, get_code = _prepare(path)
    except OSError as error:
        fail(f"can't open file {path!r}: [Errno {error.errno}] {error.strerror}")
    sys.argv = [*command]
    if not sys.flags.safe_path:
        sys.path[0] = folder  # what stood there was our own folder, or with `python -m` the current one
    _replaced.append(sys.modules["__main__"])
    sys.modules["__main__"] = module
    _start_sweeper(interval)
    atexit.register(_report, os.getpid())  # registered before the script's own handlers, so it runs after them
    try:
        exec(get_code(), module.__dict__)
    except SystemExit:
        raise
    except BaseException:
        # Python itself reports it and chooses the exit status: for KeyboardInterrupt it ends the process by SIGINT.
        _hide_runner(module)
        raise


def _prepare(path: str) -> tuple[ModuleType, str, Callable[[], CodeType]]:
    """The module `__main__` for the script at `path`, its entry in `sys.path`, and a function that gives its code."""
    finder = pkgutil.get_importer(path)  # a folder and a zip file have one
    if finder is not None:
        spec = finder.find_spec("__main__")
        if spec is None or spec.loader is None:
            raise SystemExit(f"{sys.executable}: can't find '__main__' module in {path!r}")
        module, folder = module_from_spec(spec), path
        get_code = partial(spec.loader.get_code, "__main__")  # type: ignore[attr-defined]
    else:
        with io.open_code(path) as file:
            source = file.read()
        module, folder = ModuleType("__main__"), str(Path(path).resolve().parent)
        vars(module).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        get_code = partial(compile, source, path, "exec", dont_inherit=True)
    vars(module).update(__builtins__=builtins, __annotations__={})
    return module, folder, get_code


def _start_sweeper(interval: str | None) -> None:
    """Sweep every `interval`, or as the environment says, or else by default, here and in child processes."""
    if interval is None:
        interval = os.environ.get(AUTO_SWEEP, "").strip() or "on"
    os.environ[AUTO_SWEEP] = interval  # a forked child sweeps as its parent does; this makes a spawned one do so, too
    try:
        seconds = config.auto_sweep_interval()
    except ArgumentError as error:
        raise SystemExit(f"sweepgrad run: {error}") from None
    if seconds is None:
        sweeper.stop()
    else:
        sweeper.start(seconds)


def _hide_runner(module: ModuleType) -> None:
    """Let tracebacks begin with the script's first frame, where `python script.py` begins them."""
    hook = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        while traceback is not None and traceback.tb_frame.f_globals is not module.__dict__:
            traceback = traceback.tb_next
        sys.last_traceback = traceback
        hook(kind, error.with_traceback(traceback), traceback)

    sys.excepthook = excepthook


def _report(pid: int) -> None:
    """Write the summary, unless this is a forked child of the process `pid` that ran the script."""
    stream = sys.__stderr__  # whatever the script put in the place of `sys.stderr`
    if os.getpid() != pid or stream is None or stream.closed:
        return
    text = summary()
    try:
        stream.flush()
        # Not through the stream: what it could not write it would keep, and fail again at exit, with status 120.
        os.write(stream.fileno(), text.encode())
    except (OSError, ValueError):
        pass


def summary() -> str:
    """What became of the nodes registered so far, in two lines, after one last sweep."""
    sweep(collect_cycles=True)
    stats = graph.stats()
    return (
        f"sweepgrad: {stats.registered:,} nodes registered: {stats.consumed:,} consumed, {stats.swept:,} swept, "
        f"{stats.nodes:,} still live ({format_bytes(stats.saved_bytes)} saved)\n"
        f"sweepgrad: {stats.peak:,} nodes at the peak; {stats.sweep_seconds * 1e3:,.1f} ms spent in "
        f"{stats.sweeps:,} sweeps\n"
    )


# --- warmup ---------------------------------------------------------------------------------------------------------


def warmup(dtypes: Sequence[str], jobs: int | None) -> None:
    """Compile the common kernels for `dtypes` in `jobs` processes; end with status 1 if not all are kept."""
    from sweepgrad.warmup import default_jobs, perform_all, tasks

    try:
        for check in SETTINGS.values():  # here, rather than in each of the processes
            with suppress(OSError):
                check()
        folder = kept_in()
    except SweepgradError as error:
        raise SystemExit(f"sweepgrad warmup: {error}") from None
    if folder is None:
        raise SystemExit("sweepgrad warmup: there is nowhere to keep kernels, so none are compiled")
    start = time.perf_counter()
    todo = tasks(dtypes)
    try:
        outcomes = list(_progress(perform_all(todo, jobs or default_jobs()), len(todo)))
    except KeyboardInterrupt:
        raise SystemExit(f"sweepgrad warmup: interrupted; what was compiled is kept in {folder}") from None
    compiled, lost, loaded = (sum(getattr(one, key) for one in outcomes) for key in ("compiled", "lost", "loaded"))
    _say(
        f"{compiled:,} kernels compiled and {loaded:,} found in {time.perf_counter() - start:.1f} s; "
        f"they are kept in {_cache(folder)}"
    )
    for one in outcomes:
        if one.error is not None:
            _note(f"sweepgrad warmup: {' in '.join(one.task)}: {one.error}")
    if lost:
        _note(f"sweepgrad warmup: {lost:,} kernels could not be kept")
    if lost or any(one.error is not None for one in outcomes):
        raise SystemExit(1)


def _progress(outcomes: Iterable[Outcome], total: int) -> Iterator[Outcome]:
    """`outcomes`, shown on standard error as they come: by tqdm on a terminal, or else a line at every tenth."""
    if _is_terminal(sys.stderr):
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            yield from tqdm(outcomes, total=total, desc="compiling", unit="task")
            return
    for done, outcome in enumerate(outcomes, start=1):
        yield outcome
        if done * 10 // total != (done - 1) * 10 // total:
            _note(f"sweepgrad warmup: {done} of {total} tasks done")


# --- info -----------------------------------------------------------------------------------------------------------


def info() -> str:
    """Versions, the kernel cache, the settings in the environment and the thresholds, one to a line."""
    from platform import platform, python_version

    import numpy

    limit = graph.get_threshold()
    lines = {
        "sweepgrad": __version__,
        "Python": f"{python_version()} on {platform()}",
        "NumPy": numpy.__version__,
        "Numba": _numba(),
        "devices": _devices(),
        "cache": _in_force(CACHE_DIR, lambda: _cache(config.cache_dir())),
        "sweeper": _in_force(AUTO_SWEEP, lambda: f"every {sweeper.interval:g} s" if sweeper.is_running() else "off"),
        "threads": _in_force(NUM_THREADS, lambda: f"up to {config.num_threads():,} for one kernel"),
        "pool": _in_force(POOL_LIMIT, lambda: f"keeps up to {format_bytes(config.pool_limit())}"),
        "thresholds": f"{limit.nodes:,} dropped nodes, {format_bytes(limit.bytes)} saved since the last sweep",
    }
    for name in sorted({*SETTINGS} | {name for name in os.environ if name.startswith(PREFIX)}):
        lines[name] = _setting(name)
    width = max(map(len, lines))
    return "\n".join(f"{name:{width}}  {value}" for name, value in lines.items())


def _in_force(name: str, read: Callable[[], str]) -> str:
    """What follows from the variable `name`, as `read` tells, or why nothing does."""
    try:
        SETTINGS[name]()
        return read()
    except ArgumentError:
        return f"unknown, for {name} is not understood"
    except OSError as error:
        return f"none: {error.strerror}"


def _setting(name: str) -> str:
    """The value of the variable `name`, and what is wrong with it."""
    if name not in os.environ:
        return "not set"
    value = repr(os.environ[name])
    if name not in SETTINGS:
        return f"{value} (not a setting of sweepgrad)"
    try:
        SETTINGS[name]()
    except ArgumentError as error:
        return f"{value} (not understood{str(error).removeprefix(f'`{name}` is {value}')})"
    except OSError:
        pass
    return value


def _devices() -> str:
    """The devices that tensors can be on, or why there are no GPUs among them."""
    try:
        driver = gpu.driver()
    except (MissingDependencyError, DeviceError) as error:
        return f"cpu only: {error}"
    return "; ".join(["cpu", *(f"cuda:{k} ({driver.describe(k)})" for k in range(driver.count))])


def _numba() -> str:
    """The version of Numba, asked of its metadata, since importing it takes a second."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("numba")
    except PackageNotFoundError:
        return "unknown: its metadata is not there"


def _cache(folder: Path) -> str:
    """The cache folder and how much it holds, or why kernels cannot be kept there."""
    fault = _fault(folder)
    if fault is not None:
        return f"{folder} (unusable: {fault})"
    if not folder.exists():
        return f"{folder} (not there yet)"
    sizes = []
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(parent) / name).lstat().st_size)
            except OSError:  # removed meanwhile
                continue
    return f"{folder} ({len(sizes):,} files, {format_bytes(sum(sizes))})"


def _fault(folder: Path) -> str | None:
    """Why kernels cannot be kept in `folder`, which is made where it is missing; None if they can."""
    nearest = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"{nearest} cannot be written to"
    if nearest == folder:
        try:
            check_private(folder)
        except SweepgradError as error:
            return str(error)
    return None
