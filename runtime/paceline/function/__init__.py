"""A Python function as the program of a job: packed where it was written, started in each rank.

What travels is text that a person can read, never a pickle: `core` says what belongs to it, `pack`
finds the sources, `start` runs it.
"""
