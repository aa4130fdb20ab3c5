"""Factory of transports by `spec.collective.backend`. It imports only what the backend needs."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from paceline_api.types.enums import Wire

from paceline.core.collectives.select import HIERARCHICAL
from paceline.transport.base import Transport, TransportError
from paceline.transport.mpi.provider import ProviderError
from paceline.transport.rendezvous import BOOT_ID
from paceline.transport.selected import SelectedTransport, make_room

if TYPE_CHECKING:
    from paceline.transport.shm.memory import SharedMemory

log = logging.getLogger("paceline.rank")

BACKENDS: Final = ("auto", "gloo", "mpi", "nccl", "shm")
FOR_AUTO: Final = ("mpi", "gloo", "nccl", "shm")
LEVELS: Final = ("mpi", "gloo")
"""Transports that can sum between machines what shared memory has summed inside each."""
ROUNDING: Final = ("mpi", "shm", f"{HIERARCHICAL}mpi")
"""Transports that can add in float32 while bfloat16 travels, or between which nothing travels."""
LOOPBACK: Final = "127.0.0.1"


def make_transport(
    backend: str,
    *,
    local: bool,
    ranks: int = 1,
    wire: Wire = Wire.FLOAT32,
    scratch: Path | None = None,
    reproducible: bool = False,
) -> Transport:
    """Return the data channel of this rank.

    It raises LimitError if the machine does not allow so many ranks.

    Args:
        backend: One of `BACKENDS`.
        local: True if all ranks are on this machine, so that loopback is enough (D13).
        ranks: Number of ranks that the job wants.
        wire: Type in which float32 sums travel.
        scratch: The rank's own folder. Shared memory that MPI leaves behind is recorded there and
            removed together with it.
        reproducible: True if two runs with the same ranks on the same kind of machines must have
            the same bits.

    Returns:
        A transport that no group uses yet.

    Raises:
        TransportError: The backend is unknown or does not work here.
    """
    host = LOOPBACK if local else own_address()
    if backend in BACKENDS:
        make_room(ranks, BACKENDS if backend == "auto" else [backend])
        if backend == "auto":
            transports, left_out = _auto(host, local=local, wire=wire, scratch=scratch)
        else:
            transports, left_out = (
                [_make(backend, host, local=local, wire=wire, scratch=scratch)],
                {},
            )
        return SelectedTransport(
            transports, left_out, own_machine(), wire=wire, reproducible=reproducible
        )
    raise TransportError(
        f"spec.collective.backend: {backend!r} is unknown; hint: use {', '.join(BACKENDS)}"
    )


def _auto(
    host: str, *, local: bool, wire: Wire, scratch: Path | None
) -> tuple[list[Transport], dict[str, str]]:
    """Return every transport that works here, and the reason why each other one does not."""
    transports: list[Transport] = []
    left_out: dict[str, str] = {}
    # A local run is on one machine, where two levels would be the same as shm.
    names = FOR_AUTO if local else (*FOR_AUTO, *(HIERARCHICAL + level for level in LEVELS))
    memory = cache(_shared_memory)
    for name in names:
        level = name.removeprefix(HIERARCHICAL)
        if level != name and not left_out.keys().isdisjoint({level, "shm"}):
            continue  # the reason is recorded already
        try:
            transports.append(
                _make(name, host, local=local, wire=wire, scratch=scratch, memory=memory)
            )
        except TransportError as error:
            left_out[name] = str(error)
            if isinstance(error, ProviderError):  # the user or a fabric profile asked for it
                log.warning("backend auto goes on without %s: %s", name, error)
    if not transports:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        raise TransportError(f"spec.collective.backend: auto found no data channel: {reasons}")
    return transports, left_out


def _make(
    name: str,
    host: str,
    *,
    local: bool,
    wire: Wire,
    scratch: Path | None,
    memory: Callable[[], SharedMemory] | None = None,
) -> Transport:
    if wire is not Wire.FLOAT32 and name not in ROUNDING:
        raise TransportError(
            f"spec.collective.wire: {wire} is nothing for {name}, which sums in the type that "
            "travels; hint: set spec.collective.backend: mpi or auto, or leave wire out"
        )
    memory = memory or _shared_memory
    if name.startswith(HIERARCHICAL):
        from paceline.transport.shm.hier import HierTransport

        level = name.removeprefix(HIERARCHICAL)
        between = _make(level, host, local=local, wire=wire, scratch=scratch)
        return HierTransport(memory(), between)
    if name == "shm":
        from paceline.transport.shm.transport import ShmTransport

        return ShmTransport(memory())
    if name == "mpi":
        from paceline.transport.mpi.transport import MpiTransport

        return MpiTransport(host=host, scratch=scratch)
    if name == "gloo":
        from paceline.transport.torch.gloo import GlooTransport

        return GlooTransport(host=host)
    from paceline.transport.torch.nccl import NcclTransport

    return NcclTransport(host=host, local=local)


def _shared_memory() -> SharedMemory:
    from paceline.transport.shm.memory import SharedMemory

    return SharedMemory()


def own_machine() -> str:
    """Return a short text that all pods of this node share, or an empty one if unknown."""
    try:
        return BOOT_ID.read_text()[:8]
    except OSError:
        return ""


def own_address() -> str:
    """Return the address under which other pods reach this one: what its own host name resolves to.

    Returns:
        An IPv4 address.

    Raises:
        TransportError: The host name has no address.
    """
    name = socket.gethostname()
    try:
        return socket.gethostbyname(name)
    except OSError as error:
        raise TransportError(
            f"the host name {name!r} of this pod has no address: {error}; "
            "hint: give the pod a subdomain of the headless Service"
        ) from error
