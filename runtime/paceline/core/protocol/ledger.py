"""Accounts of every sample, counted from the log (I1, I2, R9).

produced = applied + pending + dropped + lost. The ledger counts what the log shows, per rank and in
total: applied and dropped samples, and as parts of the applied ones those that were late or
discounted. `pending` and `lost` are known only to the rank itself (`core.protocol.pending`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace
from paceline_api.ids import MemberId

from paceline.core.protocol.composition import Composition
from paceline.core.protocol.records import DataPlan, DropReason, LoggedMetric, Share, Trigger
from paceline.core.protocol.sampling import epoch_of, leases_per_epoch, samples_of
from paceline.core.protocol.snapshot import EpochCount, LedgerSnapshot, Totals


@dataclass(slots=True)
class Ledger:
    """Running totals of the samples, rounds, epochs and user metrics of a log."""

    by_member: dict[MemberId, Totals] = field(default_factory=dict)
    """Totals of each member of the present generation."""
    departed: Totals = field(default_factory=Totals)
    """Totals of all departed members together."""
    dropped: dict[DropReason, int] = field(default_factory=dict)
    """Dropped samples, by reason."""
    open_epochs: dict[int, EpochCount] = field(default_factory=dict)
    """Epochs that have begun and still have leases that are not gone, by number."""
    epochs_exact: int = 0
    """Number of finished epochs in which each sample was applied exactly once."""
    epochs_short: int = 0
    """Number of finished epochs in which some samples were dropped."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Sum and weight of each user metric over the contributions committed so far (D11)."""
    before_epoch: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Copy of `metrics` from the moment when the last epoch was finished."""
    last_epoch: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Sum and weight of each user metric in the last finished epoch: in the rounds after the one
    that finished the epoch before it."""
    rounds: dict[Trigger, int] = field(default_factory=dict)
    """Number of committed rounds, by trigger."""
    streamed: int = 0
    """Number of committed rounds that were reduced while backward() ran."""
    contributions: int = 0
    """Number of optimizer steps of single ranks that were applied."""
    contributions_before: int = 0
    """Part of `contributions` that was applied before the job was last started or resumed."""
    samples: int = 0
    """Applied samples of all ranks."""
    _epoch_ends: bool = False
    """True if the round that is being counted finishes an epoch."""

    def applied(
        self, share: Share, fresh_from: int, plan: DataPlan, *, is_call: bool = False
    ) -> None:
        """Count a share that GO lists.

        Args:
            share: What one rank had in the round.
            fresh_from: Oldest version on which a gradient of the round counts as fresh.
            plan: What is dealt.
            is_call: True if the round was a call of the script, which is no contribution.
        """
        self.contributions += 0 if is_call else share.count
        dropped = sum(drop.samples for drop in share.drops)
        late = share.samples if share.count and not share.fresh else 0
        if share.fresh and share.oldest < fresh_from:
            # A fresh batch was merged with older ones; only its own lease, the last, is not late.
            alike = share.samples // share.count if plan.script and share.count else 1
            newest = samples_of(plan, share.leases[-1]) if share.leases else alike
            late = share.samples - newest
        totals = self._of(share.member)
        totals.applied += share.samples
        totals.late += late
        totals.dropped += dropped
        totals.discounted += share.samples * (1.0 - share.discount)
        totals.rounds += bool(share.count) and not is_call
        self.samples += share.samples
        for drop in share.drops:
            self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + drop.samples
            self._count(plan, drop.leases, applied=False)
        self._count(plan, share.leases, applied=True)
        self._add_metrics(share.metrics)

    def applied_ordinary(self, made: Composition, plan: DataPlan, *, is_call: bool = False) -> None:
        """Count one fresh contribution of each ordinary rank of a round, unless it was a call."""
        if is_call:
            self.applied_quiet(made.ordinary)
            self._add_metrics(made.go.metrics)
            return
        by_member = self.by_member
        for member, samples in zip(made.ordinary, made.samples, strict=True):
            totals = by_member.get(member)
            if totals is None:
                totals = by_member[member] = Totals()
            totals.applied += samples
            totals.rounds += 1
        self.contributions += len(made.ordinary)
        self.samples += sum(made.samples)
        self._add_metrics(made.go.metrics)
        if made.leases:
            per_epoch = leases_per_epoch(plan)
            if min(made.leases) // per_epoch == max(made.leases) // per_epoch:
                epoch = made.leases[0] // per_epoch
                self._count_in(plan, epoch, len(made.leases), applied=sum(made.samples))
            else:
                self._count(plan, made.leases, applied=True)

    def applied_quiet(self, members: Iterable[MemberId]) -> None:
        """Create an account for each rank that was idle and had nothing to count."""
        for member in members:
            self._of(member)

    def _of(self, member: MemberId) -> Totals:
        return self.by_member.setdefault(member, Totals())

    def _add_metrics(self, metrics: tuple[LoggedMetric, ...]) -> None:
        for metric in metrics:
            total, weight = self.metrics.get(metric.name, (0.0, 0.0))
            self.metrics[metric.name] = (total + metric.total, weight + metric.weight)

    def _count(self, plan: DataPlan, leases: Iterable[int], *, applied: bool) -> None:
        for lease in leases:
            epoch, samples = epoch_of(plan, lease), samples_of(plan, lease)
            if applied:
                self._count_in(plan, epoch, 1, applied=samples)
            else:
                self._count_in(plan, epoch, 1, dropped=samples)

    def _count_in(
        self, plan: DataPlan, epoch: int, leases: int, *, applied: int = 0, dropped: int = 0
    ) -> None:
        old = self.open_epochs.get(epoch, EpochCount(epoch))
        new = EpochCount(
            epoch,
            leases=old.leases + leases,
            applied=old.applied + applied,
            dropped=old.dropped + dropped,
        )
        self.open_epochs[epoch] = new
        if new.leases == leases_per_epoch(plan):
            del self.open_epochs[epoch]
            self.epochs_exact += not new.dropped
            self.epochs_short += bool(new.dropped)
            self._epoch_ends = True

    def round(self, trigger: Trigger, *, streamed: bool) -> None:
        """Count a round after its shares, and finish the epochs that end with it."""
        self.streamed += streamed
        self.rounds[trigger] = self.rounds.get(trigger, 0) + 1
        if self._epoch_ends:
            self._epoch_ends = False
            self.last_epoch = since(self.metrics, self.before_epoch)
            self.before_epoch = dict(self.metrics)

    def absent(self, samples: int) -> None:
        """Count samples of slots that had no rank in a step: as many for each as the others had."""
        if samples > 0:
            reason = DropReason.ABSENT
            self.dropped[reason] = self.dropped.get(reason, 0) + samples

    def redealt(self, member: MemberId, samples: int) -> None:
        """Count samples of leases that were taken from `member` to be dealt again."""
        self._of(member).redealt += samples

    def retire_all_but(self, members: Collection[MemberId]) -> None:
        """Fold the totals of departed members into one, so that the ledger stays bounded."""
        for member in [m for m in self.by_member if m not in members]:
            self.departed = add(self.departed, self.by_member.pop(member))

    def counted(self, member: MemberId) -> int:
        """Return how many samples of this rank the log has applied or dropped."""
        totals = self.by_member.get(member, Totals())
        return totals.applied + totals.dropped

    def total(self) -> Totals:
        """Return the totals of all ranks together, departed ones included."""
        total = self.departed
        for each in self.by_member.values():
            total = add(total, each)
        return total

    def snapshot(self) -> LedgerSnapshot:
        """Return the ledger as plain data, independent of later changes."""
        return LedgerSnapshot(
            by_member=tuple((m, replace(self.by_member[m])) for m in sorted(self.by_member)),
            departed=self.departed,
            dropped=tuple(sorted(self.dropped.items())),
            open_epochs=tuple(self.open_epochs[e] for e in sorted(self.open_epochs)),
            epochs_exact=self.epochs_exact,
            epochs_short=self.epochs_short,
            metrics=_rows(self.metrics),
            before_epoch=_rows(self.before_epoch),
            last_epoch=_rows(self.last_epoch),
            rounds=tuple(sorted(self.rounds.items())),
            streamed=self.streamed,
            contributions=self.contributions,
            contributions_before=self.contributions_before,
        )

    @classmethod
    def restore(cls, s: LedgerSnapshot) -> Ledger:
        """Return a ledger with the content of a snapshot."""
        ledger = cls(
            by_member={m: replace(totals) for m, totals in s.by_member},
            departed=s.departed,
            dropped=dict(s.dropped),
            open_epochs={e.epoch: e for e in s.open_epochs},
            epochs_exact=s.epochs_exact,
            epochs_short=s.epochs_short,
            metrics=_sums(s.metrics),
            before_epoch=_sums(s.before_epoch),
            last_epoch=_sums(s.last_epoch),
            rounds=dict(s.rounds),
            streamed=s.streamed,
            contributions=s.contributions,
            contributions_before=s.contributions_before,
        )
        ledger.samples = ledger.total().applied
        return ledger


def since(
    now: Mapping[str, tuple[float, float]], before: Mapping[str, tuple[float, float]]
) -> dict[str, tuple[float, float]]:
    """Return by how much (sum, weight) of each metric grew, where its weight has changed."""
    differences = {}
    for name, (total, weight) in now.items():
        old_total, old_weight = before.get(name, (0.0, 0.0))
        if weight != old_weight:
            differences[name] = total - old_total, weight - old_weight
    return differences


def _rows(figures: Mapping[str, tuple[float, float]]) -> tuple[tuple[str, float, float], ...]:
    return tuple((name, *pair) for name, pair in sorted(figures.items()))


def _sums(rows: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    return {name: (total, weight) for name, total, weight in rows}


def add(a: Totals, b: Totals) -> Totals:
    """Return the sum of two totals, field by field."""
    return Totals(
        applied=a.applied + b.applied,
        late=a.late + b.late,
        dropped=a.dropped + b.dropped,
        discounted=a.discounted + b.discounted,
        redealt=a.redealt + b.redealt,
        rounds=a.rounds + b.rounds,
    )
