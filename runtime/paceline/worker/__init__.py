"""Runtime of one rank: the threads behind the training API, and what each thread owns.

Read `session` first, which is the main thread's interface. Then read `comm_thread`, `state/` (the
tensors), `checkpoint/` and `metrics/`. The decisions of the protocol are made in `core.rank`.
"""
