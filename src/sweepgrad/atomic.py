"""What is atomic by itself with a global interpreter lock, and has to be made so without one."""

import itertools
import sys
import threading
from collections.abc import Callable


def numbers() -> Callable[[], int]:
    """A function that gives 1, 2, 3, ..., each to one of the threads that call it."""
    number = itertools.count(1).__next__
    if getattr(sys, "_is_gil_enabled", lambda: True)():
        return number
    lock = threading.RLock()  # without a GIL, two threads may get the same number from a `count`

    def locked() -> int:
        with lock:
            return number()

    return locked
