"""Checks on one device: order, copies beside sums, costs of asking, and a step's profile."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final

import torch
from paceline.transport.base import Abort
from paceline.transport.device_queues import TorchQueues, mark
from paceline.transport.staging import Staging, cut
from paceline.worker.state.flags import Flags
from paceline.worker.state.flat import Segment
from paceline.worker.state.streams import DeviceStreams

from benchmarks.gpu.compiled import HOW
from benchmarks.harness import Bar, Report, middle
from benchmarks.jobs import ROOT

MIB: Final = 1 << 20
LIMIT_S: Final = 600
STAGED: Final = 0.8
"""Bar on the ring of stages, as a share of the speed of its slowest stage."""
US: Final = 1e6
APART: Final = 1e-3
"""Tolerance on weights: kernels that a compiler has fused round in another order."""


def settle(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(device: torch.device, call: Callable[[], object], rounds: int) -> float:
    """Return the median time of a call, after one call to warm up."""
    taken = []
    for _ in range(rounds + 1):
        settle(device)
        begun = perf_counter()
        call()
        settle(device)
        taken.append(perf_counter() - begun)
    return middle(taken[1:])


def pinned(numel: int, device: torch.device) -> torch.Tensor:
    """Return a tensor of ones in host memory, pinned if the device is a GPU."""
    return torch.ones(numel, pin_memory=device.type == "cuda")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the host"


# ---- correctness -------------------------------------------------------------------------------


def correctness(device: torch.device) -> Report:
    """Check the order of operations on a device.

    Each check would show other numbers if an operation overtook a queue.

    Returns:
        The report.
    """
    report = Report("gpu_order", f"Order of queues, on {_name(device)}", ("check",))
    report.checks = {
        "a segment is read after the kernels that were queued before its event": _follows(device),
        "pieces through the host's memory come back as their sums": _staged(device),
        "a device finds each NaN and Inf, and nothing else": _finds_nonfinite(device),
    }
    report.rows = [(what,) for what in report.checks]
    return report


def _busy(device: torch.device) -> None:
    """Queue some 10 ms of kernels, so that a reader that does not wait is too early."""
    if device.type == "cuda":
        square = torch.ones(2048, 2048, device=device)
        for _ in range(50):
            square = square @ square / 2048


def _follows(device: torch.device) -> bool:
    """Return True if a segment is read only after the kernels queued before its event."""
    streams = DeviceStreams([device])
    for value in range(20):
        made = torch.zeros(MIB, device=device)
        _busy(device)
        made.fill_(value)
        events = streams.mark_gradients()
        with streams.own():
            streams.follow(events)
            copied = made.clone()
        with streams.settled():
            if not bool((copied == value).all()):
                return False
    return True


def _staged(device: torch.device) -> bool:
    """Return True if pieces through host memory come back as their sums."""
    ring = Staging()
    for value in range(1, 6):
        far = torch.zeros(3 * MIB + 5, device=device)
        _busy(device)
        far.fill_(value)
        ring.reduce(_double, cut([far]), Abort())
        if not bool((far == 2 * value).all()):
            return False
    return True


def _double(hosts: Sequence[torch.Tensor]) -> None:
    for host in hosts:
        host.mul_(2)


def _finds_nonfinite(device: torch.device) -> bool:
    """Return True if the device reports each NaN and Inf, and nothing else."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        flags = Flags([Segment(dtype, device, MIB)], [device])
        most = torch.finfo(dtype).max
        for bad in (None, float("nan"), float("inf"), -float("inf")):
            flat = torch.full((MIB,), most, dtype=dtype, device=device)
            if bad is not None:
                flat[12345] = bad
            flags.find(0, flat)
            flags.queue_copy()
            settle(device)
            if flags.are_finite([0]) is not (bad is None):
                return False
    return True


# ---- speed -------------------------------------------------------------------------------------


def staging(device: torch.device, *, smoke: bool) -> Report:
    """Measure the ring through host memory beside each of its stages alone."""
    columns = ("MiB", "to host GB/s", "sum GB/s", "to device GB/s", "all three GB/s", "of slowest")
    report = Report("gpu_staging", "Gradients through host memory", columns)
    for mib in (1, 4) if smoke else (1, 4, 16, 64):
        stages, whole = _stages(device, mib * MIB // 4, 3 if smoke else 20)
        rates = [mib * MIB / each / 1e9 for each in (*stages, whole)]
        report.rows.append((mib, *rates, max(stages) / whole))
    reached = report.rows[-1][-1]
    report.bars = [Bar("all three beside the slowest, largest size", reached, STAGED)]
    return report


def _stages(device: torch.device, numel: int, rounds: int) -> tuple[list[float], float]:
    """Return the seconds of each stage alone, and of all of them in the ring."""
    far, host, other = torch.ones(numel, device=device), pinned(numel, device), torch.ones(numel)
    ring = Staging()
    calls: tuple[Callable[[], object], ...] = (
        lambda: host.copy_(far, non_blocking=True),
        lambda: host.add_(other),
        lambda: far.copy_(host, non_blocking=True),
        lambda: ring.reduce(lambda piece: _add(piece[0], other), cut([far]), Abort()),
    )
    *stages, whole = (seconds(device, call, rounds) for call in calls)
    return stages, whole


def _add(host: torch.Tensor, other: torch.Tensor) -> None:
    host.add_(other[: host.numel()])


def crossover(device: torch.device, *, smoke: bool) -> Report:
    """Measure whether a peer's piece is added faster on the host or on the device."""
    columns = ("KiB", "sum by the host us", "sum by a kernel us", "host / kernel")
    report = Report("gpu_crossover", "Who adds what a peer has sent", columns)
    for kib in (64, 1024) if smoke else (16, 64, 256, 1024, 4096, 16384, 65536):
        first, second = _additions(device, kib * 256, 3 if smoke else 50)
        report.rows.append((kib, first * US, second * US, first / second))
    report.notes = ["above 1 in the last column a kernel would win, before what a ring adds to it"]
    return report


def _additions(device: torch.device, numel: int, rounds: int) -> tuple[float, float]:
    """Return the seconds to add a peer's piece on the host, and by a kernel."""
    far, near = torch.ones(numel, device=device), torch.ones(numel, device=device)
    host, peer = pinned(numel, device), pinned(numel, device)

    def by_host() -> None:
        host.copy_(far, non_blocking=True)
        settle(device)
        host.add_(peer)
        far.copy_(host, non_blocking=True)

    def by_kernel() -> None:
        near.copy_(peer, non_blocking=True)
        far.add_(near)
        host.copy_(far, non_blocking=True)  # the copy that goes to the next peer

    return seconds(device, by_host, rounds), seconds(device, by_kernel, rounds)


def costs(device: torch.device, *, smoke: bool) -> Report:
    """Measure what each request of a step to the device costs."""
    report = Report("gpu_costs", "What asking a device costs", ("what", "us"))
    queues, flat = TorchQueues(), torch.ones(MIB, device=device)
    flags, rounds = Flags([Segment(flat.dtype, device, MIB)], [device]), 20 if smoke else 1000
    asked: dict[str, Callable[[], object]] = {
        "check of 4 MiB, queued": lambda: flags.find(0, flat),
        "check of 4 MiB, read back": lambda: flat.sum().item(),
    }
    if device.type == "cuda":
        current = queues.current(device)
        event, own = mark(queues, device, current), queues.stream(device)
        asked |= {
            "mark": lambda: mark(queues, device, current),
            "follow": lambda: own.wait_event(event),
            "look": event.query,
        }
    for what, call in asked.items():
        call()
        settle(device)
        begun = perf_counter()
        for _ in range(rounds):
            call()
        report.rows.append((what, (perf_counter() - begun) / rounds * US))
        settle(device)
    return report


def step(device: torch.device, *, smoke: bool) -> Report:
    """Profile a job of one rank with torch's profiler, in a process of its own."""
    steps = 5 if smoke else 50
    words = [sys.executable, "-m", "benchmarks.gpu.profiled", str(device), str(steps)]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    report = Report("gpu_step", "Calls in a step that wait for the device", ("call", "per step"))
    report.checks["the profiled job ended well"] = done.returncode == 0
    if done.returncode:
        report.notes.append(done.stderr[-500:])
        return report
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    report.rows = [(call, count / steps) for call, count in counts.items()]
    report.bars = [Bar("waits per step", sum(counts.values()) / steps, 0.0, at_least=False)]
    return report


def compiled(device: torch.device) -> Report:
    """Check each way to compile a model beside plain torch, each in a process of its own."""
    columns = ("how", "weights apart, of what they moved")
    report = Report("gpu_compiled", "A compiled model beside plain torch", columns)
    for how in HOW:
        words = [sys.executable, "-m", "benchmarks.gpu.compiled", str(device), how]
        done = subprocess.run(
            words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        apart = float(json.loads(done.stdout.splitlines()[-1])) if not done.returncode else math.inf
        report.checks[f"{how}: the weights of plain torch"] = apart <= APART
        report.rows.append((how, apart))
        if done.returncode:
            report.notes.append(f"{how}: {done.stderr[-500:]}")
    return report
