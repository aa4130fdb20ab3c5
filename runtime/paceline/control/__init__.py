"""Control channel between ranks, agents and the coordinator: connections, TLS, tokens, limits."""
