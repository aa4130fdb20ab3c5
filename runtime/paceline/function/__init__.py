"""A Python function as the program of a job: packed where it was written, started in each rank.

It travels as source text that a person can read, never as a pickle. `pack` finds the sources that
the function needs, `packed` defines the files that travel, and `start` runs the function.
"""
