"""The data channel inside a machine: sums in memory that ranks hand to each other."""
