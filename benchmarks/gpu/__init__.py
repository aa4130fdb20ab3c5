"""`make gpu-check`: everything that needs a GPU, on the GPUs of this machine (docs/gpu.md)."""
