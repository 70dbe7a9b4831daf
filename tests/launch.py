"""Fresh Python processes for tests."""

import os
import subprocess
import sys

LIMIT = 120
"""Seconds after which a process is taken to hang: far more than any needs."""


def python(*arguments, settings=None, **options):
    """Run Python with `arguments`, and `settings` in its environment in the place of any SWEEPGRAD_AUTO_SWEEP."""
    env = {name: value for name, value in os.environ.items() if name != "SWEEPGRAD_AUTO_SWEEP"} | (settings or {})
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
    return subprocess.run(
        [sys.executable, *map(str, arguments)], check=False, env=env, text=True, timeout=LIMIT, **options
    )
