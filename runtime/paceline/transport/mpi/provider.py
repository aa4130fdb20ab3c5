"""Trial of the libfabric provider that the environment names, before MPI starts with it.

If the provider does not work, MPICH ends the process before any error handler can be set, and gloo
ends with it: FI_PROVIDER=verbs;ofi_rxm on a machine without such a device gives `Abort ... OFI call
getinfo failed`. So a provider that a fabric profile or the user has set is first tried in a process
of its own, which takes 0.1 to 0.3 s. Our own choice, tcp, needs no trial.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

from paceline.transport.base import TransportError

NAME: Final = "FI_PROVIDER"
OWN: Final = "tcp"
TRIAL_S: Final = 60.0
"""Seconds after which a provider that has not started counts as hanging."""
KILLED_S: Final = 1.0
_TRIAL: Final = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
MPI.Init_thread(MPI.THREAD_MULTIPLE)
MPI.Finalize()  # else its file in /dev/shm would stay
"""


class ProviderError(TransportError):
    """Raised if the libfabric provider that the environment asks for does not work here."""


def check_provider(environment: Mapping[str, str]) -> None:
    """Try to start MPI with the provider, unless it is tcp.

    Args:
        environment: Environment of the rank, with every variable that MPI needs.

    Raises:
        ProviderError: MPI does not start with it.
    """
    provider = environment[NAME]
    if provider == OWN:
        return
    # Without PMI variables the trial does not talk to the rank's process manager.
    alone = {name: text for name, text in environment.items() if not name.startswith("PMI")}
    why = _tried(alone)
    if not why:
        return
    raise ProviderError(
        f"MPI does not work with {NAME}={provider} of the pod's environment, on "
        f"{os.uname().nodename}: {why}; hint: it comes from spec.fabric.profile or from env of the "
        "container trainer: the pod must ask for that device's resource and may need IPC_LOCK; or "
        f"leave {NAME} unset for TCP, or use backend: auto"
    )


def _tried(environment: Mapping[str, str]) -> str:
    """Return why MPI does not start, or an empty text if it does."""
    trial = subprocess.Popen(
        [sys.executable, "-c", _TRIAL],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        _, stderr = trial.communicate(timeout=TRIAL_S)
    except subprocess.TimeoutExpired:
        trial.kill()
        # A process that hangs in the kernel cannot be waited for; the agent reaps it later.
        with suppress(subprocess.TimeoutExpired):
            trial.communicate(timeout=KILLED_S)
        return f"it does not start within {TRIAL_S:g} s"
    if trial.returncode == 0:
        return ""
    last = stderr.decode(errors="replace").strip().rpartition("\n")[2]
    # find_provider(132).........: OFI call getinfo failed (...)
    return last.partition(": ")[2] or last or f"it ended with {trial.returncode}"
