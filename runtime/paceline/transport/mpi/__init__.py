"""The data channel over MPI: links between pairs of ranks, and algorithms of our own over them."""
