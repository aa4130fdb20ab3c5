"""How a sum is made: which rank sends what to whom, and which of several ways is taken."""
