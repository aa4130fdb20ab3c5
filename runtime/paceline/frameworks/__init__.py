"""Adapters for the training loops of other frameworks, one module per framework."""
