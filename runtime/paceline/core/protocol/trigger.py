"""When a round starts, and why: one table for every mode (R12, R13, docs/design/rounds.md).

The starter calls `decide` whenever an announcement arrives or its timer fires. Solo, Majority and
Full are Quorum(k) with another k (`Log.quorum`); Deadline and the random initiator of eager-SGD
have conditions of their own. The answer carries its reason.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from paceline_api.types.enums import Mode

from paceline.core.protocol.arrivals import Arrivals
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.log import Log
from paceline.core.protocol.records import AnnounceKind, Trigger


class Decision(NamedTuple):
    trigger: Trigger | None
    """None: not yet."""
    why: str
    wake_ns: int | None = None
    """Ask again then, if nothing arrives before."""
    benched: tuple[MemberId, ...] = ()


def decide(arrivals: Arrivals, *, now_ns: int, has_request: bool) -> Decision:
    """Whether the round of `arrivals` starts now. `has_request`: an unwritten request is at hand
    (R18)."""
    log, fresh, idle = arrivals.log, len(arrivals.fresh), arrivals.idle
    if not arrivals.missing:
        if fresh == len(log.active):
            return Decision(Trigger.ALL, f"all {fresh} arrived")
        if fresh >= arrivals.quorum:
            return Decision(Trigger.QUORUM, f"{fresh} arrived, {idle} idle")
        if has_request or arrivals.something:
            return Decision(Trigger.TAIL, f"{fresh} arrived, {idle} idle, {log.quorum=}")
        return Decision(None, "nothing to apply")

    late = arrivals.overdue
    if late is not None:
        why = f"{late} would become older than {log.settings.max_age} rounds"
        return _or_bench(arrivals, now_ns, why)
    met = _condition_met(arrivals, now_ns)
    if met.trigger is None:
        bench = _or_bench(arrivals, now_ns, met.why)
        if bench.trigger is None and met.wake_ns is not None:
            return bench._replace(wake_ns=min(x for x in (bench.wake_ns, met.wake_ns) if x))
        return bench
    return met


def _condition_met(arrivals: Arrivals, now_ns: int) -> Decision:
    """The mode's own condition, with some active ranks still silent."""
    s, k, fresh = arrivals.log.settings, arrivals.quorum, arrivals.fresh
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
        said = arrivals.last.get(drawn)
        if said and fresh and said.kind in (AnnounceKind.ARRIVE, AnnounceKind.IDLE):
            return Decision(Trigger.INITIATOR, f"{drawn} was drawn and is here")
        return Decision(None, f"waiting for {drawn}, who was drawn")
    if len(fresh) < k:
        return Decision(None, f"{len(fresh)} of {k} arrived")
    due = fresh[k - 1] + arrivals.grace_ns
    if now_ns >= due or not arrivals.anybody_near:
        return Decision(Trigger.QUORUM, f"{len(fresh)} arrived, {k} needed")
    return Decision(None, f"{len(fresh)} arrived, grace runs", due)


def _or_bench(arrivals: Arrivals, now_ns: int, why: str) -> Decision:
    """Everybody else is here: bench the silent once they were silent for too long (R13)."""
    if not arrivals.here:
        return Decision(None, why)  # never bench the last active rank
    since = arrivals.latest_ns
    due = since + arrivals.bench_after_ns
    if now_ns < due:
        return Decision(None, why, due)
    silent = arrivals.silent()
    names = ", ".join(map(str, silent))
    return Decision(
        Trigger.BENCH, f"{names} silent for {(now_ns - since) / 1e9:.1f} s", None, silent
    )


def initiator(log: Log) -> MemberId:
    """The rank drawn for this round, alike on all without a message (PPoPP'20, section 4.2)."""
    key = f"{log.plan.seed}:{log.version}".encode()
    drawn = int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big")
    return log.active[drawn % len(log.active)]
