"""Benchmarks of Paceline: `python -m benchmarks NAME` runs one, from the root of the repository.

Each benchmark runs its baseline and computes its physical limit in the same run, in interleaved
rounds. Only ratios inside one run count, together with their spread. `--smoke` selects a size that
only shows that everything works; its figures mean nothing. `benchmarks.harness` has what all share,
`benchmarks/results` the raw results of the published tables.
"""
