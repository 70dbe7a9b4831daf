"""What users read: reports, statistics, node lists, callbacks, thresholds, and the functions of `sweepgrad.graph`."""

import gc

import pytest
from graph_toys import handles_of, multiply, run_backward, variable

from sweepgrad import graph
from sweepgrad.errors import ArgumentError, AuditError
from sweepgrad.graph import process, report
from sweepgrad.graph.node import Node
from sweepgrad.graph.registry import HELP_FACTOR
from sweepgrad.graph.report import (
    GraphStats,
    NodeInfo,
    SweepReport,
    Threshold,
    format_bytes,
    node_infos,
    stats,
)

# --- text -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (-2048, "-2.0 KiB"),
        (5 << 20, "5.0 MiB"),
        (3 << 30, "3.0 GiB"),
        (1 << 40, "1.0 TiB"),
        (1 << 51, "2048.0 TiB"),
    ],
)
def test_bytes_have_binary_units(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("report", "text"),
    [
        (SweepReport(1, 10, 0.0015, 0), "swept 1 node (10 B) in 1.50 ms; 0 remaining"),
        (SweepReport(0, 0, 0.0, 0), "swept 0 nodes (0 B) in 0.00 ms; 0 remaining"),
        (SweepReport(12345, 1 << 20, 1.0, 6789), "swept 12,345 nodes (1.0 MiB) in 1000.00 ms; 6,789 remaining"),
    ],
)
def test_sweep_report_reads_well(report, text):
    assert str(report) == text


def test_stats_read_well():
    found = GraphStats(
        nodes=1234,
        variables=5,
        childless=6,
        dropped=7,
        saved_bytes=2048,
        registered=5000,
        consumed=3000,
        swept=766,
        peak=2000,
        sweeps=10,
        sweep_seconds=0.5,
        indexes={},
    )
    assert str(found) == (
        "1,234 nodes (5 variables, 6 childless), 2.0 KiB saved, 7 dropped and waiting; "
        "5,000 registered, 3,000 consumed, 766 swept in 10 sweeps"
    )


def test_node_infos_read_well(registry):
    x = variable(registry, 2.0)
    y = multiply(x, x, nbytes=1024)
    y.node.shape, y.node.dtype = (2, 3), "float32"
    first, second = map(str, node_infos(registry))
    assert first == "node 1: variable () None, parents none, 0 B saved, alive"
    assert second == "node 2: multiply (2, 3) float32, parents 1, 1, 1.0 KiB saved, alive"
    del y
    assert str(node_infos(registry)[1]).endswith("orphan")


def test_reports_are_frozen():
    for made in (SweepReport(0, 0, 0.0, 0), Threshold(1, 1)):
        with pytest.raises(AttributeError):
            made.nodes = 1


# --- statistics and snapshots -----------------------------------------------------------------------------------------


def test_registered_is_the_sum_of_what_is_there_consumed_and_swept(registry):
    x = variable(registry, 2.0)
    run_backward(x * x)
    x * x
    y = x * x
    registry.sweep()
    found = stats(registry)
    assert (found.nodes, found.consumed, found.swept, found.registered) == (2, 1, 1, 4)
    del y


def test_alive_follows_descendants_and_pending_drops(registry):
    x, z = variable(registry, 1.0), variable(registry, 1.0)
    y = x * x
    u = y * y
    z * z
    del x, y
    assert [info.alive for info in node_infos(registry)] == [True, True, True, True, False]
    del u
    assert [info.alive for info in node_infos(registry)] == [False, True, False, False, False]


def test_node_infos_hold_no_node(registry):
    x = variable(registry, 1.0)
    infos = node_infos(registry)
    node = x.node
    assert not any(type(held) is NodeInfo for held in gc.get_referrers(node))
    assert all(not isinstance(value, Node) for value in (infos[0].parents, infos[0].op, infos[0].dtype))


# --- callbacks --------------------------------------------------------------------------------------------------------


def test_callbacks_hear_start_and_stop(registry):
    x = variable(registry, 1.0)
    multiply(x, x, nbytes=10)
    heard = []
    registry.callbacks.append(lambda phase, info: heard.append((phase, info)))
    report = registry.sweep()
    assert heard == [
        ("start", {"trigger": "call", "dropped": 1}),
        ("stop", {"trigger": "call", "nodes": 1, "bytes": 10, "seconds": report.seconds, "remaining": 0}),
    ]


def test_callbacks_get_a_copy_of_the_information(registry):
    heard = []
    registry.callbacks += [lambda phase, info: info.clear(), lambda phase, info: heard.append(len(info))]
    registry.sweep()
    assert heard == [2, 5]


def test_trigger_says_who_sweeps(registry):
    triggers = []
    registry.callbacks.append(lambda phase, info: triggers.append(info["trigger"]))
    x = variable(registry, 1.0)
    y = x * x
    x + x
    run_backward(y)
    assert triggers == ["backward", "backward"]
    registry.set_threshold(nodes=1)
    for _ in range(3):
        x + x
    assert triggers[2:] == ["threshold", "threshold"]


def test_raising_callback_is_logged_and_counted_and_the_others_run(registry, caplog):
    heard = []

    def broken(phase, info):
        raise ValueError("no such luck")

    registry.callbacks += [broken, lambda phase, info: heard.append(phase)]
    x = variable(registry, 1.0)
    x * x
    assert registry.sweep().nodes == 1
    assert heard == ["start", "stop"]
    assert registry.callbacks.errors == 2
    assert len(caplog.records) == 2
    assert caplog.records[0].name == "sweepgrad"
    assert "broken" in caplog.text
    assert "no such luck" in caplog.text
    caplog.clear()  # the tracebacks that it keeps hold this frame, and so `x`


def test_raising_callback_ends_nothing_where_errors_cannot_be_logged(registry, monkeypatch):
    def broken(*args):
        raise ValueError("I/O operation on closed file")

    monkeypatch.setattr(report.log, "exception", broken)
    registry.callbacks.append(lambda phase, info: 1 / 0)
    registry.sweep()
    assert registry.callbacks.errors == 2


def test_interrupt_in_a_callback_is_not_swallowed(registry):
    def interrupted(phase, info):
        raise KeyboardInterrupt

    registry.callbacks.append(interrupted)
    x = variable(registry, 1.0)
    x * x
    with pytest.raises(KeyboardInterrupt):
        registry.sweep()
    registry.callbacks.clear()
    heard = []
    registry.callbacks.append(lambda phase, info: heard.append(phase))
    assert registry.sweep().nodes == 1
    assert heard == ["start", "stop"]


def test_callback_that_sweeps_is_not_told_of_its_own_sweep(registry):
    x = variable(registry, 1.0)
    x * x
    heard = []

    def nested(phase, info):
        heard.append((phase, registry.sweep().nodes))

    registry.callbacks.append(nested)
    assert registry.sweep().nodes == 0
    assert heard == [("start", 1), ("stop", 0)]


def test_callback_that_removes_itself_does_not_disturb_the_round(registry):
    heard = []

    def once(phase, info):
        heard.append("once")
        registry.callbacks.remove(once)

    registry.callbacks += [once, lambda phase, info: heard.append(phase)]
    registry.sweep()
    assert heard == ["once", "start", "stop"]


def test_callback_that_computes_beyond_the_threshold_ends(registry):
    x = variable(registry, 1.0)
    registry.set_threshold(nodes=1)

    def busy(phase, info):
        for _ in range(10):
            x * x

    registry.callbacks.append(busy)
    registry.sweep()
    registry.callbacks.clear()
    assert stats(registry).registered == 21


# --- thresholds -------------------------------------------------------------------------------------------------------


def test_registering_sweeps_when_more_nodes_were_dropped_than_the_threshold(registry):
    registry.set_threshold(nodes=5)
    x = variable(registry, 1.0)
    sizes = []
    for _ in range(14):
        x * x
        sizes.append(len(registry.nodes) - 1)
    assert sizes == [1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5, 6, 1, 2]


def test_registering_sweeps_when_more_bytes_were_saved_than_the_threshold(registry):
    registry.set_threshold(nbytes=100)
    x = variable(registry, 1.0)
    saved = []
    for _ in range(9):
        multiply(x, x, nbytes=30)
        saved.append(registry.saved_bytes)
    assert saved == [30, 60, 90, 30, 60, 90, 120, 30, 60]


def test_growing_live_graph_is_looked_at_once_a_threshold_and_never_swept(registry):
    registry.set_threshold(nbytes=100)
    x = variable(registry, 1.0)
    live, marks = [], []
    for _ in range(10):
        live.append(multiply(x, x, nbytes=30))
        marks.append(registry.bytes_mark)
    assert marks == [100, 100, 100, 220, 220, 220, 220, 340, 340, 340]
    assert stats(registry).sweeps == 0


def test_orphans_found_earlier_count_as_work_for_the_threshold(registry):
    x = variable(registry, 1.0)
    y = multiply(x, x, nbytes=60)
    z = y * y
    registry.sweep()
    del y
    registry.sweep()
    del z
    assert registry.sweep(max_nodes=1).remaining == 1
    registry.set_threshold(nbytes=30)
    live = multiply(x, x, nbytes=40)
    assert registry.saved_bytes == 40
    del live


def test_sweep_sets_the_mark_from_which_bytes_are_counted(registry):
    registry.set_threshold(nbytes=100)
    x = variable(registry, 1.0)
    live = [multiply(x, x, nbytes=90)]
    registry.sweep()
    assert registry.bytes_mark == 190
    live.clear()
    registry.sweep()
    assert registry.bytes_mark == 100


def test_values_that_can_never_be_used_again_count_as_work_for_the_threshold(registry):
    x = variable(registry, 1.0)
    y = x * x
    run_backward(y)
    registry.set_threshold(nbytes=100)
    late = [multiply(y, y, nbytes=60) for _ in range(2)]
    assert stats(registry).saved_bytes == 0
    assert len(late) == 2


def test_registering_wakes_a_sweeper_rather_than_sweep(registry):
    registry.set_threshold(nodes=5)
    woken = []
    registry.wake = lambda: woken.append(len(registry.dropped))
    x = variable(registry, 1.0)
    for _ in range(20):
        x * x
    assert woken == list(range(6, 20))
    assert stats(registry).sweeps == 0
    x * x
    assert HELP_FACTOR == 4
    assert stats(registry).sweeps == 1
    assert len(registry.nodes) == 2
    assert len(woken) == 14


def test_registering_helps_a_sweeper_when_many_thresholds_of_bytes_were_saved(registry):
    x = variable(registry, 1.0)
    live = multiply(x, x, nbytes=100_000)
    registry.set_threshold(nbytes=100)
    woken = []
    registry.wake = lambda: woken.append(registry.saved_bytes - 100_000)
    for _ in range(9):
        multiply(x, x, nbytes=50)
    assert woken == [150, 200, 250, 300, 350]  # the live part does not make the backlog look small
    assert stats(registry).sweeps == 1
    assert registry.saved_bytes == 100_100
    del live


@pytest.mark.parametrize("value", [0, -1, True, 1.5, "5"])
def test_threshold_must_be_a_positive_integer(value):
    before = graph.get_threshold()
    for name in ("nodes", "bytes"):
        with pytest.raises(ArgumentError, match=rf"`set_threshold` {name} is .*; needed is a positive integer"):
            graph.set_threshold(**{name: value})
    assert graph.get_threshold() == before


def test_threshold_none_leaves_a_value(registry):
    registry.set_threshold(nodes=7)
    assert registry.threshold == Threshold(nodes=7, bytes=64 << 20)
    registry.set_threshold(nbytes=9)
    assert registry.threshold == Threshold(nodes=7, bytes=9)
    registry.set_threshold()
    assert registry.threshold == Threshold(nodes=7, bytes=9)
    assert registry.bytes_mark == 9


# --- the functions of `sweepgrad.graph` -------------------------------------------------------------------------------


@pytest.fixture
def served(registry, monkeypatch):
    """The test's registry in the place of the process's."""
    monkeypatch.setattr(process, "registry", registry)
    monkeypatch.setattr(process, "find_handles", handles_of(registry))
    return registry


def test_callbacks_are_the_process_registrys_own():
    assert graph.callbacks is process.registry.callbacks


def test_functions_serve_the_process_registry(served):
    x = variable(served, 1.0)
    y = x * x
    assert graph.stats() == stats(served)
    assert [info.op for info in graph.nodes()] == ["variable", "multiply"]
    graph.audit()
    graph.set_threshold(nodes=11)
    graph.set_threshold(bytes=12)
    assert graph.get_threshold() == Threshold(nodes=11, bytes=12)
    y.node.handles += 1
    with pytest.raises(AuditError):
        graph.audit()
    y.node.handles -= 1


def test_process_sweep_takes_limits(served):
    x = variable(served, 1.0)
    for _ in range(5):
        x * x
    assert graph.sweep(max_nodes=2).nodes == 2
    assert graph.sweep(max_seconds=0).nodes == 3


def test_process_sweep_can_collect_reference_cycles_first(served):
    x = variable(served, 1.0)
    y = x * x
    y._grad = y
    del y
    assert graph.sweep().nodes == 0
    assert graph.sweep(collect_cycles=True).nodes == 1


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"max_nodes": -1}, "max_nodes=-1"),
        ({"max_nodes": 1.0}, r"max_nodes=1\.0"),
        ({"max_nodes": True}, "max_nodes=True"),
        ({"max_seconds": -0.5}, r"max_seconds=-0\.5"),
        ({"max_seconds": float("nan")}, "max_seconds=nan"),
        ({"max_seconds": "1"}, "max_seconds='1'"),
    ],
)
def test_process_sweep_refuses_other_limits(served, limits, text):
    with pytest.raises(ArgumentError, match=f"`sweep` got {text}; needed is None or"):
        graph.sweep(**limits)
