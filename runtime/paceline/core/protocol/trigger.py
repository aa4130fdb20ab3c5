"""Decision table for the start of a round, with reasons (R12, R13, docs/design/rounds.md).

The starter calls `decide` when an announcement arrives or its timer fires. Solo, Majority and Full
are Quorum(k) with another k (`Log.quorum`). Deadline and the random initiator of eager-SGD have
conditions of their own. The answer carries its reason.
"""

from __future__ import annotations

import hashlib
from typing import Final, NamedTuple

from paceline_api.ids import MemberId
from paceline_api.times import NS_PER_S
from paceline_api.types.enums import Mode

from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, Trigger

NEVER: Final = -1
"""Spread that no streamed round can meet."""


class Decision(NamedTuple):
    """Answer of the trigger table, with its reason."""

    trigger: Trigger | None
    """Why the round starts; None if it does not start yet."""
    why: str
    """Reason for people, in logs and tests."""
    wake_ns: int | None = None
    """Time at which to ask again if nothing arrives before; None for no such time."""
    benched: tuple[MemberId, ...] = ()
    """Ranks that GO makes passive because they were silent for too long."""
    streamed: bool = False
    """True if GO is streamed: it also names the batches of ranks that announced COMING."""


def decide(
    arrivals: Arrivals, *, now_ns: int, has_request: bool, spread_ns: int = NEVER
) -> Decision:
    """Decide whether a round starts now.

    This is a pure function, called by the starter on its communication thread.

    Args:
        arrivals: Announcements for the round.
        now_ns: Present time, on the clock of the arrival times.
        has_request: True if there is a request that no GO has carried yet (R18).
        spread_ns: Upper bound on the time between announcements in a streamed round (R34).

    Returns:
        Why the round starts, or why it does not and when to ask again.
    """
    log, fresh, idle = arrivals.log, len(arrivals.fresh), arrivals.idle
    if not arrivals.awaited:
        if fresh == len(log.active):
            return Decision(Trigger.ALL, f"all {fresh} arrived")
        if fresh >= arrivals.quorum:
            return Decision(Trigger.QUORUM, f"{fresh} arrived, {idle} idle")
        if has_request or arrivals.something:
            return Decision(Trigger.TAIL, f"{fresh} arrived, {idle} idle, {log.quorum=}")
        return Decision(None, "nothing to apply")

    late = arrivals.overdue
    met = _condition_met(arrivals, now_ns) if late is None else None
    if (met is None or met.trigger is None) and arrivals.all_coming:
        streamed = _streamed(arrivals, spread_ns)
        if streamed is not None:
            return streamed
    if met is None:
        why = f"{late} would become older than {log.settings.max_age} rounds"
        if log.plan.script:
            why = f"{late} has not taken the average of the last step"
        return _or_bench(arrivals, now_ns, why)
    if met.trigger is None:
        bench = _or_bench(arrivals, now_ns, met.why)
        if bench.trigger is None and met.wake_ns is not None:
            return bench._replace(wake_ns=min(x for x in (bench.wake_ns, met.wake_ns) if x))
        return bench
    return met


def _streamed(arrivals: Arrivals, spread_ns: int) -> Decision | None:
    """Return the decision for a round in which all ranks have announced, some with COMING.

    Without a streamed round, the ranks that met the quorum might be through by now. So there is no
    such round if the last rank came too long after them (R34).

    Returns:
        The decision to stream; None if the announcements are too far apart.
    """
    if arrivals.spread_ns > spread_ns:
        return None
    come = len(arrivals.fresh) + len(arrivals.coming)
    if come == len(arrivals.log.active):
        trigger = Trigger.ALL
    else:
        trigger = Trigger.QUORUM if come >= arrivals.quorum else Trigger.TAIL
    why = f"{len(arrivals.fresh)} arrived, {len(arrivals.coming)} coming, {arrivals.idle} idle"
    return Decision(trigger, why, streamed=True)


def _condition_met(arrivals: Arrivals, now_ns: int) -> Decision:
    """Judge the mode's own condition while some active ranks are silent."""
    s, k, fresh = arrivals.log.settings, arrivals.quorum, arrivals.fresh
    if arrivals.operation is not None and arrivals.operation.needs_everybody:
        return Decision(None, f"{arrivals.missing} ranks are awaited in {arrivals.operation}")
    if s.mode is Mode.DEADLINE and arrivals.partial:
        if not fresh:
            return Decision(None, "nobody arrived")
        due = fresh[0] + arrivals.deadline_ns
        if len(fresh) < k:
            return Decision(None, f"{len(fresh)} of at least {k} arrived")
        if now_ns >= due:
            return Decision(Trigger.DEADLINE, f"deadline with {len(fresh)} arrived")
        return Decision(None, f"{len(fresh)} arrived, deadline runs", due)
    if s.mode is Mode.MAJORITY and s.random_initiator and arrivals.partial:
        drawn = initiator(arrivals.log)
        latest = arrivals.last.get(drawn)
        if latest and fresh and latest.kind in (AnnounceKind.ARRIVE, AnnounceKind.IDLE):
            return Decision(Trigger.INITIATOR, f"{drawn} was drawn and is here")
        return Decision(None, f"waiting for {drawn}, who was drawn")
    if len(fresh) < k:
        return Decision(None, f"{len(fresh)} of {k} arrived")
    due = fresh[k - 1] + arrivals.grace_ns
    if now_ns >= due or not arrivals.anybody_near:
        return Decision(Trigger.QUORUM, f"{len(fresh)} arrived, {k} needed")
    return Decision(None, f"{len(fresh)} arrived, grace runs", due)


def _or_bench(arrivals: Arrivals, now_ns: int, why: str) -> Decision:
    """Wait, or start the round without the silent ranks once they were silent too long (R13)."""
    if not arrivals.here or arrivals.log.plan.script:
        return Decision(None, why)  # never bench the last active rank, nor one of a script (S13)
    since = arrivals.latest_ns
    due = since + arrivals.bench_after_ns
    if now_ns < due:
        return Decision(None, why, due)
    silent = arrivals.silent()
    names = ", ".join(map(str, silent))
    return Decision(
        Trigger.BENCH, f"{names} silent for {(now_ns - since) / NS_PER_S:.1f} s", None, silent
    )


def initiator(log: Log) -> MemberId:
    """Return the rank drawn for this round, the same everywhere (PPoPP'20, section 4.2)."""
    key = f"{log.plan.seed}:{log.version}".encode()
    drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return log.active[drawn % len(log.active)]
