"""What all tests share."""

import gc

import pytest

import sweepgrad  # noqa: F401  # before the freeze


@pytest.fixture(scope="session", autouse=True)
def _quick_audits():
    """An audit asks the garbage collector for every object; leave out the many that the imports made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
