"""The summary at the end of a run, as lines of text. Pure: it only reads what was collected."""

from __future__ import annotations

from paceline.core.status import Change, Outcome, Status, place_of
from paceline.local.timeline import Timeline


def summary(status: Status | None, timeline: Timeline) -> list[str]:
    """Empty if no round was ever made."""
    if status is None or not status.version:
        return []
    log = status.log
    rows = [
        ("rounds", f"{status.version:,} in {timeline.seconds:.1f} s"),
        ("rounds/s", f"{timeline.rounds_per_s:.1f}"),
        ("applied gradients/s", f"{timeline.gradients_per_s:.1f}"),
        ("optimizer steps", f"{log.updates:,}"),
        ("rounds started by", _counts(log.rounds)),
        ("samples applied", f"{log.samples_applied:,}, of these {log.samples_late:,} late"),
        ("samples dropped", _counts(log.samples_dropped)),
        ("samples dealt again", f"{log.samples_redealt:,}"),
        ("epochs", _epochs(log.epochs_exact, log.epochs_short)),
        ("waiting avoided", f"{log.avoided_s:.1f} s, summed over ranks"),
        ("share of rounds", _shares(status)),
    ]
    rows += [(name, f"{value:g}") for name, value in sorted(log.metrics.items())]
    lines = [f"  {name:<20} {text}" for name, text in rows if text]
    changes = [timeline.changes[key] for key in sorted(timeline.changes)]
    lines.append("  membership changes")
    lines += [f"    {_change(change)}" for change in changes]
    return lines


def verdict(job: str, outcome: Outcome, *, interrupted: bool) -> str:
    """Also a job that was stopped in order has released its ranks, but it is not complete."""
    if outcome.complete:
        return f"job {job}: stopped by the user" if interrupted else f"job {job}: Complete"
    return f"job {job}: Failed ({outcome.reason})"


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items()) if n) or "0"


def _epochs(exact: int, short: int) -> str:
    if not exact and not short:
        return ""
    text = f"{exact} with each sample applied exactly once"
    return f"{text}, {short} with dropped samples" if short else text


def _shares(status: Status) -> str:
    ranks = sorted(status.ranks, key=lambda rank: rank.member)
    known = ((r, status.log.shares.get(str(r.member))) for r in ranks)
    return ", ".join(
        f"rank {place_of(rank.member, status.procs)} {share:.0%}"
        for rank, share in known
        if share is not None
    )


def _change(change: Change) -> str:
    costs = [f"agreed after {change.agree_s:.2f} s"]
    costs.append(
        "never started" if change.start_s is None else f"all started after {change.start_s:.2f} s"
    )
    if change.gap_s is not None:
        costs.append(f"longest gap between rounds {change.gap_s:.2f} s")
    number = f"{change.generation.incarnation}.{change.generation.counter}"
    return f"{number:<5} round {change.version:<6} {change.why} ({'; '.join(costs)})"
