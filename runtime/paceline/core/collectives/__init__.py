"""How a sum is computed: which rank sends what to whom, and which algorithm is chosen."""
