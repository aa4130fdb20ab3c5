"""Small builders for the tests of the protocol core: members, logs, shares."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace
from paceline.core import messages as m
from paceline.core.protocol.arrivals import Arrival, Arrivals
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, DataPlan, Gen, Go, Share, Trigger
from paceline.core.protocol.sampling import samples_of
from paceline_api.ids import GenerationId, MemberId, pod_of
from paceline_api.rounds import RoundSettings

PLAN = DataPlan(samples=400, batch=4, epochs=1, seed=1)
GEN_1 = GenerationId(1, "a", 1)


def member(slot: int) -> MemberId:
    """Return the first member of a slot."""
    return MemberId(slot, 0, 0)


def members(*slots: int) -> tuple[MemberId, ...]:
    """Return the first members of these slots."""
    return tuple(member(s) for s in slots)


def make_log(
    ranks: int, settings: RoundSettings | None = None, plan: DataPlan = PLAN, version: int = 0
) -> Log:
    """Return a log whose first generation has `ranks` members, all active."""
    log = Log()
    everybody = members(*range(ranks))
    log.append(
        Gen(
            id=GEN_1,
            members=everybody,
            with_state=everybody[:1],
            active=everybody,
            version=version,
            lookahead=tuple((m, 2) for m in everybody),
            plan=plan,
            settings=settings or RoundSettings(),
        )
    )
    return log


def fresh(log: Log, slot: int, seq: int = 1) -> Share:
    """Return a share with one lease, computed on the log's version."""
    lease = log.held(member(slot))[0]
    samples = samples_of(log.plan, lease)
    return Share(
        member(slot),
        upto=seq,
        count=1,
        oldest=log.version,
        fresh=True,
        samples=samples,
        unit=samples,
        leases=(lease,),
    )


def idle(slot: int, **facts: Any) -> Share:
    """Return the share of an idle rank."""
    return Share(member(slot), upto=0, idle=True, **facts)


def go(log: Log, *shares: Share, **facts: Any) -> Go:
    """Return the GO record of the log's next round with these shares."""
    given: dict[str, Any] = {"trigger": Trigger.ALL, **facts}
    return Go(generation=log.id, round=log.version, listed=shares, **given)


def arrivals(log: Log, **words: tuple[str, int]) -> dict[MemberId, Arrival]:
    """Build arrivals: with `r0=("arrive", 5)` rank 0 arrived at 5 ns."""
    result = {}
    for name, (kind, at_ns) in words.items():
        slot = int(name[1:])
        share = fresh(log, slot) if kind in ("arrive", "pending") else idle(slot)
        if kind == "pending":
            share = replace(share, fresh=False, base=log.version)
        result[member(slot)] = Arrival(AnnounceKind(kind), at_ns, share)
    return result


def table(log: Log, announced: Mapping[MemberId, Arrival], opened_ns: int = 0) -> Arrivals:
    """Return the arrivals of a starter that has received these announcements."""
    made = Arrivals(log, opened_ns)
    for kind, at_ns, share in announced.values():
        assert share is not None
        made.hear(kind, at_ns, share)
    return made


def pod_beat(*beats: m.Heartbeat) -> m.PodBeat:
    """Return the first heartbeat that the agent of these ranks sends."""
    slot, attempt = pod_of(beats[0].member)
    ranks = tuple((beat.member.local, beat.member.attempt) for beat in beats)
    return m.PodBeat(slot, attempt, ranks, changed=beats)
