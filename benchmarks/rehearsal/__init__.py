"""`make rehearse P=1024`: a job of many ranks on one machine, everything but the training real.

The coordinator is the process that the operator starts: TLS, the job's token, the job's file. Of
agents and ranks the state machines, the sockets to each other and the clients of the coordinator
are those of the product; a few processes play many of each. In place of tensors there are a few
numbers, in place of a script there are pauses, and a reduction is a sum over pipes.

So the figures are the protocol's own costs: its processor time, bytes, connections, and how long it
takes where the machine has a core left.
"""
