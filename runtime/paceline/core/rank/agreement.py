"""Combine what the ranks of a group report, so that the group acts as one rank (R50, R51).

Each rank of a group runs the state machine of its member on the same events in the same order. The
group's first rank, the lead, sets this order. Two kinds of events begin on each rank: calls of its
script, and outcomes of an effect that all carry out, such as the reduction of each shard. This
module makes one event of the group from them. The group does not go on before all its ranks have
reached the same point.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Final, Generic, TypeVar
from zlib import crc32

from msgspec.structs import asdict, replace

from paceline.core.protocol.records import summed
from paceline.core.rank import events as ev

ScriptEvent = ev.Begin | ev.Step | ev.Want | ev.Skip | ev.Flush | ev.Rest | ev.Unrest | ev.Finish
SCRIPT: Final = (ev.Begin, ev.Step, ev.Want, ev.Skip, ev.Flush, ev.Rest, ev.Unrest, ev.Finish)
T = TypeVar("T")

_OWN: Final = {
    ev.Begin: ("fingerprint", "data", "seed", "whole", "shards", "segments", "copies"),
    ev.Step: ("finite", "foreign", "metrics"),
}
"""Fields in which the ranks of a group may differ."""


class GroupDisagreesError(Exception):
    """Raised if scripts of a group do different things or hold the same whole model; for users."""


class _Queues(Generic[T]):
    """Events of each rank of a group, in its order, until all ranks have reported theirs."""

    def __init__(self, model: int) -> None:
        self._of: list[deque[T]] = [deque() for _ in range(model)]

    def add(self, shard: int, one: T) -> list[T]:
        """Return the oldest event of each rank, by shard, once all have one; empty before."""
        self._of[shard].append(one)
        return [queue.popleft() for queue in self._of] if all(self._of) else []


class Agreement:
    """Combines script events of the ranks of a group; used by the lead's communication thread."""

    def __init__(self, model: int, addresses: Sequence[str]) -> None:
        """Begin without events.

        Args:
            model: Number of ranks in the group (M).
            addresses: Addresses of the peer sockets of all ranks but the first, by shard.
        """
        self._events = _Queues[ScriptEvent](model)
        self._addresses = tuple(addresses)

    def add(self, shard: int, event: ScriptEvent) -> ScriptEvent | None:
        """Record an event of one script.

        GroupDisagreesError is raised if the scripts call different things, or differ in a field
        that all must share, or if parameters that are not a shard differ.

        Args:
            shard: Rank in the group.
            event: What its script called.

        Returns:
            The event of the group, once all ranks have reported theirs; None before.
        """
        events = self._events.add(shard, event)
        if not events:
            return None
        _check_alike(events)
        first = events[0]
        if isinstance(first, ev.Step):
            return _step([e for e in events if isinstance(e, ev.Step)])
        if isinstance(first, ev.Begin):
            return self._begin([e for e in events if isinstance(e, ev.Begin)])
        return first

    def _begin(self, events: Sequence[ev.Begin]) -> ev.Begin:
        wholes = {event.whole for event in events}
        if len(wholes) == 1 and wholes != {""}:
            raise GroupDisagreesError(
                f"all {len(events)} ranks of the group hold the same whole model: nothing is "
                "sharded. Split it over pl.group(), or remove spec.parallelism.model and have as "
                "many more ranks"
            )
        check_copies([event.copies for event in events], "when training begins")
        shards = tuple(zip(self._addresses, (event.data for event in events[1:]), strict=True))
        fingerprint = "|".join(event.fingerprint for event in events)
        # Rounds of a group are not streamed, so the number of segments does not matter (R52).
        return replace(events[0], fingerprint=fingerprint, shards=shards, segments=1)


def _check_alike(events: Sequence[ScriptEvent]) -> None:
    first = events[0]
    for shard, event in enumerate(events):
        if type(event) is not type(first):
            raise GroupDisagreesError(
                f"rank 0 of the group says {_name(first)} and rank {shard} {_name(event)}: their "
                "scripts must take the same steps, in the same order"
            )
        theirs = asdict(event)
        for name, value in asdict(first).items():
            if theirs[name] != value and name not in _OWN.get(type(first), ()):
                raise GroupDisagreesError(
                    f"of their {_name(first)} rank 0 of the group says {name} = {value} and rank "
                    f"{shard} {theirs[name]}: their scripts must take the same steps, on the same "
                    "batches"
                )


def check_copies(of_ranks: Sequence[tuple[tuple[str, int], ...]], when: str) -> None:
    """Check that parameters that are not a shard are equal on the ranks of a group.

    Args:
        of_ranks: Names and hashes of these parameters on each rank, by shard.
        when: Moment of the check, for the text of the error.

    Raises:
        GroupDisagreesError: If one of them differs.
    """
    first = of_ranks[0]
    for shard, copies in enumerate(of_ranks):
        mine, theirs = dict(first), dict(copies)
        for name in [*mine, *(name for name in theirs if name not in mine)]:
            if mine.get(name) != theirs.get(name):
                raise GroupDisagreesError(
                    f"parameter {name}, which is not a shard, differs {when} between rank 0 of the "
                    f"group and rank {shard}: make it from the same seed on all ranks of a group, "
                    "and give them the same batches"
                )


def _name(event: ScriptEvent) -> str:
    return type(event).__name__.lower()


def _step(steps: Sequence[ev.Step]) -> ev.Step:
    """Return the step of the group: finite if all are, with the metrics of all summed."""
    return replace(
        steps[0],
        finite=all(step.finite for step in steps),
        foreign=any(step.foreign for step in steps),
        metrics=summed(metric for step in steps for metric in step.metrics),
    )


class Writing:
    """Parts of a checkpoint that the ranks of a group have written, one for each shard."""

    def __init__(self, model: int) -> None:
        self._done = _Queues[ev.Written](model)

    def done(self, shard: int, event: ev.Written) -> ev.Written | None:
        """Record that one rank has written its part, or failed to.

        Args:
            shard: Rank in the group.
            event: What became of its part.

        Returns:
            The event of the group, once all ranks have reported theirs, with the first problem if
            there is one; None before.
        """
        parts = self._done.add(shard, event)
        if not parts:
            return None
        assert len({part.version for part in parts}) == 1, parts
        return replace(parts[0], problem=next((p.problem for p in parts if p.problem), ""))


def outcome_of(outcomes: Sequence[ev.Event]) -> ev.Event:
    """Combine the outcomes of one effect on all ranks of a group (R52).

    If the effect failed on one rank, it failed for the group. GroupDisagreesError is raised if
    parameters that the ranks hold alike differ.

    Args:
        outcomes: Outcome on each rank, by shard.

    Returns:
        The outcome of the group. Of several failures, one that is no abort is preferred: an aborted
        rank does not know the cause.
    """
    failed = [e for e in outcomes if isinstance(e, ev.ChannelFailed)]
    if failed:
        # A rank that lost a peer knows more than one that was told to give up.
        return next((e for e in failed if not e.aborted), failed[0])
    if lacking := next((e for e in outcomes if isinstance(e, ev.NotRestored)), None):
        return lacking
    first = outcomes[0]
    assert all(type(e) is type(first) for e in outcomes), outcomes
    if isinstance(first, ev.Reduced):
        spent = [e.transfer_ns for e in outcomes if isinstance(e, ev.Reduced)]
        return ev.Reduced(max(spent))
    if isinstance(first, ev.Hashed):
        hashed = [e for e in outcomes if isinstance(e, ev.Hashed)]
        check_copies([e.copies for e in hashed], f"at version {first.version}")
        values = [e.value for e in hashed]
        return ev.Hashed(first.version, crc32(repr(values).encode()))
    return first
