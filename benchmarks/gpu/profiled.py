"""`python -m benchmarks.gpu.profiled DEVICE STEPS`: how often a job of one rank waits in CUDA."""

from __future__ import annotations

import json
import sys
from typing import Final

import paceline as pl
import torch
from torch import nn

WAITS: Final = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")
WARM: Final = 3
"""Steps before the profile: first calls load kernels."""


def main(device: torch.device, steps: int) -> None:
    """Profile the steps and print the number of waits by call."""
    pl.init()
    torch.manual_seed(1)
    layers = [nn.Linear(512, 512) for _ in range(8)]
    model = nn.Sequential(*layers).to(device)
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3), model)
    batch = torch.ones(32, 512, device=device)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profiler = torch.profiler.profile(activities=activities)
    for number in pl.steps(WARM + steps):
        if number == WARM:
            profiler.start()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == WARM + steps - 1:
            profiler.stop()
    counts = {event.key: event.count for event in profiler.key_averages()}
    # The end of the profile itself is one synchronization.
    counts["cudaDeviceSynchronize"] = max(0, counts.get("cudaDeviceSynchronize", 0) - 1)
    print(json.dumps({call: counts.get(call, 0) for call in WAITS}))


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), int(sys.argv[2]))
