"""The data channel over MPI: links between pairs of ranks, and our own algorithms over them."""
