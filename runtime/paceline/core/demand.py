"""What the processes of a job of some size ask of their machines: the most they may have open.

Bounds, not estimates: each term is what the code may hold at the same time, so that a job which is
let through does not run out of it in the middle.
"""

from __future__ import annotations

from collections.abc import Collection
from math import isqrt
from typing import Final

from paceline.core.collectives.select import HIERARCHICAL
from paceline.core.protocol.tree import TREE_ABOVE

SPARE_LINKS_MAX: Final = 64
"""Links of MPI to processes outside the group that are kept; they may come back."""
ABANDONED_GROUPS_MAX: Final = 4
"""Groups that a rank has left and whose messages over MPI may still be open."""
ROOMS_LEFT_MAX: Final = 2
"""Groups that a rank has left and whose shared memory somebody may still read."""
SHARED_FILES: Final = 8
"""The memory, twice, the listening socket and the own eventfd; those of a rank that is met."""
PEER_LANES: Final = 2
"""Fast and bulk (`worker.peer_sockets`)."""
GRIDS: Final = 2
"""Connections are kept for one generation more, in which all may stand at other places."""
PLACES: Final = 3
"""A rank meets the other groups at its own place, where it stands in for a neighbour that is not
active, and where the places of a smaller group begin anew."""
FILES_OUT: Final = 2
"""To one peer: the socket's own wake-up and the connection."""
FILES_PER_LANE: Final = FILES_OUT + 1
"""Likewise, with the connection that comes in."""
AGENT_FILES_PER_RANK: Final = 8
"""Output of launcher and rank (3), connections of rank and guard (2), its line to the coordinator,
its record, its log."""
AGENT_FILES_PER_LAUNCH: Final = 5
"""Passed on at a start, and closed then."""
PROCESSES_UNDER_MPI: Final = 4
"""mpiexec, its proxy, the guard and the rank."""


def rank_files(ranks: int, transports: Collection[str]) -> int:
    """Files and sockets of one rank among `ranks` with these transports."""
    others = ranks - 1
    # By the bulk lane a holder tells all who are behind (R7); from few comes anything in.
    files = FILES_PER_LANE * most_peers(ranks) + FILES_OUT * others + most_peers(ranks)
    for name in transports:
        between = name.removeprefix(HIERARCHICAL)
        if between == "mpi":
            # A connection of the library and one of ours; this also for groups that were left.
            files += SPARE_LINKS_MAX + most_partners(ranks) * (2 + ABANDONED_GROUPS_MAX)
        if between == "gloo":
            # All pairs, twice: a group is closed when the next one stands. Rank 0 meets everybody.
            files += 3 * others
        if name == "shm" or name != between:
            # A connection and an eventfd; connections of groups that not everybody has left yet.
            files += others * (2 + ROOMS_LEFT_MAX) + SHARED_FILES
    if "nccl" in transports:
        files += others  # the store of rank 0; what the library opens itself is not known
    return files


def most_peers(ranks: int) -> int:
    """Ranks that one exchanges announcements and GO with: in a large job those of its group and of
    its place in the others (R41)."""
    others = ranks - 1
    if ranks <= TREE_ABOVE:
        return others
    rows = isqrt(others) + 1
    return min(others, GRIDS * (rows + PLACES * rows))


def most_partners(ranks: int) -> int:
    """At most so many ranks does one exchange messages with over MPI: two neighbours on the ring,
    one per doubling, and one that hands its part over first."""
    return ranks.bit_length() + 2


def agent_files(procs: int) -> int:
    """Of an agent with so many ranks; one that is started again overlaps with its predecessor."""
    return 2 * procs * AGENT_FILES_PER_RANK + AGENT_FILES_PER_LAUNCH


def coordinator_files(agents: int) -> int:
    """One connection for each (R43); one that is made anew overlaps with the one before."""
    return 2 * agents


def local_processes(ranks: int, agents: int, *, mpi: bool) -> int:
    """All that run at the same time on one machine, and one coordinator."""
    return ranks * (PROCESSES_UNDER_MPI if mpi else 1) + agents + 1
