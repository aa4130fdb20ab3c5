"""One rank's part in the protocol, as a pure state machine: events in, effects out (R1-R20).

`machine.Rank.handle` is the only entry point. Reading order: events, state, script (the user's
thread), rounds, membership, machine.
"""
