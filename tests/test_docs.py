"""What the documentation says is true: examples run, generated pages are fresh, links lead somewhere."""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from pathlib import Path

import pytest

import sweepgrad as sg

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = [
    name for _, name, _ in pkgutil.walk_packages(sg.__path__, "sweepgrad.") if not name.endswith(("__main__", "cli"))
]


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def examples():
    for page in PAGES:
        if page.name == "CONTRIBUTING.md":
            continue  # its example is a row, which is declared already
        for k, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            yield pytest.param(code, id=f"{page.name}-{k}")


@pytest.mark.parametrize("code", list(examples()))
def test_example_runs_and_prints_what_its_comments_say(code, capsys):
    exec(compile(code, "example", "exec"), {"__name__": "example"})
    printed = without_times(capsys.readouterr().out)
    for said in re.findall(r"^print\(.*\)\s+# (.*)$", code, re.MULTILINE):
        assert without_times(said) in printed


def without_times(text):
    return re.sub(r"[\d.]+ ms", "some ms", text)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert not failed


def test_generated_files_are_fresh(generator):
    for path, text in generator.FILES.items():
        assert path.read_text() == text(), f"{path.name} is stale: run `python docs/generate.py`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "index.md").read_text()
    assert all(page.name in index for page in (ROOT / "docs").glob("*.md") if page.name != "index.md")


def test_readme_opens_with_the_two_commands():
    commands = re.findall(r"```sh\n(.*?)\n```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert commands[:2] == [
        "python -m pip install '.[examples]' && sweepgrad run examples/digits.py",
        "python -m pip install '.[test]' && python -m pytest",
    ]


def test_every_public_name_is_documented():
    for name in sg.__all__:
        value = getattr(sg, name)
        if callable(value):
            assert value.__doc__, name


def test_every_guarantee_names_tests_that_exist():
    text = (ROOT / "docs" / "guarantees.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named
    for path, name in named:
        assert re.search(rf"^\s*(def |class )?{name}\b", (ROOT / path).read_text(), re.MULTILINE), f"{path}::{name}"
    for row in re.findall(r"^\| (?!promise).*\|$", text, re.MULTILINE):
        assert "`tests/" in row, row
