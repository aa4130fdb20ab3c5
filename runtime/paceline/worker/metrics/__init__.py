"""Metrics of one rank: figures in shared memory for its agent, and facts for its heartbeat."""
