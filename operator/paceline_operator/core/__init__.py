"""Pure decision functions of the operator, over plain data.

Nothing here uses a clock, a network client or random numbers: the caller passes the time and what
was observed. A simulated cluster can therefore try every interleaving, and a decision can be
repeated from a log line.
"""
