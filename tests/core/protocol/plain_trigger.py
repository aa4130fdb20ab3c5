"""An oracle for the trigger table that examines all announcements again for each decision.

It is slow and obvious; test_arrivals.py compares it with the table that counts incrementally.
"""

from __future__ import annotations

from collections.abc import Mapping

from paceline.core.protocol.arrivals import Arrival, bench_after_ns
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, Share, Trigger
from paceline.core.protocol.trigger import Decision, initiator
from paceline.core.protocol.waits import deadline_ns, grace_ns
from paceline_api.ids import MemberId
from paceline_api.types.enums import MaxAgePolicy, Mode

ArrivalMap = Mapping[MemberId, Arrival]


def share_of(arrival: Arrival) -> Share:
    assert arrival.share is not None, "the table of these tests names each share"
    return arrival.share


def decide(
    log: Log, arrivals: ArrivalMap, *, opened_ns: int, now_ns: int, has_request: bool
) -> Decision:
    """Decide if round `log.version` starts now."""
    active = log.active
    here = {m: arrivals[m] for m in active if m in arrivals}
    fresh = sorted((a.at_ns, m) for m, a in here.items() if a.kind is AnnounceKind.ARRIVE)
    idle = [m for m, a in here.items() if a.kind is AnnounceKind.IDLE]
    silent = tuple(m for m in active if m not in here or here[m].kind is AnnounceKind.PENDING)
    if not silent:
        if len(fresh) == len(active):
            return Decision(Trigger.ALL, f"all {len(active)} arrived")
        if len(fresh) >= log.quorum:
            return Decision(Trigger.QUORUM, f"{len(fresh)} arrived, {len(idle)} idle")
        if has_request or _something(log, arrivals):
            return Decision(Trigger.TAIL, f"{len(fresh)} arrived, {len(idle)} idle, {log.quorum=}")
        return Decision(None, "nothing to apply")
    late = _too_old_to_leave(log, silent)
    if late is not None:
        why = f"{late} would become older than {log.settings.max_age} rounds"
        return _or_bench(log, here, silent, opened_ns, now_ns, why)
    met = _condition_met(log, here, fresh, silent, opened_ns, now_ns)
    if met.trigger is None:
        bench = _or_bench(log, here, silent, opened_ns, now_ns, met.why)
        if bench.trigger is None and met.wake_ns is not None:
            return bench._replace(wake_ns=min(x for x in (bench.wake_ns, met.wake_ns) if x))
        return bench
    return met


def _something(log: Log, arrivals: ArrivalMap) -> bool:
    if not log.plan.ends and all(m in arrivals and share_of(arrivals[m]).done for m in log.active):
        return True
    for member, arrival in arrivals.items():
        share = share_of(arrival)
        if arrival.kind is AnnounceKind.READY and member not in log.active:
            return True
        if member in log.active and (
            share.count
            or share.drops
            or share.returned
            or share.stop
            or share.resting is not (member in log.resting)
        ):
            return True
    return False


def _condition_met(
    log: Log,
    here: ArrivalMap,
    fresh: list[tuple[int, MemberId]],
    silent: tuple[MemberId, ...],
    opened_ns: int,
    now_ns: int,
) -> Decision:
    s, k = log.settings, log.quorum
    if s.mode is Mode.DEADLINE and not log.is_full_round:
        if not fresh:
            return Decision(None, "nobody arrived")
        due = fresh[0][0] + deadline_ns(s, log.offsets_us)
        if len(fresh) < k:
            return Decision(None, f"{len(fresh)} of at least {k} arrived")
        if now_ns >= due:
            return Decision(Trigger.DEADLINE, f"deadline with {len(fresh)} arrived")
        return Decision(None, f"{len(fresh)} arrived, deadline runs", due)
    if s.mode is Mode.MAJORITY and s.random_initiator and not log.is_full_round:
        drawn = initiator(log)
        if drawn in here and here[drawn].kind in (AnnounceKind.ARRIVE, AnnounceKind.IDLE) and fresh:
            return Decision(Trigger.INITIATOR, f"{drawn} was drawn and is here")
        return Decision(None, f"waiting for {drawn}, who was drawn")
    if len(fresh) < k:
        return Decision(None, f"{len(fresh)} of {k} arrived")
    grace = grace_ns(s, log.median_round_us)
    due = fresh[k - 1][0] + grace
    if now_ns >= due or not any(_nearly_there(log, m, here, opened_ns + grace) for m in silent):
        return Decision(Trigger.QUORUM, f"{len(fresh)} arrived, {k} needed")
    return Decision(None, f"{len(fresh)} arrived, grace runs", due)


def _nearly_there(log: Log, member: MemberId, here: ArrivalMap, began_by_ns: int) -> bool:
    if member in here:
        return (
            share_of(here[member]).base >= log.version - log.settings.pipeline
            and here[member].at_ns <= began_by_ns
        )
    return log.heard.get(member, log.version) >= log.version - log.settings.pipeline


def _too_old_to_leave(log: Log, silent: tuple[MemberId, ...]) -> MemberId | None:
    s = log.settings
    if s.late is not MaxAgePolicy.WAIT or not s.max_age:
        return None
    for member in silent:
        if log.age(log.heard.get(member, log.version)) >= s.max_age:
            return member
    return None


def _or_bench(
    log: Log, here: ArrivalMap, silent: tuple[MemberId, ...], opened_ns: int, now_ns: int, why: str
) -> Decision:
    if len(silent) == len(log.active):
        return Decision(None, why)
    since = max([opened_ns, *(a.at_ns for a in here.values())])
    due = since + bench_after_ns(log)
    if now_ns < due:
        return Decision(None, why, due)
    names = ", ".join(map(str, silent))
    return Decision(
        Trigger.BENCH, f"{names} silent for {(now_ns - since) / 1e9:.1f} s", None, silent
    )
