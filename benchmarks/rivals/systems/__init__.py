"""One file per rival: how it sums a buffer, and how it trains with gradients that become ready."""
