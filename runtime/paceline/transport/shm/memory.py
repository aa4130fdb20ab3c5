"""Memory of one rank that others on its machine may read: one memfd, mapped once.

It has no name, so nothing is left when the last process that holds it ends. It takes no share of
/dev/shm, whose size a pod cannot choose. Its size is sealed, so a process that has mapped it cannot
crash on a missing page. The mapping is as large as the machine's memory can make use of, but only
pages that are written take memory. Memory that is given back is punched out of it.

Other ranks get a read-only descriptor, so only the owner writes.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from paceline.limits import MIB, LimitError, cgroup_limits, figures_bytes
from paceline.transport.base import TransportError

SPARE: Final = 4
"""Size of the mapping as a multiple of the machine's memory. Addresses cost nothing, and blocks of
several sizes take turns."""
LARGEST: Final = 1 << 40
"""Upper bound on the size of one mapping in bytes. A process maps the memory of all ranks of its
machine and has 2 ** 47 bytes of addresses."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
PUNCH: Final = 0x02 | 0x01
"""Flags of fallocate: FALLOC_FL_PUNCH_HOLE, which requires FALLOC_FL_KEEP_SIZE."""
HINT: Final = "hint: use backend: auto, mpi or gloo"


class SharedMemory:
    """Allocator of blocks in one memfd.

    A forked child must not use it. Blocks that die in a child free nothing.
    """

    def __init__(self) -> None:
        """Create and map the memory.

        Raises:
            TransportError: The machine refuses it.
        """
        spare = SPARE * figures_bytes(Path("/proc/meminfo"), "MemTotal", "SwapTotal")
        self.nbytes = min(spare, LARGEST)
        try:
            self._fd = os.memfd_create("paceline", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise TransportError(
                f"spec.collective.backend: shm needs memfd_create, which is refused here: {error}; "
                f"hint: allow it in the pod's seccomp profile, or use backend: auto"
            ) from error
        self.fd = -1
        """Read-only descriptor for other ranks. -1 once it is closed."""
        try:
            os.ftruncate(self._fd, self.nbytes)
            seals = fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)
            self.fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)
            self._mapped = mmap.mmap(self._fd, self.nbytes)
        except OSError as error:
            self.close()
            raise TransportError(
                f"spec.collective.backend: shm cannot map shared memory here: {error}; {HINT}"
            ) from error
        self._mapped.madvise(mmap.MADV_DONTDUMP)
        self.bytes = whole(self._mapped)
        self.start = int(self.bytes.ctypes.data)
        self._pid = os.getpid()
        self._end = mmap.PAGESIZE  # offset 0 means that a buffer is not in this memory
        self._free: dict[int, list[int]] = {}
        """Offsets of blocks that were given back, by size in bytes."""

    def block(self, nbytes: int) -> Any:
        """Return new zero-filled memory, which is given back with its last reference.

        It raises LimitError if the pod may not have so much.

        Args:
            nbytes: Size in bytes.

        Returns:
            A numpy array of `nbytes` bytes.

        Raises:
            TransportError: No addresses are left.
        """
        size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        _ensure_allowed(size)
        free = self._free.get(size)
        if free:
            place = free.pop()
        elif self._end + size > self.nbytes:
            raise TransportError(f"no room for {size} bytes of shared memory; {HINT}")
        else:
            place, self._end = self._end, self._end + size
        block = _Range(self._mapped, self.start + place, nbytes)
        weakref.finalize(block, self._give_back, place, size).atexit = False
        return np.asarray(block)

    def zeros(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new zero-filled tensor in this memory.

        It raises the errors of `block`.

        Args:
            numel: Number of elements.
            dtype: Type of the elements.

        Returns:
            A flat tensor. Its memory is given back with the last reference to it.
        """
        block = self.block(max(numel * dtype.itemsize, 1))
        return torch.from_numpy(block)[: numel * dtype.itemsize].view(dtype)

    def place(self, tensor: torch.Tensor) -> int:
        """Return the byte offset of a tensor in this memory, or 0 if it lies elsewhere."""
        at = tensor.data_ptr() - self.start
        return at if 0 < at < self.nbytes else 0

    def close(self) -> None:
        """Close the descriptors. No block can be given back any more; tensors stay valid."""
        for fd in (self.fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._fd = -1

    def _give_back(self, place: int, size: int) -> None:
        if os.getpid() != self._pid or self._fd < 0:
            return  # a forked child does not own the memory; a closed one is freed as a whole
        if _libc.fallocate(self._fd, PUNCH, place, size) == 0:
            self._free.setdefault(size, []).append(place)


class _Range:
    """A range of mapped memory that arrays and tensors refer to.

    It lives as long as one of them.
    """

    def __init__(self, mapped: mmap.mmap, address: int, nbytes: int) -> None:
        self._mapped = mapped
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def whole(mapped: mmap.mmap) -> Any:
    """Return a whole mapping as an array of bytes.

    The array claims to be writable even where the mapping is not, since torch has no read-only
    tensors. Only the owner of the memory writes.

    Args:
        mapped: The mapping, which lives as long as the array.

    Returns:
        A numpy array of bytes.
    """
    address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    return np.asarray(_Range(mapped, address, len(mapped)))


def map_others(fd: int, nbytes: int) -> Any:
    """Map the memory of another rank for reading.

    Args:
        fd: Descriptor of its memory. The caller may close it afterwards.
        nbytes: Size in bytes that the rank reported.

    Returns:
        A numpy array of bytes.

    Raises:
        TransportError: The size differs, or the memory cannot be mapped.
    """
    try:
        if os.fstat(fd).st_size != nbytes:
            raise TransportError("the memory of a rank has another size than it says")
        return whole(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
    except OSError as error:
        raise TransportError(f"cannot map the memory of a rank: {error}; {HINT}") from error


def _ensure_allowed(nbytes: int) -> None:
    """Check that the control group allows a buffer of this size.

    Without this check, touching the pages of the memfd would make the kernel kill the process.

    Args:
        nbytes: Size of the buffer in bytes.

    Raises:
        LimitError: The limit of the pod or control group is lower.
    """
    allowed = min(cgroup_limits("memory.max"), default=None)
    if allowed is not None and nbytes > allowed:
        raise LimitError(
            f"a rank needs {-(-nbytes // MIB)} MiB of shared memory for one buffer, and the limit "
            f"of its pod or control group is {allowed // MIB} MiB",
            hint="raise resources.limits.memory of the pod: each rank holds its model, gradients, "
            "optimizer and three buffers of the same size",
        )
