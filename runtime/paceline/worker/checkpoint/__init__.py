"""Checkpoints of the committed state: what is on disk, who writes it, who asks for it."""
