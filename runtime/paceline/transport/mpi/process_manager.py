"""What hydra, MPICH's process manager, says to a rank before MPI starts.

A rank speaks PMI with it over a socket that it inherits: lines of words, a question and an answer.
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
    """Return the name below /dev/shm of the memory that MPI_Init makes; empty if hydra is silent.

    MPICH 5.0.2 calls it `mpich_shm_<world>_<node>`. The world is a hash of the name that hydra has
    for the rank's world, and a rank is alone in its world, so its node is 0.
    """
    text = environment.get(ENV_FD, "")
    answer = _ask(int(text), b"cmd=get_my_kvsname\n") if text.isdecimal() else ""
    found = re.search(r"\bkvsname=(\S+)", answer)
    return f"mpich_shm_{_fnv(found.group(1)):x}_0" if found else ""


def _ask(fd: int, question: bytes) -> str:
    answered = select.poll()
    answered.register(fd, select.POLLIN)
    with suppress(OSError):
        os.write(fd, question)
        if answered.poll(ANSWER_S * 1000):
            return os.read(fd, ANSWER_BYTES).decode(errors="replace")
    return ""


def _fnv(name: str) -> int:
    """32 bits of FNV-1a."""
    world = FNV_OFFSET
    for byte in name.encode():
        world = (world ^ byte) * FNV_PRIME & 0xFFFFFFFF
    return world
