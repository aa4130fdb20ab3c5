"""Replay of a run in one process, from the journals of all ranks (I15)."""
