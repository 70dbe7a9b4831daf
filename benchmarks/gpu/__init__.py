"""Benchmarks on an NVIDIA GPU: `python -m benchmarks gpu`. Where there is none they are left out, with a note."""
