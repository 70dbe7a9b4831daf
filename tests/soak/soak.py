"""Everything at once for so many seconds: `python tests/soak/soak.py 60` prints, as JSON, what was held at each moment.

Threads train, eager and fused, with large arrays and small, leave cycles, hooks that raise, graphs that can run no more
and finalisers that compute; the daemon sweeps every few milliseconds; now and then a child is forked.
"""

import collections
import contextlib
import faulthandler
import gc
import itertools
import json
import logging
import math
import os
import random
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

import sweepgrad as sg
from sweepgrad import fusion
from sweepgrad.fusion import Fused
from sweepgrad.kernels import cpu, expr
from sweepgrad.ops import loop, plan, program, reductions
from sweepgrad.ops.op import OPS, Elementwise
from sweepgrad.ops.reducer import Reducer

SAMPLES = 60

LENGTHS = 40
"""Lengths of arrays that are used in turn."""

KEPT = 16
"""Entries in a cache, fewer than there are lengths, so that some are thrown out all the time."""

end = threading.Event()
errors = []
rounds = {}


def worker(function):
    """Call the function, with the number of the turn, until the end; the first error ends all."""

    def run():
        try:
            for turn in itertools.count():
                if end.is_set():
                    return
                function(turn)
                rounds[function.__name__] = turn + 1
        except BaseException:
            errors.append(f"{function.__name__}: {traceback.format_exc()}")
            end.set()

    return threading.Thread(target=run, name=function.__name__)


@sg.fuse
def fused_loss(w, b, x, y):
    return sg.mean(sg.square(sg.tanh(w * x + b) - y))


def data(turn, length=None):
    rng = np.random.default_rng(turn % 50)
    return rng.uniform(0.5, 1.5, 2 + turn % LENGTHS if length is None else length)


class Trainer:
    """A small model that learns, in the way of its method."""

    def __init__(self, optimizer):
        self.w, self.b = (sg.asarray([value], requires_grad=True) for value in (0.5, 0.1))
        self.optimizer = optimizer([self.w, self.b])

    def step(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        assert np.isfinite(self.w.item())


eager_trainer = Trainer(lambda params: sg.optim.Adam(params, lr=1e-3))
fused_trainer = Trainer(lambda params: sg.optim.SGD(params, lr=1e-3, momentum=0.9))


def trains_eagerly(turn):
    x = sg.asarray(data(turn))
    one = eager_trainer
    one.step(sg.mean(sg.square(sg.tanh(one.w * x + one.b) - x * 0.5)))
    one.w * 2.0  # for the sweeper


def trains_fused(turn):
    x = sg.asarray(data(turn))
    one = fused_trainer
    one.step(fused_loss(one.w, one.b, x, x * 0.5))
    sg.value_and_grad(fused_loss, argnums=(0, 1))(one.w.detach(), one.b.detach(), x, x)


def uses_large_arrays(turn):
    values = data(turn, 40_000 + 100_000 * (turn % 3))
    x = sg.asarray(values, requires_grad=True)
    sg.exp(x)
    sg.sum(sg.sin(x) * x + sg.softmax(x)).backward()
    np.testing.assert_allclose(x.grad.numpy(), np.cos(values) * values + np.sin(values), rtol=1e-9)


alive = collections.deque()
"""One entry for each `Late` that has not ended."""


class Late:
    """In a cycle with tensors; computes when the collector ends it."""

    def __init__(self):
        alive.append(None)
        self.x = sg.asarray([1.0, 2.0], requires_grad=True)
        self.y, self.me = self.x * 3.0, self

    def __del__(self):
        alive.pop()
        with sg.enable_grad(), contextlib.suppress(sg.GraphConsumedError):
            sg.sum(self.y * 2.0).backward()
        sg.sweep(max_nodes=3)


def leaves_cycles(turn, most=100):
    """Cycles, of which no more than `most` are waiting for the collector."""
    Late()
    x = sg.asarray(data(turn, 1000), requires_grad=True)
    cycle = [x, x * 2.0]
    cycle.append(cycle)
    while len(alive) > most and not end.is_set():
        gc.collect()  # which does nothing while another thread does it
        time.sleep(0.001)


def raises_in_hooks(turn):
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    y = x * x
    y.retain_grad()

    def raises(ct):
        raise RuntimeError("from a hook")

    with y.register_hook(raises):
        with contextlib.suppress(RuntimeError):
            sg.sum(y * 2.0).backward()
            raise AssertionError("the hook was not called")
        assert x.grad is None
    y.register_hook(lambda ct: ct * 2.0)
    sg.sum(y * 2.0).backward()
    assert x.grad.tolist() == [8.0, 16.0]


def runs_again_and_again(turn):
    """Higher orders, graphs that are kept, and what can run no more."""
    x = sg.asarray([1.0, 2.0], requires_grad=True)
    cube = x * x * x
    sg.sum(cube).backward(create_graph=True)
    slope, x.grad = x.grad, None
    stranded = cube + 1.0
    sg.sum(slope).backward()
    assert x.grad.tolist() == [6.0, 12.0]
    with contextlib.suppress(sg.GraphConsumedError):
        sg.sum(stranded).backward()
    assert sg.grad(sg.grad(lambda t: t * t * t))(2.0).item() == 12.0


def asks(turn):
    stats = sg.graph.stats()
    assert stats.registered == stats.nodes + stats.consumed + stats.swept, stats
    sg.graph.nodes()
    sg.pool.stats()
    if turn % 20 == 0:
        sg.sweeper.start(f"{random.randint(1, 10)}ms")
    if turn % 50 == 0:
        sg.pool.empty()
    time.sleep(0.005)


def forks(turn):
    child = os.fork()
    if not child:
        signal.alarm(60)
        status = 1
        try:
            for k in range(3):
                leaves_cycles(k, most=math.inf)  # Python collects no more if another thread was just collecting
                raises_in_hooks(k)
                uses_large_arrays(k)
                trains_fused(k)
            assert sg.sweeper.is_running()
            sg.sweep()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    end.wait(0.5)


def calls_back(phase, info):
    """A sweep's callback that computes, and raises now and then."""
    if random.random() < 0.01:
        raise ValueError("from a callback")
    sg.ones((2,), requires_grad=True) * 2.0


def held():
    """Bytes, and the sizes of all that could grow."""
    stats, pool = sg.graph.stats(), sg.pool.stats()
    rows = [op for op in OPS.values() if isinstance(op, Elementwise)]
    reducers = [one for one in vars(reductions).values() if isinstance(one, Reducer)]
    fused = [one for one in (fused_loss, *vars(reductions).values()) if isinstance(one, Fused)]
    return {
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        **{f"graph.{name}": size for name, size in stats.indexes.items()},
        "graph.saved_bytes": stats.saved_bytes,
        "pool.blocks": pool.idle_blocks + pool.lent_blocks,
        "pool.idle_bytes": pool.idle_bytes,
        "kernels": len(cpu._kernels),
        "expressions": len(expr._interned),
        "layouts": len(plan._layouts),
        "plans": sum(len(row.plans) for row in rows),
        "traces": sum(len(one._forms) for one in fused),
        "loops": program._loop.cache_info().currsize,
        "reductions": sum(one._way.cache_info().currsize for one in reducers),
    }


def soak(seconds):
    workers = [trains_eagerly, trains_fused, uses_large_arrays, leaves_cycles, raises_in_hooks, runs_again_and_again]
    for work in workers:
        for turn in range(LENGTHS if work in (trains_eagerly, trains_fused) else 3):
            work(turn)  # compiles all there is: beside others that takes long, and Numba takes memory
    threads = [worker(work) for work in (*workers, asks, *([forks] if hasattr(os, "fork") else []))]
    sg.graph.callbacks.append(calls_back)
    sg.sweeper.start("1ms")
    for thread in threads:
        thread.start()
    samples = []
    for _ in range(SAMPLES):
        if end.wait(seconds / SAMPLES):
            break
        samples.append(held())
    end.set()
    for thread in threads:
        thread.join()
    return samples


if __name__ == "__main__":
    faulthandler.register(signal.SIGALRM, chain=True)
    warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks in processes with threads
    logging.disable()  # callbacks that raise are logged
    sg.set_num_threads(2)
    fusion._KEPT = loop._KEPT = plan._MOST_LAYOUTS = KEPT
    found = soak(float(sys.argv[1]))
    sg.graph.callbacks.clear()
    sg.sweeper.stop()
    if errors:
        sys.exit("\n".join(errors))
    del eager_trainer, fused_trainer
    gc.collect()
    assert sg.sweep().remaining == 0
    assert sg.graph.stats().nodes == 0, sg.graph.nodes()
    sg.graph.audit()
    print(json.dumps({"rounds": rounds, "samples": found}))
