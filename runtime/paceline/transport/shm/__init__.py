"""The data channel inside a machine, which sums in memory that its ranks share."""
