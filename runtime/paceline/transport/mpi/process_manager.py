"""Asks hydra, MPICH's process manager, for facts that a rank needs before MPI starts.

A rank speaks PMI with hydra over a socket that it inherits: one line per question and per answer.
"""

from __future__ import annotations

import os
import re
import select
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

ENV_FD: Final = "PMI_FD"
ANSWER_S: Final = 5.0
ANSWER_BYTES: Final = 4096
FNV_OFFSET: Final = 2_166_136_261
FNV_PRIME: Final = 16_777_619


def shared_memory_name(environment: Mapping[str, str]) -> str:
    """Return the name below /dev/shm of the memory that MPI_Init makes.

    MPICH 5.0.2 calls it `mpich_shm_<world>_<node>`. The world is a hash of the name that hydra has
    for the rank's world. A rank is alone in its world, so its node is 0.

    Args:
        environment: Environment of the rank.

    Returns:
        The name, or an empty text if hydra does not answer.
    """
    text = environment.get(ENV_FD, "")
    answer = _ask(int(text), b"cmd=get_my_kvsname\n") if text.isdecimal() else ""
    match = re.search(r"\bkvsname=(\S+)", answer)
    return f"mpich_shm_{_fnv(match.group(1)):x}_0" if match else ""


def _ask(fd: int, question: bytes) -> str:
    answered = select.poll()
    answered.register(fd, select.POLLIN)
    with suppress(OSError):
        os.write(fd, question)
        if answered.poll(ANSWER_S * 1000):
            return os.read(fd, ANSWER_BYTES).decode(errors="replace")
    return ""


def _fnv(name: str) -> int:
    """Return the 32-bit FNV-1a hash of a text."""
    world = FNV_OFFSET
    for byte in name.encode():
        world = (world ^ byte) * FNV_PRIME & 0xFFFFFFFF
    return world
