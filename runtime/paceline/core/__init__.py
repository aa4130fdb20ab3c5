"""Decisions of the runtime: pure functions and state machines over plain data.

Nothing here owns a clock, a thread, a socket, a tensor or dice; time arrives as `now_ns`, work to
be done leaves as effects. Reading order: ids, records, deal, log, trigger, rank, coordinator.
"""
