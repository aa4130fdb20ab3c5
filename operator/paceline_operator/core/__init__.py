"""Decisions of the operator, as pure functions over plain data.

No clock, client or random number: whoever calls brings the time and what was observed. So a
virtual cluster can try every interleaving, and a decision can be repeated from a log line.
"""
