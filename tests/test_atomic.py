"""Numbers are given once each, with and without a global interpreter lock."""

import itertools
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from sweepgrad.atomic import numbers


@pytest.mark.parametrize("gil", [True, False])
def test_each_number_is_given_once(monkeypatch, gil):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: gil, raising=False)
    number = numbers()
    start = threading.Barrier(4, timeout=30)

    def take(count):
        start.wait()
        return [number() for _ in range(count)]

    with ThreadPoolExecutor(4) as pool:
        taken = [task.result(60) for task in [pool.submit(take, 2000) for _ in range(4)]]
    assert all(one == sorted(one) for one in taken)
    assert sorted(itertools.chain(*taken)) == list(range(1, 8001))


def test_without_a_gil_a_lock_is_held_around_each(monkeypatch):
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    held = []
    lock = threading.RLock()

    class Watched:
        def __enter__(self):
            held.append(lock.acquire())

        def __exit__(self, *exception):
            lock.release()

    monkeypatch.setattr(threading, "RLock", Watched)
    number = numbers()
    assert [number(), number()] == [1, 2]
    assert held == [True, True]
