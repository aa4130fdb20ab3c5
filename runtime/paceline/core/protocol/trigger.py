"""When a round starts, and why: one table for every mode (R12, R13, docs/design/rounds.md).

The starter calls `decide` whenever an announcement arrives or its timer fires. Solo, Majority and
Full are Quorum(k) with another k (`Log.quorum`); Deadline and the random initiator of eager-SGD
have conditions of their own. The answer carries its reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final, NamedTuple

from paceline_api.types.enums import MaxAgePolicy, Mode

from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, Share, Trigger
from paceline.core.protocol.waits import deadline_ns, grace_ns

BENCH_AFTER_MIN_NS: Final = 60 * 10**9
BENCH_AFTER_ROUNDS: Final = 20


class Arrival(NamedTuple):
    """The last announcement of one rank for the round in question."""

    kind: AnnounceKind
    at_ns: int
    share: Share


class Decision(NamedTuple):
    trigger: Trigger | None
    """None: not yet."""
    why: str
    wake_ns: int | None = None
    """Ask again then, if nothing arrives before."""
    benched: tuple[MemberId, ...] = ()


def decide(
    log: Log,
    arrivals: Mapping[MemberId, Arrival],
    *,
    opened_ns: int,
    now_ns: int,
    has_request: bool,
) -> Decision:
    """Whether round `log.version` starts now.

    `arrivals`: announcements for this round, passive ranks' READY included. `opened_ns`: when the
    starter committed the round before. `has_request`: an unwritten request is at hand (R18).
    """
    active = log.active
    here = {m: arrivals[m] for m in active if m in arrivals}
    fresh = sorted((a.at_ns, m) for m, a in here.items() if a.kind is AnnounceKind.ARRIVE)
    idle = [m for m, a in here.items() if a.kind is AnnounceKind.IDLE]
    silent = tuple(m for m in active if m not in here or here[m].kind is AnnounceKind.PENDING)
    something = has_request or _something(log, arrivals)

    if not silent:
        if len(fresh) == len(active):
            return Decision(Trigger.ALL, f"all {len(active)} arrived")
        if len(fresh) >= log.quorum:
            return Decision(Trigger.QUORUM, f"{len(fresh)} arrived, {len(idle)} idle")
        if something:
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


def _something(log: Log, arrivals: Mapping[MemberId, Arrival]) -> bool:
    """There is something to apply, to admit or to record."""
    if not log.plan.ends and all(m in arrivals and arrivals[m].share.done for m in log.active):
        return True  # the round that ends the job
    for member, arrival in arrivals.items():
        share = arrival.share
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
    here: Mapping[MemberId, Arrival],
    fresh: list[tuple[int, MemberId]],
    silent: tuple[MemberId, ...],
    opened_ns: int,
    now_ns: int,
) -> Decision:
    """The mode's own condition, with some active ranks still silent."""
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


def _nearly_there(
    log: Log, member: MemberId, here: Mapping[MemberId, Arrival], began_by_ns: int
) -> bool:
    """Whether a silent rank began its step with the others: grace is not for a slower one, which
    is still at an older version, or came in the middle of this round and has just begun."""
    if member in here:
        return here[member].share.base >= log.version and here[member].at_ns <= began_by_ns
    return log.heard.get(member, log.version) >= log.version


def _too_old_to_leave(log: Log, silent: tuple[MemberId, ...]) -> MemberId | None:
    """Under MaxAgePolicy.WAIT: a rank whose work would be older than `max_age` if left again."""
    s = log.settings
    if s.late is not MaxAgePolicy.WAIT or not s.max_age:
        return None
    for member in silent:
        if log.version - log.heard.get(member, log.version) >= s.max_age:
            return member
    return None


def _or_bench(
    log: Log,
    here: Mapping[MemberId, Arrival],
    silent: tuple[MemberId, ...],
    opened_ns: int,
    now_ns: int,
    why: str,
) -> Decision:
    """Everybody else is here: bench the silent once they were silent for too long (R13)."""
    if len(silent) == len(log.active):
        return Decision(None, why)  # never bench the last active rank
    since = max([opened_ns, *(a.at_ns for a in here.values())])
    due = since + bench_after_ns(log)
    if now_ns < due:
        return Decision(None, why, due)
    names = ", ".join(map(str, silent))
    return Decision(
        Trigger.BENCH, f"{names} silent for {(now_ns - since) / 1e9:.1f} s", None, silent
    )


def bench_after_ns(log: Log) -> int:
    if log.settings.bench_after_ns:
        return log.settings.bench_after_ns
    return max(BENCH_AFTER_MIN_NS, BENCH_AFTER_ROUNDS * log.median_round_us * 1000)


def initiator(log: Log) -> MemberId:
    """The rank drawn for this round, alike on all without a message (PPoPP'20, section 4.2)."""
    key = f"{log.plan.seed}:{log.version}".encode()
    drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return log.active[drawn % len(log.active)]
