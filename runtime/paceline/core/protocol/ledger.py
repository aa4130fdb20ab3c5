"""Where every sample went, counted from the log (I1, I2, R9).

produced = applied + pending + dropped + discounted + lost. What the log can see is counted here,
per rank and in total; `pending` and what a rank lost with its own death are the rank's to count.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.protocol.ids import MemberId
from paceline.core.protocol.records import DataPlan, DropReason, Share, Trigger
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
    rounds: dict[Trigger, int] = field(default_factory=dict)
    """Rounds committed, by why they started."""
    contributions: int = 0
    """Optimizer steps of single ranks that were applied."""

    def applied(self, share: Share, version: int, plan: DataPlan) -> None:
        self.contributions += share.count
        old = self.by_member.get(share.member, Totals())
        dropped = sum(drop.samples for drop in share.drops)
        late = share.samples if share.count and not share.fresh else 0
        if share.fresh and share.oldest < version:
            # The fresh batch rides with older ones; only the newest lease is of this version.
            newest = samples_of(plan, share.leases[-1]) if share.leases else 1
            late = share.samples - newest
        self.by_member[share.member] = Totals(
            applied=old.applied + share.samples,
            late=old.late + late,
            dropped=old.dropped + dropped,
            discounted=old.discounted + share.samples * (1.0 - share.discount),
            redealt=old.redealt,
            rounds=old.rounds + bool(share.count),
        )
        for drop in share.drops:
            self.dropped[drop.reason] = self.dropped.get(drop.reason, 0) + drop.samples
            self._count(plan, drop.leases, applied=False)
        self._count(plan, share.leases, applied=True)
        for metric in share.metrics:
            total, weight = self.metrics.get(metric.name, (0.0, 0.0))
            self.metrics[metric.name] = (total + metric.total, weight + metric.weight)

    def _count(self, plan: DataPlan, leases: tuple[int, ...], *, applied: bool) -> None:
        for lease in leases:
            epoch, samples = epoch_of(plan, lease), samples_of(plan, lease)
            old = self.open_epochs.get(epoch, EpochCount(epoch))
            new = EpochCount(
                epoch,
                leases=old.leases + 1,
                applied=old.applied + (samples if applied else 0),
                dropped=old.dropped + (0 if applied else samples),
            )
            self.open_epochs[epoch] = new
            if new.leases == leases_per_epoch(plan):
                del self.open_epochs[epoch]
                self.epochs_exact += not new.dropped
                self.epochs_short += bool(new.dropped)

    def round(self, trigger: Trigger) -> None:
        self.rounds[trigger] = self.rounds.get(trigger, 0) + 1

    def redealt(self, member: MemberId, samples: int) -> None:
        old = self.by_member.get(member, Totals())
        self.by_member[member] = Totals(
            old.applied, old.late, old.dropped, old.discounted, old.redealt + samples, old.rounds
        )

    def retire_all_but(self, members: tuple[MemberId, ...]) -> None:
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
            by_member=tuple(sorted(self.by_member.items())),
            departed=self.departed,
            dropped=tuple(sorted(self.dropped.items())),
            open_epochs=tuple(self.open_epochs[e] for e in sorted(self.open_epochs)),
            epochs_exact=self.epochs_exact,
            epochs_short=self.epochs_short,
            metrics=tuple((name, *pair) for name, pair in sorted(self.metrics.items())),
            rounds=tuple(sorted(self.rounds.items())),
            contributions=self.contributions,
        )

    @classmethod
    def restore(cls, s: LedgerSnapshot) -> Ledger:
        return cls(
            by_member=dict(s.by_member),
            departed=s.departed,
            dropped=dict(s.dropped),
            open_epochs={e.epoch: e for e in s.open_epochs},
            epochs_exact=s.epochs_exact,
            epochs_short=s.epochs_short,
            metrics={name: (total, weight) for name, total, weight in s.metrics},
            rounds=dict(s.rounds),
            contributions=s.contributions,
        )


def add(a: Totals, b: Totals) -> Totals:
    return Totals(
        applied=a.applied + b.applied,
        late=a.late + b.late,
        dropped=a.dropped + b.dropped,
        discounted=a.discounted + b.discounted,
        redealt=a.redealt + b.redealt,
        rounds=a.rounds + b.rounds,
    )
