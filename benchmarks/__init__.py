"""Benchmarks: each runs the alternatives in the same session and reports ratios.

`python -m benchmarks` runs all of them and writes `docs/benchmarks.md`; a name runs one: `python -m benchmarks overhead`.
"""
