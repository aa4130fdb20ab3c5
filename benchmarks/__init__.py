"""Benchmarks of Paceline: one module each, run as `python -m benchmarks.NAME` from the repository.

Each benchmark runs its baseline and computes its physical limit in the same run, in interleaved
rounds. Only ratios inside one run count, together with their spread. `--smoke` selects a size that
only shows that everything works; its figures mean nothing.
"""
