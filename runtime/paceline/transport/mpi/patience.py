"""How often MPICH tries a call to a peer that does not take it: a setting changed while it runs.

Measured with MPICH 5.0.2 over the tcp provider: a send to a process that has died is tried again
until MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY is used up, 10 us each, with the library's lock held; the
default tries for ever. A Connect uses the same setting and needs much of it, since a busy peer
answers late. So patience is raised while a link is made and is short otherwise: a send to the dead
then fails after 10 ms, not after 3 s. MPI has a standard way to write settings (MPI 4.1, 15.3.6);
mpi4py does not cover it, hence ctypes.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from paceline.transport.base import TransportError

SETTING: Final = "MPIR_CVAR_CH4_OFI_MAX_EAGAIN_RETRY"
WHILE_CONNECTING: Final = 300_000
"""Measured: 9 us each when the port is closed, 0.3 us when its owner is stopped."""
OTHERWISE: Final = 1_000
_THREAD_MULTIPLE: Final = 3
"""MPICH's value; it only has to be no less than what MPI was started with."""


class Patience:
    """Writes the setting of this process; MPI must have been started."""

    def __init__(self) -> None:
        # The library is loaded already: the loader finds it by its name.
        self._library = ctypes.CDLL("libmpi.so.12")
        self._handle = ctypes.c_void_p()
        provided, index, count = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        self._call("MPI_T_init_thread", _THREAD_MULTIPLE, ctypes.byref(provided))
        self._call("MPI_T_cvar_get_index", SETTING.encode(), ctypes.byref(index))
        handle = ctypes.byref(self._handle)
        self._call("MPI_T_cvar_handle_alloc", index, None, handle, ctypes.byref(count))
        self._write(OTHERWISE)

    @contextmanager
    def raised(self) -> Iterator[None]:
        """While a link is made. No reduction runs meanwhile."""
        self._write(WHILE_CONNECTING)
        try:
            yield
        finally:
            self._write(OTHERWISE)

    def _write(self, tries: int) -> None:
        self._call("MPI_T_cvar_write", self._handle, ctypes.byref(ctypes.c_int(tries)))

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise TransportError(
                f"MPI refuses {name} for {SETTING} (error {code}); hint: use MPICH 4.1 or later"
            )
