"""Decisions of the runtime: pure functions and state machines over plain data.

Nothing here owns a clock, a thread, a socket, a tensor or a random generator. Time is passed in as
`now_ns`, and work to be done is returned as effects. Reading order: ids, records, deal, log,
trigger, rank, coordinator.
"""
