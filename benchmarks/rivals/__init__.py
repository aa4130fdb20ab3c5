"""The allreduce table with every rival, after Awan et al. (CCGrid 2019).

    python -m benchmarks rivals [--quick] [--only NAME ...] [--cache FOLDER]

Each rival lives in a virtual environment of its own, which the benchmark builds outside the
checkout (`environments`), and has one small file in `systems`. All of them use one protocol
(`rank`): a process per rank, the same measuring loop, and a JSON line per order and answer.
"""
