"""Benchmarks: each runs the alternatives in the same session and reports ratios.

`python -m benchmarks` runs all and writes `docs/benchmarks.md`; `python -m benchmarks overhead` runs one.
"""
