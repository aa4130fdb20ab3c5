"""Upper bounds on the open files and processes that a job of a given size needs.

These are bounds, not estimates: each term is what the code may hold at the same time, so a job that
passes the check does not run out of files in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Collection
from math import isqrt
from typing import Final

from paceline.core.collectives.select import HIERARCHICAL
from paceline.core.protocol.tree import TREE_ABOVE

SPARE_LINKS_MAX: Final = 64
"""Upper bound on MPI links that are kept to processes outside the group, because they may come
back."""
ABANDONED_GROUPS_MAX: Final = 4
"""Upper bound on groups that a rank has left while messages over MPI may still be in flight."""
ROOMS_LEFT_MAX: Final = 2
"""Upper bound on groups that a rank has left while another rank may still read their shared memory.
"""
SHARED_FILES: Final = 8
"""Files of a rank's shared-memory transport: the memory (two descriptors), the listening socket,
its own eventfd, and the same four of a rank that is just connecting."""
PEER_LANES: Final = 2
"""Sockets between two ranks: fast and bulk (`worker.peer_sockets`)."""
GRIDS: Final = 2
"""Number of grids with open connections: the present generation and the one before, in which all
ranks may have had other places."""
PLACES: Final = 3
"""Places at which a rank meets the other groups: its own, that of an inactive neighbor that it
replaces, and the one where the places of a smaller group wrap around."""
FILES_OUT: Final = 2
"""Files for a connection to one peer: the wake-up descriptor of the socket, and the connection."""
FILES_PER_LANE: Final = FILES_OUT + 1
"""Files for one peer if the peer also connects to this rank."""
AGENT_FILES_PER_RANK: Final = 8
"""Files of an agent for each rank: output of launcher and rank (3), connections of rank and guard
(2), its line to the coordinator, its record, its log."""
AGENT_FILES_PER_LAUNCH: Final = 5
"""Files that an agent passes on at the start of a process and closes then."""
PROCESSES_UNDER_MPI: Final = 4
"""Processes for each rank: mpiexec, its proxy, the guard and the rank."""


def rank_files(ranks: int, transports: Collection[str]) -> int:
    """Return the upper bound on open files and sockets of one rank.

    Args:
        ranks: Number of ranks of the job.
        transports: Names of the transports that the rank may use.

    Returns:
        Number of file descriptors.
    """
    others = ranks - 1
    # A holder sends to all ranks that are behind over the bulk lane (R7); few ranks send to it.
    files = FILES_PER_LANE * most_peers(ranks) + FILES_OUT * others + most_peers(ranks)
    for name in transports:
        between = name.removeprefix(HIERARCHICAL)
        if between == "mpi":
            # A connection of the library and one of ours, the latter also for abandoned groups.
            files += SPARE_LINKS_MAX + most_partners(ranks) * (2 + ABANDONED_GROUPS_MAX)
        if between == "gloo":
            # Connections to all others, twice: a group is closed only after the next one is formed.
            # Rank 0 also accepts a connection of each rank, for the rendezvous.
            files += 3 * others
        if name == "shm" or name != between:
            # A connection and an eventfd, and connections of groups that some rank still uses.
            files += others * (2 + ROOMS_LEFT_MAX) + SHARED_FILES
    if "nccl" in transports:
        files += others  # the store of rank 0; the files that the library opens are unknown
    return files


def most_peers(ranks: int) -> int:
    """Return the upper bound on the ranks with which one rank exchanges announcements and GO.

    In a large job these are the ranks of its own group, and those at its own place in the other
    groups (R41).

    Args:
        ranks: Number of ranks of the job.

    Returns:
        Number of ranks.
    """
    others = ranks - 1
    if ranks <= TREE_ABOVE:
        return others
    rows = isqrt(others) + 1
    return min(others, GRIDS * (rows + PLACES * rows))


def most_partners(ranks: int) -> int:
    """Return the upper bound on the ranks with which one rank exchanges messages over MPI.

    These are two neighbors on the ring, one rank for each doubling, and one that hands over its
    part first.

    Args:
        ranks: Number of ranks of the job.

    Returns:
        Number of ranks.
    """
    return ranks.bit_length() + 2


def agent_files(procs: int) -> int:
    """Return the bound on files of an agent; a restarted rank may overlap with the old one."""
    return 2 * procs * AGENT_FILES_PER_RANK + AGENT_FILES_PER_LAUNCH


def coordinator_files(agents: int) -> int:
    """Return the bound on connections of a coordinator (R43).

    Each agent has one; a new connection may overlap with the one before.

    Args:
        agents: Number of agents.

    Returns:
        Number of file descriptors.
    """
    return 2 * agents


def local_processes(ranks: int, agents: int, *, mpi: bool) -> int:
    """Return the number of processes that run at once on one machine, with one coordinator."""
    return ranks * (PROCESSES_UNDER_MPI if mpi else 1) + agents + 1
