"""Fuzz targets for everything that Paceline reads from a socket, a pipe, a file or a user.

Each target feeds bytes to one parser. A parser accepts them or raises the error of its own module;
it stays within a limit of memory and CPU time whatever the bytes are. `python -m testing.fuzz`
tries any number of inputs; tests/fuzz tries the same first inputs in each run.
"""
