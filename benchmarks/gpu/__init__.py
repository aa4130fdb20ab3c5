"""`make gpu-check`: everything that needs a GPU, on whatever GPUs there are (docs/gpu.md)."""
