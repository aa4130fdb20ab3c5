"""Where every sample went, counted from the log (I1, I2, R9).

produced = applied + pending + dropped + discounted + lost. What the log can see is counted here,
per rank and in total; `pending` and what a rank lost with its own death are the rank's to count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from msgspec.structs import replace

from paceline.core.protocol.composition import Composition
from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.records import DataPlan, DropReason, LoggedMetric, Share, Trigger
from paceline.core.protocol.sampling import epoch_of, leases_per_epoch, samples_of
from paceline.core.protocol.snapshot import EpochCount, LedgerSnapshot, Totals


@dataclass(slots=True)
class Ledger:
    by_member: dict[MemberId, Totals] = field(default_factory=dict)
    departed: Totals = field(default_factory=Totals)
    dropped: dict[DropReason, int] = field(default_factory=dict)
    open_epochs: dict[int, EpochCount] = field(default_factory=dict)
    epochs_exact: int = 0
    """Finished epochs of which each sample was applied exactly once."""
    epochs_short: int = 0
    """Finished epochs of which some samples were dropped."""
    metrics: dict[str, tuple[float, float]] = field(default_factory=dict)
    """User's figures: (sum, weight) over the contributions committed so far (D11)."""
    before_epoch: dict[str, tuple[float, float]] = field(default_factory=dict)
    """`metrics` as they were when the last epoch was finished."""
    last_epoch: dict[str, tuple[float, float]] = field(default_factory=dict)
    """The same of the last finished epoch alone: of the rounds since the one before was finished.
    """
    rounds: dict[Trigger, int] = field(default_factory=dict)
    """Rounds committed, by why they started."""
    streamed: int = 0
    """Those of them that were reduced while backward() ran."""
    contributions: int = 0
    """Optimizer steps of single ranks that were applied."""
    contributions_before: int = 0
    """Those of them that were applied before the job was started or resumed the last time."""
    samples: int = 0
    """That were applied, of all ranks."""
    _epoch_ends: bool = False
    """An epoch is finished with the round that is being counted."""

    def applied(self, share: Share, fresh_from: int, plan: DataPlan) -> None:
        self.contributions += share.count
        dropped = sum(drop.samples for drop in share.drops)
        late = share.samples if share.count and not share.fresh else 0
        if share.fresh and share.oldest < fresh_from:
            # The fresh batch rides with older ones; only the newest lease is not late.
            newest = samples_of(plan, share.leases[-1]) if share.leases else 1
            late = share.samples - newest
        totals = self._of(share.member)
        totals.applied += share.samples
        totals.late += late
        totals.dropped += dropped
        totals.discounted += share.samples * (1.0 - share.discount)
        totals.rounds += bool(share.count)
        self.samples += share.samples
        for drop in share.drops:
            self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + drop.samples
            self._count(plan, drop.leases, applied=False)
        self._count(plan, share.leases, applied=True)
        self._add_metrics(share.metrics)

    def applied_ordinary(self, made: Composition, plan: DataPlan) -> None:
        """One fresh contribution of each of the ordinary ranks."""
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
        """They were there, and had nothing."""
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
        """Count a round, with which epochs may have been finished."""
        self.streamed += streamed
        self.rounds[trigger] = self.rounds.get(trigger, 0) + 1
        if self._epoch_ends:
            self._epoch_ends = False
            self.last_epoch = since(self.metrics, self.before_epoch)
            self.before_epoch = dict(self.metrics)

    def redealt(self, member: MemberId, samples: int) -> None:
        self._of(member).redealt += samples

    def retire_all_but(self, members: Collection[MemberId]) -> None:
        """Fold the counters of the departed into one, so that the ledger stays bounded."""
        for member in [m for m in self.by_member if m not in members]:
            self.departed = add(self.departed, self.by_member.pop(member))

    def counted(self, member: MemberId) -> int:
        """Samples of this rank that the log has applied or dropped."""
        totals = self.by_member.get(member, Totals())
        return totals.applied + totals.dropped

    def total(self) -> Totals:
        total = self.departed
        for each in self.by_member.values():
            total = add(total, each)
        return total

    def snapshot(self) -> LedgerSnapshot:
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
    """Return what has come to the (sum, weight) of each figure; nothing of those that stayed."""
    found = {}
    for name, (total, weight) in now.items():
        old_total, old_weight = before.get(name, (0.0, 0.0))
        if weight != old_weight:
            found[name] = total - old_total, weight - old_weight
    return found


def _rows(figures: Mapping[str, tuple[float, float]]) -> tuple[tuple[str, float, float], ...]:
    return tuple((name, *pair) for name, pair in sorted(figures.items()))


def _sums(rows: Iterable[tuple[str, float, float]]) -> dict[str, tuple[float, float]]:
    return {name: (total, weight) for name, total, weight in rows}


def add(a: Totals, b: Totals) -> Totals:
    return Totals(
        applied=a.applied + b.applied,
        late=a.late + b.late,
        dropped=a.dropped + b.dropped,
        discounted=a.discounted + b.discounted,
        redealt=a.redealt + b.redealt,
        rounds=a.rounds + b.rounds,
    )
