"""Benchmarks: one module each, run as `python -m benchmarks.NAME` from the repository's root.

Every one runs its baseline, and computes its physical limit, in the same run, in interleaved
rounds; what counts are ratios inside one run, with their spread. `--smoke` is a size that only
shows that everything works; its figures mean nothing.
"""
