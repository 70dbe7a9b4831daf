"""`SWEEPGRAD_AUTO_SWEEP`, read when sweepgrad is imported, in processes of its own."""

import json

import pytest

from launch import python

NAME = "SWEEPGRAD_AUTO_SWEEP"

GOOD = {
    None: None,
    "": None,
    " ": None,
    "off": None,
    "OFF": None,
    "0": None,
    "0.0": None,
    "0s": None,
    "0.5": 0.5,
    ".5": 0.5,
    "5": 5.0,
    "5.": 5.0,
    "500ms": 0.5,
    "500 ms": 0.5,
    " 2s ": 2.0,
    "1.5S": 1.5,
    "1m": 60.0,
    "on": 1.0,
    "On": 1.0,
    "168m": 10080.0,
    "604800": 604800.0,
}
BAD = [
    "fast", "-1", "+1", "1h", "1 hour", "1us", "nan", "inf", "-inf", "1e3", "0x10", "1,5", "1_000", "1s 2s", "ms", "s",
    ".", "true", "yes", "none", "604801", "10081m", "٣",
]  # fmt: skip

# Imports sweepgrad anew for each value and tells, as JSON, what came of it.
PROBE = f"""
import json, os, sys, threading

def outcome():
    try:
        import sweepgrad as sg
    except ValueError as error:
        return [type(error).__name__, str(error)]
    running = sg.sweeper.is_running()
    threads = [thread for thread in threading.enumerate() if thread.name == "sweepgrad-sweeper"]
    assert len(threads) == running and all(thread.daemon for thread in threads)
    interval = sg.sweeper.interval if running else None
    sg.sweeper.stop()
    return interval

results = []
for value in json.loads(sys.argv[1]):
    os.environ.pop({NAME!r}, None)
    if value is not None:
        os.environ[{NAME!r}] = value
    results.append(outcome())
    for name in [name for name in sys.modules if name.partition(".")[0] == "sweepgrad"]:
        del sys.modules[name]
print(json.dumps(results))
"""


def probe(values):
    done = python("-c", PROBE, json.dumps(values))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_good_values():
    assert dict(zip(GOOD, probe(list(GOOD)), strict=True)) == GOOD


def test_bad_values():
    for value, result in zip(BAD, probe(BAD), strict=True):
        kind, message = result
        assert kind == "ArgumentError", value
        assert f"`{NAME}` is {value!r}" in message
        for form in ("`0.5`", "`500ms`", "`2s`", "`1m`", "`on`", "`off`", "`0`", "empty"):
            assert form in message


@pytest.mark.parametrize(("value", "shown"), [(None, "False"), ("off", "False"), ("500ms", "True 0.5")])
def test_fresh_process(value, shown):
    code = (
        "import sweepgrad as sg; print(sg.sweeper.is_running(), sg.sweeper.interval if sg.sweeper.is_running() else '')"
    )
    done = python("-c", code, settings={} if value is None else {NAME: value})
    assert (done.stdout.strip(), done.stderr, done.returncode) == (shown, "", 0)


def test_bad_value_ends_a_fresh_process():
    done = python("-c", "import sweepgrad", settings={NAME: "fast"})
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("sweepgrad.errors.ArgumentError: ")
    assert NAME in last
    assert "'fast'" in last


def test_the_thread_sweeps_what_is_dropped_and_lets_the_process_end():
    """Nothing here calls `sweep` or `backward`, and 10 nodes are below every threshold."""
    code = """
import sweepgrad as sg
swept = sg.graph.stats().swept
x = sg.ones((3,), requires_grad=True)
for _ in range(10):
    x * 2.0
while sg.graph.stats().nodes > 1:
    pass
print(sg.graph.stats().swept)
"""
    done = python("-c", code, settings={NAME: "1ms"})
    assert (done.stdout, done.stderr, done.returncode) == ("10\n", "", 0)


def test_without_the_thread_nothing_is_swept_below_the_thresholds():
    code = """
import sweepgrad as sg
x = sg.ones((3,), requires_grad=True)
for _ in range(10):
    x * 2.0
print(sg.graph.stats().nodes, sg.graph.stats().dropped, sg.sweep().nodes)
"""
    done = python("-c", code, settings={NAME: "off"})
    assert (done.stdout, done.stderr, done.returncode) == ("11 10 10\n", "", 0)
