"""The client's end of the control channel, for ranks and agents: connection and encryption."""
