"""Gathers what the benchmarks found and prints it, or leaves it to `python -m benchmarks` in a file."""

import json
from pathlib import Path

import pytest

from benchmarks.page import Section

SECTIONS = pytest.StashKey[list[Section]]()


def pytest_addoption(parser):
    parser.addoption("--sections", type=Path, help="file for what was found, as JSON")


def pytest_configure(config):
    config.stash[SECTIONS] = []


@pytest.fixture(scope="module")
def section(request):
    """What the page says about this file's subject."""
    made = Section.of_module(request.module)
    request.config.stash[SECTIONS].append(made)
    return made


@pytest.fixture
def measure(benchmark, section):
    """Runs a contender of a comparison and adds to the section what was found."""

    def run(comparison, contender):
        comparison.measure(contender, benchmark, section)

    return run


def pytest_terminal_summary(terminalreporter, config):
    sections = config.stash[SECTIONS]
    for section in sections:
        terminalreporter.write(f"\n{section.markdown()}\n")
    if path := config.option.sections:
        path.write_text(json.dumps([section.to_json() for section in sections]))
