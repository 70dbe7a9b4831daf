"""Benchmarks: one file per subject, each running sweepgrad and its peers in the same session and printing ratios.

    python -m benchmarks                   # everything: writes docs/benchmarks.md and docs/benchmarks.svg
    python -m benchmarks overhead fuse     # these subjects: prints their tables only
    pytest benchmarks -k softmax           # a part of them, with pytest's options and pytest-benchmark's

A subject is a file `bench_SUBJECT.py` of comparisons. `measure.py` says how they are measured, `page.py` turns what was
found into tables and the plot. Peers that are not installed are left out, with a note. Contenders must agree in what
they compute, or the benchmark fails; their timings never decide anything.
"""
