"""The data channels through process groups of torch.distributed: gloo and NCCL."""
