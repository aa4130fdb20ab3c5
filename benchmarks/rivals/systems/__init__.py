"""One file per rival: how it sums a buffer, and how it trains on gradients as they become ready."""
