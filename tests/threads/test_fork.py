"""A forked child computes, runs backward and sweeps, whatever the parent and its other threads were doing."""

import multiprocessing
import os

import pytest

from launch import python, quiet

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")

PRELUDE = """
import faulthandler, gc, os, signal, sys, threading, warnings
warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks in processes with threads
import numpy as np
import sweepgrad as sg
from sweepgrad.graph import process
from sweepgrad.kernels import cpu

gc.freeze()  # audits look at all that is not
faulthandler.register(signal.SIGALRM, chain=True)  # a child that hangs shows where, and is killed
sg.set_num_threads(2)
many = np.linspace(0.0, 1.0, 1 << 18)  # enough for a kernel to call for helpers

@sg.fuse
def fused(x, y):
    return sg.sum(sg.exp(-(x * x)) * y)

def helpers():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sweepgrad-1")]

@sg.enable_grad()  # also in a hook, and in what runs at the end of a backward pass
def compute():
    before = sg.graph.stats().consumed
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    sg.sum(x * x).backward()
    assert x.grad.tolist() == [2.0, 4.0]
    fused(x, sg.asarray([1.0, 3.0])).backward()
    np.testing.assert_allclose(x.grad.numpy(), [2 - 2 * np.exp(-1.0), 4 - 12 * np.exp(-4.0)])
    large = sg.asarray(many, requires_grad=True)
    sg.sum(sg.sin(large) * 2.0).backward()
    np.testing.assert_allclose(large.grad.numpy(), 2 * np.cos(many), rtol=1e-12)
    assert helpers()
    assert sg.graph.stats().consumed >= before + 6

def sweep_by_itself():
    '''What is dropped goes without a call; it would not for a second if the sweeper did not run.'''
    before = sg.graph.stats().swept
    x = sg.ones((3,), requires_grad=True)
    for _ in range(10):
        x * 2.0
    while sg.graph.stats().swept < before + 10:
        pass

def in_child(function, *args):
    '''The number of a forked child that runs the function, and ends with 0 if that raises nothing.'''
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        signal.alarm(60)
        function(*args)
        status = 0
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(status)

def wait(*children):
    found = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert found == [0] * len(children), found
"""


@forks
@pytest.mark.parametrize("interval", ["1ms", None])
def test_fifty_children_of_a_process_with_threads_everywhere(interval):
    """The daemon runs, helpers are there, one thread holds the registry's lock now and then, and one the compiler's."""
    source = f"""
interval, children = {interval!r}, []
compute()
if interval:
    sg.sweeper.start(interval)

end = threading.Event()

def hold(lock):
    while not end.is_set():
        with lock():
            end.wait(0.001)

holders = [threading.Thread(target=hold, args=(lock,)) for lock in (lambda: process.registry.lock, lambda: cpu._lock)]
for thread in holders: thread.start()

def child(number):
    assert sg.sweeper.is_running() == (interval is not None)
    assert not helpers()
    compute()
    if interval:
        assert sg.sweeper.interval == 0.001
        sweep_by_itself()
    sg.exp(sg.ones((3,), requires_grad=True)) * 2.0
    sg.sweep()
    sg.graph.audit()
    if number % 2:  # the others end as a process does by itself
        os._exit(0)

for number in range(50 if interval else 10):
    children.append(os.fork())
    if not children[-1]:
        signal.alarm(60)
        child(number)
        sys.exit(0)
wait(*children)
end.set()
for thread in holders: thread.join()
compute()
assert sg.sweeper.is_running() == (interval is not None)
"""
    quiet(PRELUDE + source)


@forks
@pytest.mark.parametrize("lock", ["process.registry.lock", "cpu._lock"])
def test_child_works_though_another_thread_held_a_lock(lock):
    source = f"""
compute()
sg.sweeper.start("1ms")
held, forking = threading.Event(), threading.Event()

def hold():
    with {lock}:
        held.set()
        forking.wait(0.2)  # the fork may wait for the lock, so nobody can say when it has begun to

threading.Thread(target=hold, daemon=True).start()
held.wait()

def child():
    compute()
    sg.asinh(sg.ones((3,)))  # a kernel of its own
    assert sg.sweeper.is_running()
    sg.sweep()

wait(in_child(child))
"""
    quiet(PRELUDE + source)


@forks
def test_a_stopped_sweeper_stays_stopped_in_a_child():
    source = """
sg.sweeper.start("1ms")
sg.sweeper.stop()

def child():
    compute()
    assert not sg.sweeper.is_running()
    sg.sweeper.start("2ms")
    sweep_by_itself()
    sg.sweeper.stop()

wait(in_child(child))
"""
    quiet(PRELUDE + source)


@forks
def test_a_grandchild_of_a_grandchild():
    source = """
sg.sweeper.start("1ms")

def child(generations):
    compute()
    sweep_by_itself()
    if generations:
        wait(in_child(child, generations - 1))
        compute()

child(4)
"""
    quiet(PRELUDE + source)


@forks
def test_fork_on_another_thread_than_the_main_one():
    source = """
compute()
sg.sweeper.start("1ms")

def fork():
    def child():
        compute()
        sweep_by_itself()
        sg.graph.audit()
    wait(in_child(child))

thread = threading.Thread(target=fork)
thread.start()
thread.join()
"""
    quiet(PRELUDE + source)


@forks
def test_fork_within_a_hook():
    """In the child the backward pass goes on, and so it does in the parent."""
    source = """
sg.sweeper.start("1ms")
child = None

def fork(ct):
    global child
    child = os.fork()
    compute()

x = sg.asarray([1.0, 2.0], requires_grad=True)
y = x * x
y.register_hook(fork)
sg.sum(y * 3.0).backward()
assert x.grad.tolist() == [6.0, 12.0]
sweep_by_itself()
sg.sweep()
sg.graph.audit()
if child:
    wait(child)
"""
    quiet(PRELUDE + source)


@forks
@pytest.mark.parametrize("trigger", ["call", "sweeper", "threshold", "backward"])
@pytest.mark.parametrize("phase", ["start", "stop"])
def test_fork_within_a_callback_of_a_sweep(trigger, phase):
    """In the child the sweep goes on, on the one thread that is left."""
    source = f"""
trigger, phase = {trigger!r}, {phase!r}
forked = threading.Event()
children = []

def fork(now, info):
    if (now, info["trigger"]) != (phase, trigger) or forked.is_set():
        return
    child = os.fork()
    forked.set()
    if child:
        children.append(child)
    compute()
    if not child and trigger == "sweeper":  # the thread would come to its end, and the process to none
        sweep_by_itself()
        os._exit(0)

compute()
sg.graph.callbacks.append(fork)
sg.graph.set_threshold(nodes=100)
x = sg.asarray([1.0, 2.0], requires_grad=True)
for _ in range(10):
    x * 2.0
if trigger == "call":
    sg.sweep()
elif trigger == "sweeper":
    sg.sweeper.start("1ms")
elif trigger == "backward":
    sg.sum(x).backward()
else:
    while not forked.is_set():
        x * 2.0
assert forked.wait(60)
sg.graph.callbacks.clear()
compute()
sg.sweep()
sg.graph.audit()
sg.sweeper.start("1ms")
sweep_by_itself()
wait(*children)
"""
    quiet(PRELUDE + source)


@forks
def test_fork_while_another_thread_compiles(tmp_path):
    """The child compiles, too."""
    source = """
def use(dtype):
    x = sg.asarray([0.25, 0.5], dtype=dtype, requires_grad=True)
    sg.sum(sg.fuse(lambda x: sg.atanh(x) * sg.cosh(x))(x)).backward()
    values = np.array([0.25, 0.5])
    expected = np.cosh(values) / (1 - values**2) + np.arctanh(values) * np.sinh(values)
    np.testing.assert_allclose(x.grad.numpy(), expected, rtol=1e-5)

thread = threading.Thread(target=use, args=("float64",))
thread.start()
while not cpu.COUNTS["compiled"]:
    pass
wait(in_child(use, "float32"), in_child(use, "float64"))
thread.join()
use("float64")
"""
    quiet(PRELUDE + source, settings={"SWEEPGRAD_CACHE_DIR": str(tmp_path)})


@forks
@pytest.mark.parametrize("part", ["graph", "other"])
def test_fork_at_any_line_of_another_thread(part):
    """The other thread is stopped at one line after the other, of which every so many is taken; the child computes what
    nobody has computed before. A lock that the stopped thread holds is nobody's in the child.
    """
    source = f"""
import collections, zlib
package, part = os.path.dirname(sg.__file__), {part!r}
numbers = iter(range(10**6))
go, forked = threading.Event(), threading.Event()
seen, ended = set(), threading.Event()

def first_use(x):
    k = next(numbers)
    sg.fuse(lambda x: sg.sum(sg.exp(-(x * x)) * (k + 0.5)))(x).backward()
    for name in ("asinh", "acosh", "erfc", "log2", "expm1", "gelu", "softplus")[k % 7 :]:
        sg.sum(getattr(sg, name)(x)).backward(create_graph=name == "gelu")

def use(rounds):
    for _ in range(rounds):
        x = sg.asarray(np.full(2 + next(numbers), 1.5), requires_grad=True)
        first_use(x)
        with x.register_hook(lambda ct: None):
            y = sg.exp(x) * x
            sg.sum(y).backward(retain_graph=True)
        optimizer = sg.optim.SGD([x], lr=0.1)
        optimizer.step()
        optimizer.zero_grad()
        stranded = sg.sin(y)
        sg.sum(y).backward()
        del y
        x * 2.0
        sg.full((40_000,), 1.0, requires_grad=True) * 2.0
        sg.sweep()
        sg.graph.stats()
        sg.graph.nodes()

def stop(frame, event, arg):
    file, line = frame.f_code.co_filename, frame.f_lineno
    if not file.startswith(package) and not file.endswith(("functools.py", "weakref.py")):
        return None
    in_graph = os.path.basename(os.path.dirname(file)) == "graph"
    if event == "line" and in_graph == (part == "graph") and (file, line) not in seen:
        seen.add((file, line))
        every = 6 if in_graph else 3 if file.endswith(("expr.py", "weakref.py")) else 30
        if zlib.crc32(f"{{os.path.basename(file)}}:{{line}}".encode()) % every == 0:
            forked.clear()
            go.set()
            forked.wait(0.3)  # a fork that waits for this thread's lock comes as soon as it is let go
    return stop

def work():
    sys.settrace(stop)
    use(2)
    sys.settrace(None)
    ended.set()
    go.set()

use(1)  # what is compiled or loaded under a lock that forks wait for
children = []
thread = threading.Thread(target=work)
thread.start()
while True:
    go.wait()
    go.clear()
    if ended.is_set():
        break
    child = in_child(use, 1)
    forked.set()
    children.append(child)
    if len(children) == 4:
        wait(*children)
        children.clear()
thread.join()
wait(*children)
"""
    quiet(PRELUDE + source)


def test_no_module_is_imported_by_a_first_operation():
    """A child that is forked while another thread imports a module waits for ever when it imports that itself. What
    loads and compiles kernels is imported under a lock, for which forks wait.
    """
    source = """
import copy, pickle, sys
import numpy as np
import sweepgrad as sg
before = set(sys.modules)
x = sg.asarray([1.0, 2.0], requires_grad=True)
sg.sum(x * x).backward()
sg.sum(sg.softmax(x) * sg.var(x)).backward()
(sg.ones((2, 2)) @ x).sum().backward()
sg.fuse(lambda x: sg.sum(x * x))(x).backward()
sg.optim.Adam([x]).step()
sg.asarray(np.ones(40_000)) + 1.0
repr(x), copy.deepcopy(x), pickle.dumps(x), x[0], sg.concat([x, x])
sg.sweeper.start("1ms")
sg.sweeper.stop()
sg.sweep(), sg.graph.stats(), sg.graph.nodes(), sg.graph.audit(), sg.pool.stats()
print(sorted(name for name in set(sys.modules) - before if name.split(".")[0] in ("numpy", "sweepgrad")))
"""
    quiet(source)  # compiles what is not in the cache, for which Numba is imported
    assert quiet(source) == "[]\n"


SCRIPT = """
import copy, multiprocessing, pickle, sys, warnings
warnings.simplefilter("ignore", DeprecationWarning)
import numpy as np
import sweepgrad as sg
from multiprocessing.pool import MaybeEncodingError

@sg.fuse
def loss(w, b, x):
    return sg.sum(sg.square(w * x + b))

def plain(x):
    return sg.sum(x * 2.0)

renamed = sg.fuse(plain)

class Model:
    def __init__(self):
        self.w = sg.asarray([1.0, 2.0], requires_grad=True)
        self.b = sg.asarray(0.5, dtype="float64", requires_grad=True)
        self.tied = {"again": self.w}
        self.loss = loss
        self.optimizer = sg.optim.Adam([self.w, self.b], lr=0.1)

def train(model, x):
    assert model.tied["again"] is model.w and model.optimizer.params[0] is model.w
    assert model.loss is loss
    for _ in range(3):
        model.optimizer.zero_grad()
        model.loss(model.w, model.b, x).backward()
        model.optimizer.step()
    sg.sweep()
    stats = sg.graph.stats()
    assert stats.registered == stats.nodes + stats.consumed + stats.swept, stats
    return model, model.w.grad, sg.sweeper.is_running()

def same(one, other):
    return all(
        a.is_variable and b.is_variable and a.numpy().tobytes() == b.numpy().tobytes()
        for a, b in ((one.w, other.w), (one.b, other.b))
    ) and one.optimizer.steps == other.optimizer.steps

def fails(x):
    return x + sg.ones((7,))

if __name__ == "__main__":
    method = sys.argv[1]
    model, x = Model(), sg.asarray([3.0, -1.0])
    train(model, x)  # the optimiser has a state
    w = model.w.tolist()
    expected, grad, _ = train(copy.deepcopy(model), x)
    assert w == model.w.tolist() != expected.w.tolist()
    shallow = copy.copy(model)
    assert shallow.w is model.w and shallow.loss is loss
    assert copy.copy(loss) is copy.deepcopy(loss) is pickle.loads(pickle.dumps(loss)) is loss
    sg.sweeper.start("1ms")
    context = multiprocessing.get_context(method)
    with context.Pool(2) as pool:
        for found, slope, swept in pool.starmap(train, [(model, x)] * 5):
            assert same(found, expected) and slope.tolist() == grad.tolist() and not slope.requires_grad
            assert swept == (method == "fork")
        assert pool.apply(loss, (model.w.detach(), model.b.detach(), x)).item() == loss(model.w, model.b, x).item()
        try:
            pool.apply(loss, (model.w, model.b, x))
        except MaybeEncodingError as error:
            assert "part of a graph, which is not copied or pickled" in str(error), error
        else:
            raise AssertionError
        try:
            pool.apply(loss, (model.w * 2.0, model.b, x))
        except sg.VariableError as error:
            assert "`multiply` is part of a graph" in str(error), error
        else:
            raise AssertionError
        try:
            pool.apply(fails, (x,))
        except sg.ShapeError as error:
            assert "`add` cannot broadcast" in str(error), error
        else:
            raise AssertionError
        assert pool.apply(renamed, (x,)).item() == 4.0  # found by no name of its own
        assert pool.apply(abs, (sg.asarray([-1.5]),)).tolist() == [1.5]  # it works on
    assert w == model.w.tolist()
    assert sg.sweeper.is_running()
    print("done")
"""


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_tensors_models_and_optimisers_go_to_other_processes_and_come_back(method, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = python(script, method)
    assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", ""), done.stderr
