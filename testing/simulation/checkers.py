"""The promises I1 to I17 as checks on a simulated job, one function each, run after each event."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import TYPE_CHECKING

from paceline.core import messages as m
from paceline.core.coordinator.state import CoordinatorState
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.log import Log
from paceline.core.protocol.pending import Buffer
from paceline.core.protocol.records import AnnounceKind, Gen, Go, Record, Share, Trigger
from paceline.core.protocol.rows import members_of
from paceline.core.protocol.sampling import samples_of, total_leases
from paceline.core.protocol.snapshot import Totals
from paceline.core.rank import events as ev
from paceline_api.ids import GenerationId, MemberId, pod_of
from paceline_api.types.enums import MaxAgePolicy, Mode

from testing.simulation.disk import Copy
from testing.simulation.sums import FLAG, Label, Sum, add, exact, scaled

if TYPE_CHECKING:
    from testing.simulation.ranks import SimRank
    from testing.simulation.simulation import Simulation

Fingerprint = tuple[object, ...]


class Checkers:
    """All checks of one simulation, and the history that they compare with."""

    def __init__(self, sim: Simulation) -> None:
        self.sim = sim
        self.every = 1
        """Expensive checks cover one rank in this many, so large jobs stay fast; see `taken`."""
        self.lease_of: dict[Label, int] = {}
        self.samples: dict[Label, int] = {}
        self.poisoned: set[Label] = set()
        self.state_at: dict[str, tuple[Sum, Sum]] = {}
        """Weights and accumulated sum by the digest of the log (I5)."""
        self.chain: dict[str, tuple[str, Record]] = {}
        """Digest -> (digest before it, record that leads from that one to it)."""
        self.go_of: dict[tuple[GenerationId, int], Go] = {}
        self.contributed: dict[tuple[GenerationId, int, MemberId], Sum] = {}
        self.words: Counter[tuple[GenerationId, int, MemberId, bool]] = Counter()
        self.is_void: dict[tuple[GenerationId, int], bool] = {}
        """(generation, round) -> whether the round was void; equal on all ranks."""
        self.kept: list[Copy] = []
        """Every checkpoint that was published."""
        self.settings_changed = False
        self.gen_of: dict[GenerationId, Gen] = {}
        self.commits: dict[tuple[MemberId, GenerationId], list[str]] = {}
        """Digests that each rank committed, by rank and generation."""

    def looks_at(self, rank: SimRank) -> bool:
        """Return True if this rank computes its own weights and gets the expensive checks."""
        return (rank.me.slot + rank.me.local) % self.every == 0

    def taken(self, rank: SimRank) -> Sum | None:
        """Return weights that a rank may copy from the first rank with the same log, or None.

        A rank that is looked at gets None: it computes its weights and is compared with the others.

        Args:
            rank: the rank that applies an update.

        Returns:
            the known weights at the rank's digest, or None if it must compute them.
        """
        known = None if self.looks_at(rank) else self.state_at.get(rank.state.log.digest)
        return None if known is None else known[0]

    # ---- called by the simulation -----------------------------------------------------------

    def produced(self, label: Label, lease: int, samples: int, *, finite: bool) -> None:
        """Record a batch whose gradient a script has finished."""
        self.lease_of[label] = lease
        self.samples[label] = samples
        if not finite:
            self.poisoned.add(label)

    def joined(self, rank: SimRank, reduce: ev.Reduce, own: Sum) -> None:
        """Check a rank's contribution as it enters a reduction.

        A streamed round calls this for its last segment. The rank's log ends before the round.

        Args:
            rank: the rank that joins.
            reduce: the order to reduce, with the round's GO record.
            own: the sum that the rank adds.
        """
        go, log = reduce.go, rank.state.log
        self.check_one_go_per_round(go)
        if rank.state.passive:
            assert not own, "R15: a rank without state contributes"
            return
        if self.looks_at(rank):
            self.check_quorum(go, log)
            self.check_ages(go, log)
        share = log.read(go).share_of(rank.me)
        count = share.count if share else 0
        assert len(own) == count, f"{rank.me} adds {sorted(own)}, GO names {share}"
        assert not set(own) & self.poisoned, f"I17: {rank.me} adds a poisoned batch"
        mine = [p.version for p in rank.state.pending.steps if share and p.seq <= share.upto]
        oldest = min(mine, default=go.round)
        assert not share or oldest == share.oldest, f"I6: {rank.me} gives {oldest}, GO says {share}"
        # If the share has drops, the fresh batch may be one of them.
        if share and share.fresh and not share.drops:
            from_ = go.round - log.settings.pipeline
            newest = max(mine, default=go.round)
            assert newest >= from_, f"I6: what {rank.me} gives is of version {newest}"
        content = scaled(own, exact(1 / Fraction(reduce.factor))) if own else {}
        self.contributed[go.generation, go.round, rank.me] = content

    def ended(self, go: Go, *, void: bool) -> None:
        """Check that a round is void on all ranks or on none (R31)."""
        known = self.is_void.setdefault((go.generation, go.round), void)
        assert known == void, f"R31: round {go.round} is void here and not there"

    def committed(self, rank: SimRank, go: Go, weighing: Weighing) -> None:
        """Check a rank that has just committed a round."""
        self.check_one_go_per_round(go)
        if not rank.state.queue:
            ends = self.commits.setdefault((rank.me, go.generation), [])
            ends.append(rank.state.log.digest)
        if weighing.step and self.taken(rank) is None:
            self.check_weights(rank)
        self.check_rounds_apart(rank)

    def formed(self, state: CoordinatorState, gen: Gen) -> None:
        """Check that a new generation respects `allowedSizes` and leaves out no trained rank."""
        allowed = self.sim.world.allowed
        if not allowed or not state.reports:
            return
        out = {pod_of(x) for x, r in state.reports.items() if r.leaving}
        out |= {name for name, pod in state.roster.pods.items() if pod.draining}
        best = max(state.reports.values(), key=lambda r: (r.last, r.version))
        trained = members_of(best.members)
        before = {*gen.with_state, *trained}
        pods = {pod_of(x) for x in gen.members}
        inside = {pod_of(x) for x in before}  # a rank may have been restarted in its pod
        held, new = (pods & inside) - out, pods - inside
        if gen.plan is not None:
            assert len(pods) in allowed, f"{gen.members} begin, allowed: {allowed}"
        elif new and held:
            assert len(held | new) in allowed, f"{sorted(new)} join {sorted(held)}: {allowed}"
        if gen.plan is None and not best.stopped:
            ready = {x for x, r in state.reports.items() if r.ready and pod_of(x) not in out}
            away = ready.intersection(trained) - set(gen.members)
            assert not away, f"{sorted(away)} trained, and are sent away: {allowed}"

    def published(self, rank: SimRank, copy: Copy) -> None:
        """Check that every member had the checkpoint's version or the job was released (R19)."""
        self.kept.append(copy)
        self.remember_records(rank.state.log)
        log, version = rank.state.log, copy.log.version
        digest = log.digest
        while digest and digest != copy.log.digest:
            digest = self.chain[digest][0]
        assert digest, f"R19: version {version} is not part of the log of {rank.me}"
        assert log.version > version or rank.state.released, f"R19: {rank.me} is at {version}"
        for other in self.sim.ranks.values():
            mine = other.state
            if other.running and mine.log.gen == log.gen and mine.has_state and not mine.passive:
                assert mine.log.version >= version, f"R19: {other.me} never had {version}"

    def before_event(self, rank: SimRank, event: ev.Event) -> Fingerprint | None:
        """Count announcements; return a fingerprint of the rank if the event is stale."""
        if isinstance(event, m.Announce):
            self.check_words(event)
        older = isinstance(event, m.PeerMessage) and event.generation < rank.state.promise
        return _fingerprint(rank) if older else None

    def after_event(self, rank: SimRank, before: Fingerprint | None) -> None:
        """Run the checks of one rank after it has handled an event."""
        if before is not None:
            assert _fingerprint(rank) == before, "I13: a message of an old generation was heard"
        self.remember_records(rank.state.log)
        if rank.state.log.stopped and self.sim.at_the_end:
            todo, self.sim.at_the_end = self.sim.at_the_end, []
            for action in todo:
                action()
        if rank.state.has_state and not rank.state.passive and rank.state.log.gen is not None:
            self.check_same_state(rank)
            self.check_conservation(rank)
        self.check_buffers(rank)

    # ---- after every event ----------------------------------------------------------------

    def check_conservation(self, rank: SimRank) -> None:
        """Check that produced = applied + dropped + pending + lost, in samples (I1)."""
        p = rank.state.pending
        totals = rank.state.log.ledger.by_member.get(rank.me, Totals())
        pending = sum(x.samples for x in p.steps) + sum(d.samples for d in p.drops)
        total = totals.applied + totals.dropped + pending + p.lost
        assert p.produced == total, (
            f"I1: {rank.me} produced {p.produced}, applied {totals.applied}, dropped "
            f"{totals.dropped}, pending {pending}, lost {p.lost}"
        )
        assert p.lost >= 0, f"I1: {rank.me} lost {p.lost}"

    def check_buffers(self, rank: SimRank) -> None:
        """Check that the buffers hold exactly what the bookkeeping lists, as sums (I1)."""
        p = rank.state.pending
        self._check_buffer(rank, "LATE", rank.late, p.late)
        queued = any(isinstance(e, ev.Step) for e in (*rank.waiting, *rank.backlog))
        if not p.void and not queued:  # void: the step under way will drop all of it
            self._check_buffer(rank, "GRAD", rank.grad, p.grad)

    def _check_buffer(self, rank: SimRank, name: str, memory: Sum, buffer: Buffer) -> None:
        value = sum(memory.values()) * buffer.unit
        wanted = buffer.samples * exact(buffer.discount)
        assert len(memory) == len(buffer.steps), f"I1: {name} of {rank.me} has {sorted(memory)}"
        near = value == wanted or abs(Fraction(value - wanted)) < Fraction(1, 10**6)
        assert near, f"I1: {name} of {rank.me}: {value}"

    def check_same_state(self, rank: SimRank) -> None:
        """Check that ranks with equal logs have equal weights (I4, I5)."""
        mine = rank.weights, rank.accumulated if rank.state.log.accumulated else {}
        expected = self.state_at.setdefault(rank.state.log.digest, mine)
        assert expected == mine, f"I5: {rank.me} has other weights at {rank.state.log.digest}"

    def remember_records(self, log: Log) -> None:
        """Add a log's recent records to the chain; a digest must have one history (I13)."""
        ends = [digest for _, digest in log.tail]
        for (before, after), record in zip(pairwise(ends), log.recent, strict=True):
            known = self.chain.setdefault(after, (before, record))
            assert known[0] == before, "two histories lead to one digest"
            if isinstance(record, Gen):
                known_gen = self.gen_of.setdefault(record.id, record)
                assert known_gen == record, f"I13: two generations are called {record.id}"

    def check_words(self, announce: m.Announce) -> None:
        """Check the number of announcements of a rank in a round (R11).

        A rank sends at most one COMING and two other announcements. Evaluating may add to them, so
        a world with `rest` is exempt.

        Args:
            announce: the announcement that arrives.
        """
        member = announce.share.member
        coming = announce.kind is AnnounceKind.COMING
        key = announce.generation, announce.round, member, coming
        self.words[key] += 1
        most = 1 if coming else 2
        assert self.words[key] <= most or self.sim.world.rest, f"R11: {member} talks too much"

    # ---- once per round -------------------------------------------------------------------

    def check_one_go_per_round(self, go: Go) -> None:
        """Check that a round of a generation has only one composition (I4)."""
        assert self.go_of.setdefault((go.generation, go.round), go) == go, f"I4: {go}"

    def check_quorum(self, go: Go, log: Log) -> None:
        """Check that each round not marked degraded has at least k fresh contributors (I6)."""
        if go.degraded or go.trigger is Trigger.INITIATOR:
            return
        made = log.read(go)
        fresh = made.arrivals.fresh
        needed = _needed(log)
        assert len(fresh) >= needed, f"I6: {fresh} are fewer than {needed}"
        for share in made.shares:
            assert not share.fresh or share.count == 0 or share.oldest <= go.round

    def check_ages(self, go: Go, log: Log) -> None:
        """Check that nothing older than maxAge has full weight (I7)."""
        s = log.settings
        if not s.max_age or (s.late is MaxAgePolicy.WAIT and self.settings_changed):
            return
        for share in log.read(go).shares:
            over = log.age(share.oldest) - s.max_age
            if not share.count or over <= 0:
                continue
            assert s.late is MaxAgePolicy.DECAY, f"I7: {share} is {over} rounds too old"
            assert share.discount < 1, f"I7: {share} has full weight"

    def check_weights(self, rank: SimRank) -> None:
        """Check that each batch is applied at most once, weighted by its samples (I2, I12)."""
        assert FLAG not in rank.weights, "R32: a void round was applied"
        for label, value in rank.weights.items():
            limit = self.samples[label]
            assert value <= limit, f"I2: batch {label} applied {value} of {limit} samples"
            if self.sim.world.settings.late is not MaxAgePolicy.DECAY and not self.settings_changed:
                assert value == limit, f"I12: batch {label} applied as {value} of {limit}"

    def check_rounds_apart(self, rank: SimRank) -> None:
        """Check that the members of a generation are at most one round apart."""
        gen = rank.state.log.gen
        peers = [
            r.state.log.version
            for r in self.sim.ranks.values()
            if r.state.log.gen == gen and not r.state.passive and r.running
        ]
        assert not peers or max(peers) - min(peers) <= 1, f"rounds apart: {peers}"

    # ---- at the end -----------------------------------------------------------------------

    def job_ended(self, state: CoordinatorState, reason: str) -> None:
        """Check that the outcome of a job is true (R17).

        A job whose last round is proven stays complete. StateLost is allowed only if no checkpoint
        exists (or the ranks were released) and no living rank has weights.

        Args:
            state: the state of the coordinator that reports the outcome.
            reason: the reason of the outcome.
        """
        assert reason == "Complete" or not state.proven, f"{reason}, but a rank has finished"
        if reason != "StateLost":
            return
        released = any("Released" in c.reasons for c in self.sim.all_coordinators)
        assert released or not self.sim.disk.published, "StateLost, but there is a checkpoint"
        for rank in self.sim.ranks.values():
            keeps = rank.state.has_state and rank.state.log.version > 0
            assert not (rank.running and keeps), f"StateLost, but {rank.me} has weights"

    def at_end(self) -> None:
        """Check I14 and I15, and I1 to I3 along the released log."""
        first = max(self.sim.finished, key=lambda rank: rank.state.log.index)
        for other in self.sim.finished:
            ends = {self.last_round(x.state.log.digest) for x in (first, other)}
            assert len(ends) == 1, "I14: two ends"
            assert other.weights == first.weights, "I14: two final models"
        records = self.history(first.state.log.digest)
        void = [isinstance(r, Go) and r.void for r in records if isinstance(r, Go)]
        assert not any(a and b for a, b in pairwise(void)), "R32: two void rounds in a row"
        self.check_order(composed(records))
        self.check_abandoned(first.state.log.digest)
        assert self.replay(records) == first.weights, "I15: the log gives other weights"
        self.check_totals(first)

    def last_round(self, digest: str) -> str:
        """Return the digest after the last round of a log, without generations that follow it.

        If a released rank is gone, and the coordinator that released it too, the others form one
        more generation, which ends on the same round.

        Args:
            digest: the digest at the end of the log.

        Returns:
            the digest after its last GO record, or "" if it has none.
        """
        while digest and isinstance(self.chain[digest][1], Gen):
            digest = self.chain[digest][0]
        return digest

    def history(self, digest: str) -> list[Record]:
        """Return all records that lead to a digest, oldest first."""
        records = []
        while digest:
            digest, record = self.chain[digest]
            records.append(record)
        return records[::-1]

    def check_abandoned(self, digest: str) -> None:
        """Check that a rank that was left out lost at most the one round in flight (I5, R19)."""
        kept, gens = {""}, list[Gen]()
        while digest:
            kept.add(digest)
            digest, record = self.chain[digest]
            if isinstance(record, Gen):
                gens.append(record)
        anew = any("BeganAnew" in c.reasons for c in self.sim.all_coordinators)
        # All ranks died within a heartbeat of their first rounds, and so did the coordinator that
        # could know of these rounds.
        anew = anew or gens[-1].id.coordinator != self.sim.all_coordinators[0].name
        last = next(n for n, gen in enumerate(gens) if gen.plan is not None)
        after = {gen.id for gen in gens[: last + 1]} if gens[last].version else set(self.gen_of)
        for (member, generation), ends in self.commits.items():
            lost = [x for x in ends if x not in kept]
            # A restoration loses everything of earlier generations that no checkpoint has.
            allowed = (anew and generation < gens[-1].id) or generation not in after
            assert len(lost) <= 1 or allowed, f"I5: {len(lost)} rounds of {member} are lost"
        out = [c.log.version for c in self.kept if c.log.digest not in kept]
        assert not out, f"R19: the published versions {out} are not part of the released log"

    def check_order(self, rounds: list[tuple[Go, tuple[Share, ...]]]) -> None:
        """Check that each rank's batches are applied in order and each lease once (I2, I3)."""
        upto: dict[MemberId, int] = {}
        leases: Counter[int] = Counter()
        for go, shares in rounds:
            if go.operation is not None and go.operation.is_call:
                continue  # no batch
            for share in shares:
                leases.update(share.leases)
                if share.count:
                    assert share.upto > upto.get(share.member, 0), f"I3: {share}"
                    upto[share.member] = share.upto
        assert not [x for x, n in leases.items() if n > 1], "I2: a lease was applied twice"

    def replay(self, records: list[Record]) -> Sum:
        """Return the weights that follow from the log and the ranks' contributions (I15)."""
        log, weights, accumulated = Log(), Sum(), Sum()
        for record in records:
            if isinstance(record, Go) and not record.void:
                weighing = log.weigh(record)
                accumulated = {} if weighing.first else accumulated
                for share in log.read(record).shares:
                    own = self.contributed[record.generation, record.round, share.member]
                    add(accumulated, own, exact(weighing.factor(share)) * weighing.unit)
                if weighing.step:
                    add(weights, accumulated)
            log.append(record)
        return weights

    def _check_steps(self, rank: SimRank, quota: int) -> None:
        """Check that the job ended with the round that made its last step (R2, R17)."""
        records = self.history(rank.state.log.digest)
        if any(isinstance(r, Gen) and r.plan and r.version for r in records):
            return  # the records before the checkpoint are another run's
        steps = _count_steps(records)
        assert steps[-1] == rank.state.log.steps, f"R2: {steps[-1]} steps were made"
        assert steps[-2] < quota <= steps[-1], f"R17: {steps[-2:]} of {quota}"

    def check_totals(self, rank: SimRank) -> None:
        """Check that every sample of every epoch was applied once or counted as dropped (I1)."""
        log, plan = rank.state.log, self.sim.world.plan
        total = log.ledger.total()
        applied = sum(self.samples[x] for x in rank.weights)
        assert total.applied == applied, f"I1: {total.applied} counted, {applied} in the weights"
        if log.stopping:
            return
        reported = log.ledger.metrics.get("loss", (0.0, 0.0))[1]
        assert reported <= applied, f"figures of {reported} samples, {applied} applied"
        if not plan.ends:
            return
        if plan.steps:
            self._check_steps(rank, plan.steps)
            return
        wanted = sum(samples_of(plan, x) for x in range(total_leases(plan)))
        assert total.applied + total.dropped == wanted, f"I1: {total} of {wanted}"
        assert log.ledger.epochs_exact + log.ledger.epochs_short == plan.epochs
        if log.settings.late is not MaxAgePolicy.DECAY and not self.settings_changed:
            assert total.discounted == 0


def composed(records: list[Record]) -> list[tuple[Go, tuple[Share, ...]]]:
    """Return each round that is not void with its complete shares."""
    log, rounds = Log(), []
    for record in records:
        if isinstance(record, Go) and not record.void:
            rounds.append((record, log.read(record).shares))
        log.append(record)
    return rounds


def _count_steps(records: list[Record]) -> list[Fraction]:
    """Return the job's steps after each round: the batches made over the number of active ranks."""
    log, steps = Log(), [Fraction(0)]
    for record in records:
        if isinstance(record, Go) and not record.void:
            made = sum(share.count + len(share.drops) for share in log.read(record).shares)
            steps.append(steps[-1] + Fraction(made, len(log.active)))
        log.append(record)
    return steps


def _needed(log: Log) -> int:
    """Compute k(r) of R12 independently, from the settings and the active ranks of the round."""
    s, active, since = log.settings, len(log.active), log.version - log.started
    every = s.full_every
    if log.plan.script:
        since, every = log.updates, every or 32  # steps of the script
    full = s.mode in (Mode.FULL, Mode.SHADOW) or since < max(1, s.warmup_rounds)
    if full or (every and since % every == 0):
        return active
    share = next((k for k in range(1, active + 1) if 100 * k >= s.quorum_percent * active), active)
    asked = s.quorum or (share if s.quorum_percent else active)
    majority = next(k for k in range(1, active + 1) if 2 * k > active)
    return min(active, {Mode.MAJORITY: majority, Mode.SOLO: 1}.get(s.mode, asked))


def _fingerprint(rank: SimRank) -> Fingerprint:
    s = rank.state
    last = tuple(sorted(s.arrivals.last)) if s.arrivals else ()
    received = last, tuple((r, len(words)) for r, words in sorted(s.words.items()))
    return (
        (s.log.digest, s.promise, s.gen_id, s.passive, s.needs_part, s.started, s.broken),
        (received, tuple(s.gos), len(s.early), s.round, len(s.queue), s.reducing is not None),
        (tuple(p.seq for p in s.pending.steps), s.main, rank.grad, rank.late, rank.weights),
    )
