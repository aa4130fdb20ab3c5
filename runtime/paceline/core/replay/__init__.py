"""A run once more in one process: what each rank has written down, and the order it gives (I15)."""
