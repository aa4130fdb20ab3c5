"""Fuzz targets for everything that Paceline reads from a socket, a pipe, a file or a user.

Each target feeds bytes to one parser. A parser accepts them or raises the error of its own module;
it stays within a share of memory and CPU time whatever the bytes are. `python -m testing.fuzz`
tries as many inputs as one likes; tests/fuzz tries the same first ones in each run.
"""
