"""Choose the GPU of a rank, and explain why a process cannot use one.

Pure functions over plain data; the callers query the machine.
"""

from __future__ import annotations

from dataclasses import dataclass


def own_gpu(index: int, *, visible: int) -> int | None:
    """Return the device of a rank; some ranks share one if there are more ranks than devices.

    Args:
        index: Index of the rank among those that see the same devices.
        visible: Number of visible devices.

    Returns:
        Index of the device; None if there is at most one, so there is nothing to choose.
    """
    return index % visible if visible > 1 else None


@dataclass(frozen=True, slots=True)
class NoGpu:
    """The observations of a process that cannot use a GPU."""

    visible_devices: str | None
    """Value of CUDA_VISIBLE_DEVICES; None if it is not set."""
    driver: bool
    """True if NVIDIA's driver is loaded into the kernel."""
    torch_error: str
    """Report of torch about it."""


def why_none(observed: NoGpu, *, local: bool) -> tuple[str, str]:
    """Explain why a process cannot use a GPU.

    Args:
        observed: What the process observes.
        local: True if the job runs on this machine, so there is no pod template to change.

    Returns:
        The problem and the remedy, for users.
    """
    if observed.visible_devices is not None and not observed.visible_devices.strip(" -1"):
        return (
            f"CUDA_VISIBLE_DEVICES={observed.visible_devices!r} hides every GPU",
            "remove it, or name the devices",
        )
    if not observed.driver:
        way = "install NVIDIA's driver" if local else "request nvidia.com/gpu in the pod template"
        return "this machine has no NVIDIA driver", way
    way = "compare the versions of driver and torch with nvidia-smi"
    if not local:
        way = f"request nvidia.com/gpu in the pod template; else {way}"
    return f"NVIDIA's driver is loaded, and torch can use no GPU ({observed.torch_error})", way
