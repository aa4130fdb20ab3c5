"""The data channel through process groups of torch.distributed: gloo and NCCL."""
