"""Finalisers at any moment: in every thread, on every line of the registry, on a thread that holds its lock."""

from launch import quiet
from sweepgrad.ops.op import OPS

PRELUDE = """
import gc, sys, threading, traceback
import sweepgrad as sg
from sweepgrad.graph import process

def nothing_is_left(variables, operations, consumed):
    '''All that was made has gone, and every count says so.'''
    assert not errors, chr(10).join(errors)
    sg.sweeper.stop()  # in the middle of a collection it would make the next line do nothing
    gc.collect()
    assert sg.sweep().remaining == 0
    stats = sg.graph.stats()
    assert (stats.nodes, stats.variables, stats.childless, stats.saved_bytes, stats.dropped) == (0,) * 5, stats
    assert not any(stats.indexes.values()), stats.indexes
    assert (stats.registered, stats.consumed) == (variables + operations, consumed), (stats, operations, consumed)
    assert stats.registered == stats.consumed + stats.swept, stats
    sg.graph.audit()

errors = []

def guarded(function):
    '''The function, which must not raise: finalisers and threads would say so to nobody.'''
    def wrapper(*args):
        try:
            function(*args)
        except BaseException:
            errors.append(traceback.format_exc())
    return wrapper

def in_threads(work, count):
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_four_threads_with_a_collection_at_nearly_every_allocation():
    """Each turn leaves a cycle of a variable and two operations, and one whose finaliser computes itself."""
    source = """
ROUNDS, THREADS = 100, 4
late = [0] * THREADS
own = [sg.asarray([1.0, 2.0], requires_grad=True) for _ in range(THREADS)]

class Late:
    '''In a cycle, so the collector chooses when it ends, and on which thread.'''

    def __init__(self, number, tensor):
        self.number, self.me = number, self
        self.tensor = tensor * 2.0

    @guarded
    def __del__(self):
        late[self.number] += 1
        with sg.enable_grad():  # a backward pass may be under way on this thread
            (own[self.number] * 3.0).sum().backward()
            own[self.number] * 5.0
        sg.graph.stats()
        sg.sweep(max_nodes=7)

@guarded
def work(number):
    for k in range(ROUNDS):
        x = sg.asarray([1.0, 2.0], requires_grad=True)
        cycle = [x, x * 2.0, x + 1.0]
        cycle.append(cycle)
        (cycle[1] + x * x).sum().backward()
        assert x.grad.tolist() == [4.0, 6.0]
        Late(number, own[number])
        if k % 3 == number % 3:
            stats = sg.graph.stats()
            assert stats.nodes >= stats.variables and stats.nodes >= stats.childless
            sg.sweep()
        if k % 40 == number:
            sg.graph.nodes()

sys.setswitchinterval(1e-5)
gc.set_threshold(1)
in_threads(work, THREADS)
gc.disable()
sg.sweeper.stop()
gc.collect()
assert late == [ROUNDS] * THREADS, late
assert [x.grad.tolist() for x in own] == [[3.0 * ROUNDS] * 2] * THREADS
own.clear()
turns = ROUNDS * THREADS
nothing_is_left(turns + THREADS, (2 + 3 + 1 + 3) * turns, (1 + 3 + 2) * turns)
"""
    quiet(PRELUDE + source, settings={"SWEEPGRAD_AUTO_SWEEP": "1ms"})


def test_a_finaliser_may_use_the_tensors_that_die_with_it():
    """Those that only it holds are as ever. Those of a cycle may have been finalised before it, and swept; then it is
    told. And weak references to them are dead, also a node's to the tensor whose gradient it has: there is none then.
    """
    source = """
gc.freeze()  # so that a collection takes no time
ROUNDS = 200
told, whole, absent = [], [], []

class Late:
    def __init__(self, x, in_cycle):
        self.x, self.y, self.me = x, x * x, self if in_cycle else None

    @guarded
    def __del__(self):
        sg.sweep()
        try:
            (self.y * 3.0).sum().backward()
        except sg.GraphConsumedError as error:
            told.append(str(error))
            assert self.x.grad is None
        else:
            (absent if self.x.grad is None else whole).append(self.x.grad)

for k in range(ROUNDS):
    Late(sg.asarray([1.0, 2.0], requires_grad=True), k % 2)
    if k % 4 == 1:
        gc.collect()
gc.collect()
assert all("brought back to life" in one for one in told), told
assert len(told) + len(absent) == len(whole) == ROUNDS // 2
assert [grad.tolist() for grad in whole] == [[6.0, 12.0]] * len(whole)
done = 3 * len(whole)
whole.clear()
nothing_is_left(ROUNDS, 3 * ROUNDS, done)
"""
    quiet(PRELUDE + source, settings={"SWEEPGRAD_AUTO_SWEEP": "1ms"})


def test_a_finaliser_on_every_line_of_the_graph():
    """A collection before each line of the registry and of a backward pass ends a finaliser that computes, runs
    backward, sweeps and asks for statistics, on the very thread, in most cases with the registry's lock held.
    """
    source = """
import collections, os
from sweepgrad.graph import registry

def scenario():
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    y = x * x
    y.retain_grad()
    with y.register_hook(lambda ct: ct * 1.0):
        (y * 3.0).sum().backward(retain_graph=True)
    assert (x.grad.tolist(), y.grad.tolist()) == ([6.0, 12.0], [3.0, 3.0])
    stranded = y * 2.0 + x
    y.sum().backward()
    assert x.grad.tolist() == [8.0, 16.0]
    try:
        stranded.sum().backward()
    except sg.GraphConsumedError:
        pass
    else:
        raise AssertionError
    sg.sweep()
    del stranded
    z = x * x * x
    x.grad = None
    z.sum().backward(create_graph=True)
    slope = x.grad
    x.grad = None
    slope.sum().backward()
    assert x.grad.tolist() == [6.0, 12.0]
    sg.optim.SGD([x], lr=0.1).zero_grad()
    del slope, z
    assert sg.grad(lambda t: (t * t).sum())([3.0]).tolist() == [6.0]
    chain = x
    for _ in range(5):
        chain = chain + 1.0
    wide = [x * 2.0 for _ in range(3)]
    del chain, wide[1]
    sg.sweep(max_nodes=2)
    stats, nodes = sg.graph.stats(), sg.graph.nodes()
    assert stats.nodes >= stats.variables >= 1 and len(nodes) >= 1
    sg.graph.set_threshold(nodes=2000)
    sg.sweep(max_seconds=10.0)

own = sg.asarray([1.0, 2.0], requires_grad=True)
runs = held = 0

class Late:
    def __init__(self):
        self.me = self
        self.cycle = [sg.ones((2,), requires_grad=True) * 2.0]

    @guarded
    def __del__(self):
        global runs, held
        runs += 1
        held += process.registry.lock._is_owned()
        with sg.enable_grad():
            (own * 3.0).sum().backward()
            own * 5.0
        sg.graph.stats()
        sg.sweep(max_nodes=3)
        sg.sweep()

visits = collections.Counter()

def late(frame, event, arg):
    line = frame.f_code.co_filename, frame.f_lineno
    # Not each time: the work that a finaliser leaves to the line would be more than the line does, without end.
    if event == "line" and visits[line] < 3:
        visits[line] += 1
        before = runs
        with sg.enable_grad():
            Late()
        gc.collect(0)
        assert runs == before + 1
    return late

folder = os.path.dirname(registry.__file__)

scenario()
(own * 3.0).sum().backward()
own * 5.0
own.grad = None
gc.collect()
sg.sweep()
before = sg.graph.stats()
scenario()
sg.sweep()
after = sg.graph.stats()
registered, consumed = after.registered - before.registered, after.consumed - before.consumed
process.registry.settle_at = 1
gc.disable()
gc.freeze()
sys.settrace(lambda frame, *_: late if os.path.dirname(frame.f_code.co_filename) == folder else None)
scenario()
sys.settrace(None)
gc.unfreeze()
assert own.grad.tolist() == [3.0 * runs] * 2
assert runs > 400 and held > 100, (runs, held)
del own
gc.collect()
nothing_is_left(0, after.registered + registered + 5 * runs, after.consumed + consumed + 2 * runs)
"""
    quiet(PRELUDE + source)


def test_a_finaliser_that_needs_an_expression_while_another_is_built(monkeypatch):
    """Rules for tensors are built from whole operations, and kernels from what these are made of."""
    outer, inner = OPS["reciprocal"], OPS["square"]
    assert inner.scalar is not None
    expected = inner.forward
    partials = outer.partials

    def interrupted(*args):
        vars(inner).pop("forward")  # as if nobody had asked for it yet
        assert inner.forward is expected
        return partials(*args)

    monkeypatch.setattr(outer, "partials", interrupted)
    for name in ("derivatives", "replayed"):
        value = getattr(outer, name)
        vars(outer).pop(name)
        assert getattr(outer, name) == value
