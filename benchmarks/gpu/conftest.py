"""Where there is no GPU, nothing here is measured, and the page says so."""

import pytest

import sweepgrad as sg

NOTE = "everything, as no NVIDIA GPU can be used here"


@pytest.fixture(autouse=True)
def needs_a_gpu(section):
    if len(sg.devices()) == 1:
        if NOTE not in section.notes:
            section.notes.append(NOTE)
        pytest.skip(NOTE)
