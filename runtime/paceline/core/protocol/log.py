"""State of the round log: everything that must be equal on all ranks (R2).

`Log.append` takes the next GO or GEN record. Version, membership, active and resting ranks,
starter, quorum, leases, settings, stop and sample counts are functions of the sequence of records
alone. So two ranks whose logs have the same digest agree on all of them. A record that does not fit
is a fault of the protocol, never of the user: `LogError` ends the process with the evidence.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Final

from paceline_api.ids import NO_GENERATION, GenerationId, MemberId
from paceline_api.rounds import RoundSettings
from paceline_api.types.enums import Mode, Normalisation, Pacing

from paceline.core.protocol.composition import Composition, Weighing, read
from paceline.core.protocol.deal import Deal
from paceline.core.protocol.ledger import Ledger
from paceline.core.protocol.records import (
    DataPlan,
    Gen,
    Go,
    Record,
    Share,
    Trigger,
    pack_record,
)
from paceline.core.protocol.sampling import samples_of
from paceline.core.protocol.shadow import ShadowReport, follow
from paceline.core.protocol.snapshot import LogSnapshot
from paceline.core.protocol.waits import quorum_of

WINDOW: Final = 32
"""Number of recent round durations that are kept, for grace and the bench timeout. Four times as
many arrival offsets are kept, for the automatic deadline."""
OFFSETS_MAX: Final = 16
"""Upper bound on the arrival offsets that are kept of one round."""
ONE: Final = Fraction(1)
"""Progress and steps of a round in which every rank is fresh. It is shared because a Fraction is
slow to make."""
SETTLE_EVERY: Final = 32
"""Steps of a script from one that waits for everybody to the next, where `fullEvery` is not set.
Without them lateness would persist: a rank that is late once would stay behind (S17.5)."""
AGES_MAX: Final = 1024
"""Number of recent weight updates that are kept to compute the age of a gradient. Before them, each
round counts as one update."""
RECENT_MAX: Final = 256
"""Upper bound on the records that are kept for members that are behind. More generations without a
round in between are an error."""


def is_slot_0(member: MemberId) -> bool:
    """Return True if this is the rank that a script knows as rank 0."""
    return member.slot == member.local == 0


def chain(digest: str, record: Record) -> str:
    """Return the digest of a log that had `digest` before `record` was appended."""
    data = digest.encode() + pack_record(record)
    return hashlib.blake2b(data, digest_size=12).hexdigest()


class LogError(AssertionError):
    """Raised if a record contradicts the log: the protocol is broken; the text is the evidence."""


@dataclass(slots=True)
class Log:
    """The log's state after `index` records; equal on all ranks whose logs have the same digest."""

    index: int = 0
    """Number of records."""
    digest: str = ""
    """Chained hash of all records."""
    version: int = 0
    """Version of the committed state, which is also the number of the next round."""
    gen: Gen | None = None
    """The last GEN record; None before the first one."""
    active: tuple[MemberId, ...] = ()
    """Ranks that take part in triggers and leases, in rank order."""
    with_state: tuple[MemberId, ...] = ()
    """Members that have the committed state, in rank order: named by GEN, or admitted by a GO
    since."""
    benched: frozenset[MemberId] = frozenset()
    """Members that are passive because they did not finish a step in time (R13)."""
    resting: frozenset[MemberId] = frozenset()
    """Active ranks that want no leases: they are evaluating, draining or finished."""
    done: frozenset[MemberId] = frozenset()
    """Active ranks whose training loop has ended."""
    plan: DataPlan = field(default_factory=DataPlan)
    settings: RoundSettings = field(default_factory=RoundSettings)
    request: int = 0
    """Highest request number that a GO has carried (R18)."""
    stopping: bool = False
    """True if a round has decided that the job stops; no leases are dealt any more."""
    stopped_by: MemberId | None = None
    """Lowest rank whose script has ended the job with `pl.stop`; None if none has."""
    stopped: bool = False
    """True if this version is the final one (R17)."""
    slot_0_ended: bool = False
    """True once a script of slot 0 has ended, which writes what the job leaves behind (S14)."""
    started: int = 0
    """Version with which the job's first generation began, 0 or a checkpoint's, plus one for each
    void round since (R32)."""
    deal: Deal = field(default_factory=Deal)
    ledger: Ledger = field(default_factory=Ledger)
    after_void: bool = False
    """True if the last round was void: no rank announces COMING in this one (R32)."""
    after_streamed: bool = False
    """True if the last round was streamed, void or not."""
    owing: frozenset[MemberId] = frozenset()
    """Ranks of a script that computed when its last step was made, so that their gradient of that
    step is late. The next step waits until they have taken the average of that one (S17.3)."""
    step_at: tuple[int, int] | None = None
    """Place and number of the last step of a script; None before the first one."""
    settles: bool = False
    """True once an operation of the script has said that no gradient may be late (S17.5)."""
    after_gen: bool = True
    """True until the first step of a generation, which waits for everybody (S17.5)."""
    heard: dict[MemberId, int] = field(default_factory=dict)
    """Oldest version on which the next batch of each active rank may be computed
    (MaxAgePolicy.WAIT)."""
    accumulated: int = 0
    """Samples that were summed since the optimizer's last step (Pacing.SAMPLES)."""
    accumulated_count: int = 0
    """Number of contributions in them, where several steps of one rank in a round count as one."""
    accumulated_steps: int = 0
    """Number of steps of single ranks in them."""
    updates: int = 0
    """Number of rounds in which the optimizer stepped."""
    updated: deque[int] = field(default_factory=lambda: deque(maxlen=AGES_MAX))
    """The last of these rounds: those that updated the weights."""
    progress: Fraction = Fraction(0)
    """Sum over the rounds of applied over nominal samples. Its whole part is how often the
    scheduler was stepped."""
    steps: Fraction = Fraction(0)
    """Sum over the rounds of the steps of single ranks, applied or dropped, over the active ranks.
    A plan with `steps` ends the job when this reaches them. So as much training is done in every
    mode, and gradients that are dropped do not keep a job from its end."""
    round_us: deque[int] = field(default_factory=lambda: deque(maxlen=WINDOW))
    """Durations of recent rounds, in microseconds."""
    offsets_us: deque[int] = field(default_factory=lambda: deque(maxlen=4 * WINDOW))
    """Arrival offsets of fresh ranks in recent rounds, in microseconds."""
    shadow: ShadowReport = ShadowReport()  # noqa: RUF009 - frozen
    skips: frozenset[int] = frozenset()
    """Leases that the job has given up. A rank that is dealt one drops it untouched (R56)."""
    recent: list[Record] = field(default_factory=list)
    """The last GO, the GENs after it, and those between it and the GO before (R7)."""
    tail: list[tuple[int, str]] = field(default_factory=lambda: [(0, "")])
    """(index, digest) before each record of `recent`, and after the last one."""
    upto: dict[MemberId, int] = field(default_factory=dict)
    """Highest sequence number with which a round has named each member."""
    usual: dict[MemberId, int] = field(default_factory=dict)
    """Predicted number of samples in the next step of a member, where the script feeds itself: that
    of its last listed step, or 1 if none was listed."""
    _read: Composition | None = None
    """Composition of the last GO that was read."""
    _appended: Composition | None = None
    """Composition of the last GO that was appended, void ones excluded."""
    _places: dict[MemberId, int] = field(default_factory=dict)
    _places_of: tuple[MemberId, ...] = ()
    """Value of `active` for which `_places` was made. Both stay the same for many rounds."""

    # ---- what follows from the records ----------------------------------------------------

    @property
    def id(self) -> GenerationId:
        """Id of the last GEN record; NO_GENERATION before the first one."""
        return self.gen.id if self.gen else NO_GENERATION

    @property
    def members(self) -> tuple[MemberId, ...]:
        """Members of the last GEN record, in rank order."""
        return self.gen.members if self.gen else ()

    @property
    def places(self) -> dict[MemberId, int]:
        """Position of each active rank in `active`."""
        if self._places_of is not self.active:
            self._places_of = self.active
            self._places = {m: place for place, m in enumerate(self.active)}
        return self._places

    @property
    def fresh_from(self) -> int:
        """Oldest version on which a fresh gradient of this round may be computed (R36)."""
        return self.version - self.settings.pipeline

    def age(self, version: int) -> int:
        """Return how many updates of the weights a gradient lacks.

        Rounds in which the optimizer makes no step change no weights and do not count.

        Args:
            version: Version on which the gradient was computed.

        Returns:
            Number of updates since then; 0 for the present version.
        """
        updated = self.updated
        if version >= self.version or not updated:
            return 0
        forgotten = max(0, updated[0] - version) if len(updated) == AGES_MAX else 0
        return forgotten + len(updated) - bisect_left(updated, version)

    @property
    def starter(self) -> MemberId:
        """Rank that starts this round where no heads are used; it rotates to avoid a hot spot."""
        return self.active[self.version % len(self.active)]

    @property
    def _is_final(self) -> bool:
        return self.stopping or (self.plan.ends and self.is_worked_off)

    @property
    def is_worked_off(self) -> bool:
        """True if nothing is left to do. In a plan without an end: if all loops have ended."""
        if self.stopped_by is not None:
            return True
        if self.plan.samples:
            return self.deal.exhausted(self.plan)
        if self.plan.steps:
            return self.steps >= self.plan.steps
        return len(self.done) == len(self.active) and self.may_end_with(())

    @property
    def wanted_slots(self) -> int:
        """Number of slots of a script that the owner of the job wants a rank in (S3)."""
        unwanted = self.gen.unwanted if self.gen is not None else 0
        return self.plan.script - (unwanted or 0)

    @property
    def publisher(self) -> MemberId:
        """Rank that writes the results of the job.

        This is the lowest rank that still trains: a rank whose loop has ended may have old weights
        in its model. Once all loops have ended, it is the lowest active rank. A rank that ended the
        job with `pl.stop` comes first: its script reaches the code behind its loop, while the
        scripts of the others may be in the middle of theirs.
        """
        if self.stopped_by in self.members:
            return self.stopped_by
        trains = (m for m in self.active if m not in self.done)
        return next(trains, (self.active or self.members)[0])

    @property
    def is_full_round(self) -> bool:
        """Return True if this round needs all active ranks.

        The mode asks for it (Full, Shadow), or the round is the first one, a warm-up round or one
        of `fullEvery`.
        """
        return self.settings.is_synchronous or self._is_full_in_any_mode

    @property
    def _is_full_in_any_mode(self) -> bool:
        since, every = self.version - self.started, self.settings.full_every
        if self.plan.script:
            if self.settles or self.after_gen or len(self.with_state) != len(self.active):
                return True
            since, every = self.updates, every or SETTLE_EVERY  # calls are no steps (S17.1)
        if since < max(1, self.settings.warmup_rounds):
            return True
        return every > 0 and since % every == 0

    @property
    def is_synchronous(self) -> bool:
        """True if each round is a step of plain synchronous training: Full or a quorum of all."""
        s, active = self.settings, len(self.active)
        by_other_means = s.mode is Mode.DEADLINE or (s.mode is Mode.MAJORITY and s.random_initiator)
        return not by_other_means and quorum_of(s.mode, s, active) == active

    @property
    def waits_for_everybody(self) -> bool:
        """Return True if no round is made while an active rank computes."""
        return self.is_synchronous and not self.settings.pipeline

    @property
    def quorum(self) -> int:
        """Fresh ranks that this round needs, at most the number of active ranks: k(r) of R12."""
        active = len(self.active)
        if self.is_full_round:
            return active
        return quorum_of(self.settings.mode, self.settings, active)

    def _step_samples(self, samples: int, count: int) -> int | Fraction:
        """Return the samples of a step: the plan's, or the mean in a script that feeds itself."""
        if self.plan.samples:
            return self.plan.batch * self.plan.accumulate
        return Fraction(samples, count) if samples not in (0, count) else 1

    @property
    def median_round_us(self) -> int:
        """Median duration of recent rounds in microseconds; 0 if none was measured."""
        return sorted(self.round_us)[len(self.round_us) // 2] if self.round_us else 0

    def held(self, member: MemberId) -> tuple[int, ...]:
        """Return the leases that `member` holds, in the order in which they were dealt."""
        return self.deal.held_by(member)

    def first_leases(self, members: Sequence[MemberId]) -> list[int]:
        """Return the oldest lease of each of `members`, in their order."""
        return self.deal.first_of(members)

    def read(self, go: Go) -> Composition:
        """Return which rank contributes what in `go`.

        Args:
            go: The GO that comes next, or the one appended last.

        Returns:
            The composition of the round, decoded once.

        Raises:
            LogError: If `go` does not fit this log.
        """
        if self._appended is not None and self._appended.go is go:
            return self._appended  # applied now, perhaps with the next one read already
        if self._read is None or self._read.go is not go:
            if self.gen is None or go.round != self.version:
                raise LogError(f"GO of round {go.round} read at version {self.version}")
            try:
                self._read = read(self, go)
            except ValueError as error:
                raise LogError(f"GO of round {go.round}: {error}") from None
        return self._read

    def weigh(self, go: Go) -> Weighing:
        """Return how the contributions of a round become an update.

        Args:
            go: The GO that comes next, or the one appended last.

        Returns:
            Weights and divisor of the round, computed once.
        """
        made = self.read(go)
        if made.weighing is None:
            made.weighing = self._weigh(made)
        return made.weighing

    def _weigh(self, made: Composition) -> Weighing:
        go = made.go
        if self.plan.script:
            return self._weigh_operation(made)
        listed = [s for s in go.listed if s.count]
        samples = sum(made.samples) + sum(s.samples for s in listed)
        units = {s.unit for s in listed}.union(made.units)
        first = self.accumulated == 0
        accumulated = self.accumulated + samples
        count = self.accumulated_count + go.contributing
        steps = made.gradients
        step_samples = self._step_samples(accumulated, self.accumulated_steps + steps)
        nominal = len(self.active) * step_samples
        # A synchronous round is always a step, even if the last one of an epoch has fewer samples.
        synchronous = self.is_synchronous
        by_samples = self.settings.pacing is Pacing.SAMPLES and not synchronous
        # With Pacing.SAMPLES the optimizer steps as soon as the samples so far are nearer to the
        # nominal ones than they would be after another round like this one.
        due = not by_samples or 2 * accumulated + samples >= 2 * nominal
        step = accumulated > 0 and (due or self.stops_with(go))
        # Sums that are kept over several rounds have to be in one unit; a round that steps at
        # once may use the mean of means, which differs in the last bits (D3).
        equal = len(units) == 1 and first and due
        unit = units.pop() if equal else 1
        match self.settings.normalisation:
            case Normalisation.FIXED if not (synchronous or by_samples):
                total = float(nominal)
            case Normalisation.FIXED | Normalisation.APPLIED:
                total = float(accumulated) if accumulated else float(nominal)
            case Normalisation.CONTRIBUTORS:
                total = float(count * step_samples)
        whole = len(self.active) * self._step_samples(samples, steps)
        gain = ONE if samples == whole else Fraction(samples, whole)
        return Weighing(
            contributors=made.contributors,
            unit=unit,
            equal=equal,
            samples=samples,
            first=first,
            step=step,
            divisor=total / unit,
            scheduler_steps=1 if gain is ONE else int(self.progress + gain) - int(self.progress),
            progress=gain,
        )

    def _weigh_operation(self, made: Composition) -> Weighing:
        """Weigh an operation of a script: each rank that takes part has the weight of one (S5).

        A step is divided by the ranks that make it, those that are late with it included. So a
        gradient weighs the same whenever it comes (S17.4).

        Args:
            made: Composition of the round.

        Returns:
            Weights and divisor of the round.
        """
        operation = made.go.operation
        samples = sum(made.samples) + sum(s.samples for s in made.listed if s.count)
        is_step = operation is not None and not operation.is_call
        ranks = len(made.contributors)
        if is_step:
            ranks = len(made.arrivals.fresh) + len(self._computing(made))
        return Weighing(
            contributors=made.contributors,
            unit=1,
            equal=True,
            samples=samples,
            first=True,
            step=is_step,
            divisor=float(max(1, ranks)),
            scheduler_steps=0,
            progress=ONE if is_step else Fraction(0),
        )

    def _computing(self, made: Composition) -> frozenset[MemberId]:
        """Return the ranks of a script that compute the gradient of a step when GO is sent."""
        arrivals = made.arrivals
        return (
            frozenset(self.with_state)
            .intersection(self.active)
            .difference(arrivals.fresh, arrivals.idle)
        )

    def stops_with(self, go: Go) -> bool:
        """Return True if the version that `go` makes is the final one (R17)."""
        if (go.request and go.request.stop) or any(share.stop for share in go.listed):
            return True
        if self.plan.steps:
            return self.steps + self._steps_of(go) >= self.plan.steps
        made = self.read(go)
        if not self.plan.samples:
            more = [s.member for s in go.listed if s.done and s.member not in self.done]
            all_ended = len(self.done) + len(more) == len(self.active) and not go.admitted
            return all_ended and self.may_end_with(more)
        if any(benched.leases for benched in go.benched):
            return False
        gone = len(made.leases) + sum(len(s.leases) for s in go.listed)
        gone += sum(len(drop.leases) for s in go.listed for drop in s.drops)
        return self.deal.exhausted(self.plan, but_for=gone)

    def may_end_with(self, ended: Iterable[MemberId]) -> bool:
        """Return True if a job whose loops have all ended may end: slot 0's script has (S14).

        Args:
            ended: Ranks that report the end of their loops in this round.

        Returns:
            False in a job of a script if slot 0 was lost and no replacement has come to the end.
        """
        return not self.plan.script or self.slot_0_ended or any(map(is_slot_0, ended))

    def _steps_of(self, go: Go) -> Fraction:
        if go.operation is not None and go.operation.is_call:
            return Fraction(0)
        made = self.read(go).gradients + sum(len(share.drops) for share in go.listed)
        return ONE if made == len(self.active) else Fraction(made, len(self.active))

    # ---- appending ------------------------------------------------------------------------

    def append(self, record: Record) -> None:
        """Append the next record.

        Args:
            record: GO of round `version`, or GEN of the next generation.

        Raises:
            LogError: If the record does not fit this log.
        """
        if isinstance(record, Gen):
            self._append_gen(record)
        else:
            self._append_go(record)
        self.index += 1
        self.digest = chain(self.digest, record)
        self.recent.append(record)
        self.tail.append((self.index, self.digest))
        if len(self.recent) > RECENT_MAX:
            raise LogError(f"{RECENT_MAX} records without a round: {record}")
        if not self.stopping:
            self.deal.refill(self.plan, self.places, self.resting)
        self.stopped = self._is_final

    def _append_gen(self, gen: Gen) -> None:
        if gen.version != self.version and self.gen is not None:
            raise LogError(f"GEN of version {gen.version} appended to version {self.version}")
        if list(gen.active) != sorted(gen.active):
            raise LogError(f"the active ranks of {gen} are not in rank order")
        if gen.plan is not None:
            self.plan, self.version, self.started = gen.plan, gen.version, gen.version
            self.stopping, self.done, self.resting, self.heard = False, frozenset(), frozenset(), {}
            self.stopped_by, self.slot_0_ended = None, False
            self.owing, self.step_at, self.settles = frozenset(), None, False
            self.upto, self.usual = {}, {}
            self.updated.clear()
            self.ledger.contributions_before = self.ledger.contributions
        if gen.settings is not None:
            self.settings = gen.settings
        self.skips = self.skips.union(gen.skips or ())
        self.gen = gen
        self.after_gen = True
        self.active, self.with_state = gen.active, gen.with_state
        members, active = frozenset(gen.members), frozenset(gen.active)
        self.benched &= members - active
        self.resting &= active
        self.done &= active
        self.owing &= active
        self.heard = {m: self.heard.get(m, self.version) for m in gen.active}
        self.upto = {m: seq for m, seq in self.upto.items() if m in members}
        self.usual = {m: samples for m, samples in self.usual.items() if m in members}
        self.deal.lookahead = dict(gen.lookahead)
        self.deal.enlist(gen.active)
        keep = frozenset() if gen.plan else active  # ids of an earlier run may be used again
        for member in self.deal.holders():
            if member not in keep:
                self.ledger.redealt(member, self._samples(self.deal.take_back(member)))
        self.ledger.retire_all_but(frozenset() if gen.plan else members)
        if self._read is not None and self._read.go.round == self.version:
            self._read = None  # that GO was not appended, and the leases have changed

    def _append_go(self, go: Go) -> None:
        if self.gen is None or go.round != self.version:
            raise LogError(f"GO of round {go.round} appended to version {self.version}")
        if self.stopped:
            raise LogError(f"GO of round {go.round} after the stop round")
        if not self.active:
            raise LogError("GO without an active rank")
        self.after_void, self.after_streamed = go.void, go.streamed
        if go.void:
            self._append_void()
            return
        made, weighing, steps = self.read(go), self.weigh(go), self._steps_of(go)
        if self.settings.mode is Mode.SHADOW:
            conditions = (self.settings, len(self.active), self.median_round_us, self.offsets_us)
            full = self._is_full_in_any_mode
            self.shadow = follow(self.shadow, made, *conditions, full_anyhow=full)
        # A round ends the job, never a GEN, so that the last round applies what was accumulated.
        self.stopping = self.stopping or (not self.plan.ends and self.stops_with(go))
        self.stopped_by = min([s.member for s in go.listed if s.stop], default=None)
        self.stopping = self.stopping or self.stopped_by is not None
        self._append_usual(made)
        if go.listed:
            self._append_listed(go)
        if go.operation is not None and not go.operation.is_call:
            self.owing, self.step_at = self._computing(made), go.operation.spot
            self.settles, self.after_gen = self.settles or go.operation.settles, False
        if self.plan.script and len(self.with_state) != len(self.active):
            # A rank that was admitted without a state takes part once it has it (S3).
            named = {*self.with_state, *made.ordinary, *(s.member for s in go.listed)}
            self.with_state = tuple(sorted(named))
        if go.admitted or go.benched:
            self._change_active(go)
        if go.request:
            if go.request.number <= self.request:
                raise LogError(f"request {go.request.number} written after {self.request}")
            self.request = go.request.number
            self.settings = go.request.settings or self.settings
            self.stopping = self.stopping or go.request.stop
        self._account(made, weighing)
        self._appended = made
        self.steps += steps
        self._forget_before_last_go()

    def _append_void(self) -> None:
        """Append a void round, in which the weights stay (R32).

        The same weights have one more version number, so stored versions are raised by one. Ages,
        warm-up and `fullEvery` do not count the round. A gradient that was computed on this version
        is fresh on the next one.
        """
        self.version += 1
        self.started += 1
        self.heard = {m: version + 1 for m, version in self.heard.items()}
        self.updated = deque((x + 1 for x in self.updated), maxlen=AGES_MAX)
        self.ledger.round(Trigger.VOID, streamed=False)
        self._forget_before_last_go()

    def _change_active(self, go: Go) -> None:
        active = set(self.active)
        for benched in go.benched:
            if benched.member not in active:
                raise LogError(f"{benched.member} is benched but not active")
            active.discard(benched.member)
            back = self.deal.take_back(benched.member, benched.leases)
            self.ledger.redealt(benched.member, self._samples(back))
        active.update(go.admitted)
        self.benched = (self.benched | {b.member for b in go.benched}) - set(go.admitted)
        if not active:
            raise LogError("the last active rank was benched")
        self.active = tuple(sorted(active))
        if not self.plan.script:
            self.with_state = tuple(sorted({*self.with_state, *go.admitted}))
        self.resting &= active
        self.done &= active
        for member in go.admitted:
            self.heard[member] = go.round + 1
        self.heard = {m: r for m, r in self.heard.items() if m in active}
        self.deal.enlist(go.admitted)

    def _forget_before_last_go(self) -> None:
        for at, record in enumerate(self.recent):
            if isinstance(record, Go):
                del self.recent[: at + 1], self.tail[: at + 1]
                return

    def _append_usual(self, made: Composition) -> None:
        """Count the shares that GO names by a bit only."""
        ordinary = made.ordinary
        if made.leases:
            self.deal.remove_first_of(ordinary)
        is_call = made.go.operation is not None and made.go.operation.is_call
        self.ledger.applied_ordinary(made, self.plan, is_call=is_call)
        if self.resting:
            self.resting = self.resting.difference(ordinary)
        if self.done:
            self.done = self.done.difference(ordinary)
        self.heard.update(dict.fromkeys(ordinary, self.fresh_from + 1))
        self.upto.update(zip(ordinary, made.upto, strict=True))
        quiet = [share.member for share in made.quiet]
        self.ledger.applied_quiet(quiet)
        for member in quiet:
            self.heard[member] = max(self.version, self.heard[member])

    def _append_listed(self, go: Go) -> None:
        places, listed = self.places, go.listed
        is_call = go.operation is not None and go.operation.is_call
        for share in listed:
            if share.member not in places:
                raise LogError(f"{share.member} is named in round {self.version} but not active")
            self._append_share(share, is_call=is_call)
        rests = {share.member for share in listed if share.resting}
        done = {share.member for share in listed if share.done}
        if rests or self.resting:
            self.resting = self.resting.difference(s.member for s in listed) | rests
        if done or self.done:
            self.done = self.done.difference(s.member for s in listed) | done
            self.slot_0_ended = self.slot_0_ended or any(map(is_slot_0, done))

    def _append_share(self, share: Share, *, is_call: bool) -> None:
        member = share.member
        for lease in share.leases:
            self.deal.remove(member, lease)
        for drop in share.drops:
            for lease in drop.leases:
                self.deal.remove(member, lease)
        self.deal.give_back(member, share.returned)
        self.ledger.applied(share, self.fresh_from, self.plan, is_call=is_call)
        # An idle rank may come back from evaluating before this round is committed.
        other = self.version if share.idle else share.base
        base = self.fresh_from + 1 if share.fresh else other
        self.heard[member] = max(base, self.heard[member])
        if share.upto > self.upto.get(member, 0):
            self.upto[member] = share.upto
        one = share.count == 1 and not self.plan.samples and not is_call
        if one and share.samples != self.usual.get(member, 1):
            self.usual[member] = share.samples

    def _account(self, made: Composition, weighing: Weighing) -> None:
        go = made.go
        self.progress += weighing.progress
        if self.plan.script and weighing.step:
            # The divisor counts the ranks that make the step, also those that are late with it.
            absent = self.plan.script - int(weighing.divisor) - len(self.done)
            self.ledger.absent(round(weighing.samples * absent / max(1, made.gradients)))
        if weighing.step:
            self.accumulated = self.accumulated_count = self.accumulated_steps = 0
            self.updates += 1
            self.updated.append(self.version)
        else:
            self.accumulated += weighing.samples
            self.accumulated_count += len(weighing.contributors)
            self.accumulated_steps += made.gradients
        self.ledger.round(go.trigger, streamed=go.streamed)
        if go.before_us:
            self.round_us.append(go.before_us)
        if not go.streamed:
            self.round_us.append(go.round_us)
            # Keep a part of a large round, spread over all ranks, and other ranks in the next one.
            fresh_us = made.arrivals.fresh_us
            step = max(1, -(-len(fresh_us) // OFFSETS_MAX))
            self.offsets_us.extend(fresh_us[self.version % step :: step])
        self.version += 1

    def _samples(self, leases: tuple[int, ...]) -> int:
        return sum(samples_of(self.plan, lease) for lease in leases)

    # ---- copies ---------------------------------------------------------------------------

    def missing_after(self, index: int, digest: str) -> tuple[Record, ...]:
        """Return the records that a shorter log lacks (R7).

        Args:
            index: Number of records of that log.
            digest: Digest of that log.

        Returns:
            The records from there to the end of this log.

        Raises:
            LogError: If that log is not a prefix of this one, or is too far behind.
        """
        if (index, digest) not in self.tail:
            raise LogError(f"a log that ends at {index} ({digest}) is not a prefix of this one")
        return tuple(self.recent[self.tail.index((index, digest)) :])

    def snapshot(self) -> LogSnapshot:
        """Return the log as plain data, for joiners and checkpoints; it must have a GEN record."""
        assert self.gen is not None
        return LogSnapshot(
            index=self.index,
            digest=self.digest,
            version=self.version,
            gen=self.gen,
            active=self.active,
            with_state=self.with_state,
            benched=tuple(sorted(self.benched)),
            resting=tuple(sorted(self.resting)),
            done=tuple(sorted(self.done)),
            plan=self.plan,
            settings=self.settings,
            request=self.request,
            stopping=self.stopping,
            stopped_by=self.stopped_by,
            slot_0_ended=self.slot_0_ended,
            started=self.started,
            next_lease=self.deal.next,
            pool=tuple(sorted(self.deal.pool)),
            held=self.deal.all_held(),
            lookahead=tuple(sorted(self.deal.lookahead.items())),
            after_void=self.after_void,
            after_streamed=self.after_streamed,
            owing=tuple(sorted(self.owing)),
            step_at=self.step_at,
            settles=self.settles,
            after_gen=self.after_gen,
            heard=tuple(sorted(self.heard.items())),
            upto=tuple(sorted(self.upto.items())),
            usual=tuple(sorted(self.usual.items())),
            accumulated=self.accumulated,
            accumulated_count=self.accumulated_count,
            accumulated_steps=self.accumulated_steps,
            updates=self.updates,
            updated=tuple(self.updated),
            progress=(self.progress.numerator, self.progress.denominator),
            steps=(self.steps.numerator, self.steps.denominator),
            round_us=tuple(self.round_us),
            offsets_us=tuple(self.offsets_us),
            shadow=self.shadow,
            ledger=self.ledger.snapshot(),
            skips=tuple(sorted(self.skips)),
        )

    @classmethod
    def restore(cls, s: LogSnapshot) -> Log:
        """Return a log with the content of a snapshot, without the records that led to it."""
        log = cls(
            index=s.index,
            digest=s.digest,
            version=s.version,
            gen=s.gen,
            active=s.active,
            with_state=s.with_state,
            benched=frozenset(s.benched),
            resting=frozenset(s.resting),
            done=frozenset(s.done),
            plan=s.plan,
            settings=s.settings,
            request=s.request,
            stopping=s.stopping,
            stopped_by=s.stopped_by,
            slot_0_ended=s.slot_0_ended,
            started=s.started,
            deal=Deal(
                next=s.next_lease,
                pool=list(s.pool),
                held={m: list(leases) for m, leases in s.held},
                lookahead=dict(s.lookahead),
            ),
            ledger=Ledger.restore(s.ledger),
            after_void=s.after_void,
            after_streamed=s.after_streamed,
            owing=frozenset(s.owing),
            step_at=s.step_at,
            settles=s.settles,
            after_gen=s.after_gen,
            heard=dict(s.heard),
            upto=dict(s.upto),
            usual=dict(s.usual),
            accumulated=s.accumulated,
            accumulated_count=s.accumulated_count,
            accumulated_steps=s.accumulated_steps,
            updates=s.updates,
            updated=deque(s.updated, maxlen=AGES_MAX),
            progress=Fraction(*s.progress),
            steps=Fraction(*s.steps),
            shadow=s.shadow,
            skips=frozenset(s.skips),
            tail=[(s.index, s.digest)],
        )
        log.deal.enlist(log.active)
        log.round_us.extend(s.round_us)
        log.offsets_us.extend(s.offsets_us)
        log.stopped = log._is_final
        return log
