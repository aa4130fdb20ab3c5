"""Training scripts for torchrun, unchanged (docs/design/scripts.md)."""
