"""Checkpoints of the committed state: the format on disk, the writer, and the service."""
