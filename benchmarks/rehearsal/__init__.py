"""`make rehearse P=1024`: a job of many ranks on one machine, everything but the training real.

The coordinator is the process that the operator starts: TLS, the job's token, the job's file. The
state machines of agents and ranks, their sockets to each other and their clients of the coordinator
are those of the product; a few processes play many of each. A few numbers stand for tensors, pauses
stand for a script, and a reduction is a sum over pipes.

So the figures are the protocol's own costs: its processor time, bytes, connections, and how long it
takes where the machine has a free core.
"""
