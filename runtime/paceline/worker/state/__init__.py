"""The tensors of a rank: its gradients, the committed weights and optimizer, and their streams."""
