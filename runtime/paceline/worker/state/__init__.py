"""The tensors of a rank: gradients, committed weights and optimizer state, in flat memory."""
