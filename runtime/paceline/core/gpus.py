"""Which GPU a rank takes, and why it can take none. Plain data in; the drivers ask the machine."""

from __future__ import annotations

from dataclasses import dataclass


def own_gpu(index: int, *, visible: int) -> int | None:
    """The device for the rank with this index among those that see the same `visible` ones; with
    more ranks than devices some share. None: there is nothing to choose."""
    return index % visible if visible > 1 else None


@dataclass(frozen=True, slots=True)
class NoGpu:
    """What a process sees that can use no GPU."""

    visible_devices: str | None
    """CUDA_VISIBLE_DEVICES; None if it is not set."""
    driver: bool
    """NVIDIA's driver is loaded into the kernel."""
    told: str
    """What torch says about it."""


def why_none(found: NoGpu, *, local: bool) -> tuple[str, str]:
    """What is wrong, and what to do. `local`: nothing else than this machine can be asked for."""
    if found.visible_devices is not None and not found.visible_devices.strip(" -1"):
        return (
            f"CUDA_VISIBLE_DEVICES={found.visible_devices!r} hides every GPU",
            "remove it, or name the devices",
        )
    if not found.driver:
        way = "install NVIDIA's driver" if local else "request nvidia.com/gpu in the pod template"
        return "this machine has no NVIDIA driver", way
    way = "compare the versions of driver and torch with nvidia-smi"
    if not local:
        way = f"request nvidia.com/gpu in the pod template; else {way}"
    return f"NVIDIA's driver is loaded, and torch can use no GPU ({found.told})", way
