"""Runs the benchmarks and writes what they found into `docs/benchmarks.md` and `docs/benchmarks.svg`."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.measure import ROOT
from benchmarks.page import Section, page
from benchmarks.plot import plot

SUBJECTS = (
    "overhead",
    "eager",
    "fuse",
    "reductions",
    "functions",
    "startup",
    "long_chain",
    "sweeping",
    "pauses",
    "stress_loop",
    "gpu/bandwidth",
    "gpu/launch",
)
PAGE = ROOT / "docs" / "benchmarks.md"


def run(subject):
    """Run a subject in a process of its own; returns its sections and whether all of it worked."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "sections.json"
        folder_of, _, name = subject.rpartition("/")
        file = f"benchmarks/{folder_of}/bench_{name}.py"
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", file, f"--sections={found}"], check=False, cwd=ROOT
        )
        sections = json.loads(found.read_text()) if found.exists() else []
    return [Section.from_json(one) for one in sections], done.returncode == 0


def main():
    """Run the subjects named on the command line, or all; only a run of all writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks")
    parser.add_argument("subject", nargs="*", choices=[[], "gpu", *SUBJECTS], help="what to run; everything by default")
    parser.add_argument("--output", type=Path, help=f"page to write, with its plot beside it; by default {PAGE}")
    options = parser.parse_args()
    output = options.output or (None if options.subject else PAGE)
    sections, failed = [], []
    chosen = [one for one in SUBJECTS if one in options.subject or one.partition("/")[0] in options.subject]
    for subject in chosen or SUBJECTS:
        found, worked = run(subject)
        sections += found
        failed += [subject] * (not worked)
    if output:
        picture = output.with_suffix(".svg") if any(section.rows for section in sections) else None
        if picture:
            plot(picture, sections)
        output.write_text(page(sections, picture and picture.name, failed))
    sys.exit(f"python -m benchmarks: failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
