"""With everything on, memory, every index and every cache stay flat; CONTRIBUTING tells how to run it for longer."""

import json
import os
from pathlib import Path
from statistics import median

import pytest

from launch import LIMIT, python

SECONDS = 60 * float(os.environ.get("SOAK_MINUTES") or 1 / 6)

SPARE = {"resident": 24e6, "graph.saved_bytes": 64e6, "pool.idle_bytes": 16e6, "pool.blocks": 32}
"""By how much the late median may be above the early one: by what moves from one moment to the next."""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read from /proc")
@pytest.mark.timeout(SECONDS + LIMIT + 60)
def test_all_stays_flat_with_everything_on():
    settings = {"MALLOC_ARENA_MAX": "2"}  # else glibc keeps memory for each thread
    done = python(Path(__file__).with_name("soak.py"), SECONDS, settings=settings, limit=SECONDS + LIMIT)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found = json.loads(done.stdout)
    print(f"{SECONDS:.0f} s; turns: {found['rounds']}")
    assert all(turns > 3 for turns in found["rounds"].values())
    samples = found["samples"]
    third = len(samples) // 3
    grown = {}
    for name in samples[0]:
        # The first third fills what has a bound.
        early, late = (median(one[name] for one in part) for part in (samples[third : 2 * third], samples[2 * third :]))
        print(f"{name:20} {early:14,.0f} {late:14,.0f}")
        if late > early + SPARE.get(name, max(100, early)):
            grown[name] = early, late
    assert not grown
