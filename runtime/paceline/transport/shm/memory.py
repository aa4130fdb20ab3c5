"""The memory of one rank that others on its machine may read: one memfd, mapped once.

It has no name anywhere, so that nothing is left when the last process that holds it ends, and no
share of /dev/shm, whose size a pod cannot choose. Its size is sealed: nobody who has mapped it can
be hit by a page that is not there. It is as large as the machine's memory can make use of, but
takes only what is written; memory that is given back is punched out of it.

Others get a descriptor for reading only. What this rank does not write, nobody does.
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
"""Times the memory of the machine: addresses cost nothing, and blocks of several sizes take
turns."""
LARGEST: Final = 1 << 40
"""A process maps the memory of all ranks of its machine, and has 2 ** 47 bytes of addresses."""
_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
PUNCH: Final = 0x02 | 0x01
"""FALLOC_FL_PUNCH_HOLE, which goes with FALLOC_FL_KEEP_SIZE."""
HINT: Final = "hint: use backend: auto, mpi or gloo"


class SharedMemory:
    """Blocks of one memfd. Not for forked children: they free nothing."""

    def __init__(self) -> None:
        """Raises TransportError where the machine refuses it."""
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
        """For others, to read."""
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
        self._end = mmap.PAGESIZE  # place 0 says that a buffer is not here
        self._free: dict[int, list[int]] = {}
        """By size: places of blocks that were given back."""

    def block(self, nbytes: int) -> Any:
        """New memory, zero, as an array of bytes; given back with its last reference. Raises
        LimitError if the pod may not have so much, TransportError if no addresses are left."""
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
        """The same as a tensor."""
        block = self.block(max(numel * dtype.itemsize, 1))
        return torch.from_numpy(block)[: numel * dtype.itemsize].view(dtype)

    def place(self, tensor: torch.Tensor) -> int:
        """Where a tensor lies in this memory; 0 if it does not."""
        at = tensor.data_ptr() - self.start
        return at if 0 < at < self.nbytes else 0

    def close(self) -> None:
        """No more blocks, and nobody is given it any more; tensors in it stay good."""
        for fd in (self.fd, self._fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._fd = -1

    def _give_back(self, place: int, size: int) -> None:
        if os.getpid() != self._pid or self._fd < 0:
            return  # a forked child: the memory is its parent's; or closed: all of it goes at once
        if _libc.fallocate(self._fd, PUNCH, place, size) == 0:
            self._free.setdefault(size, []).append(place)


class _Range:
    """What arrays and tensors in some memory refer to: while one of them lives, so does it."""

    def __init__(self, mapped: mmap.mmap, address: int, nbytes: int) -> None:
        self._mapped = mapped
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
        }


def whole(mapped: mmap.mmap) -> Any:
    """All of it as bytes. Torch has no tensors for reading only, so this is one that could be
    written to, which nobody does who has not made it."""
    address = int(np.frombuffer(mapped, np.uint8).ctypes.data)
    return np.asarray(_Range(mapped, address, len(mapped)))


def map_others(fd: int, nbytes: int) -> Any:
    """The memory of another rank as bytes, for reading. Raises TransportError."""
    try:
        if os.fstat(fd).st_size != nbytes:
            raise TransportError("the memory of a rank has another size than it says")
        return whole(mmap.mmap(fd, nbytes, prot=mmap.PROT_READ))
    except OSError as error:
        raise TransportError(f"cannot map the memory of a rank: {error}; {HINT}") from error


def _ensure_allowed(nbytes: int) -> None:
    """Pages of a memfd that the control group has no room for would end the process."""
    allowed = min(cgroup_limits("memory.max"), default=None)
    if allowed is not None and nbytes > allowed:
        raise LimitError(
            f"a rank needs {-(-nbytes // MIB)} MiB of shared memory for one buffer, and the limit "
            f"of its pod or control group is {allowed // MIB} MiB",
            hint="raise resources.limits.memory of the pod: each rank holds its model, gradients, "
            "optimizer and three buffers of the same size",
        )
