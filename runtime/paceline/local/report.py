"""Summary at the end of a run, as lines of text. Pure: it only reads what was collected."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from paceline_api.status import (
    LogStatus,
    MembershipChange,
    Outcome,
    ShadowStatus,
    Status,
    StragglerStatus,
    as_number,
    place_of,
)
from paceline_api.types.enums import StragglerResponse

from paceline.core.protocol.records import DropReason, GivenUp, Trigger
from paceline.core.status import METRIC_ROUNDS, Fact
from paceline.local.timeline import Timeline

WARNED: Final = {
    DropReason.SKIPPED: "were taken from the loader and no step was made of them: look for a "
    "continue, a break or a second loop over the loader in the script",
    DropReason.FAILED: "were given up: the script failed twice with their batch "
    "(spec.failurePolicy.maxSkippedBatches); SCRIPT FAILED below has the exception",
    DropReason.ABSENT: "were not trained: no rank took part in their slot, which was lost or "
    "scaled away",
}
"""Reasons for dropped samples that the user is warned of, and what happened to the samples."""


def summary(status: Status | None, timeline: Timeline) -> list[str]:
    """Return the lines of the summary; none if the job made no round.

    Args:
        status: The last status of the run, if there was one.
        timeline: What the runner has recorded of the run.

    Returns:
        Lines of text, indented for the terminal.
    """
    if status is None or not status.version:
        return []
    log = status.log
    rows = [
        ("rounds", _rounds(status, timeline)),
        ("rounds/s", f"{timeline.rounds_per_s:.1f}"),
        ("applied gradients/s", f"{timeline.gradients_per_s:.1f}"),
        ("optimizer steps", f"{log.updates:,}"),
        ("rounds started by", _counts(log.rounds)),
        ("streamed", _streamed(status)),
        (
            "pipeline",
            "reductions ran beside the next batch" if status.round_settings.pipeline else "",
        ),
        ("samples applied", _applied(log)),
        ("samples dropped", _counts(log.samples_dropped)),
        *(
            ("WARNING", f"{count:,} samples {text}")
            for reason, text in WARNED.items()
            if (count := log.samples_dropped.get(reason, 0))
        ),
        ("samples dealt again", f"{log.samples_redealt:,}"),
        *(("SCRIPT FAILED", str(failed)) for failed in status.script_failures),
        ("epochs", _epochs(log)),
        ("waiting avoided", f"{log.avoided_s or 0.0:.1f} s, summed over ranks"),
        ("share of rounds", _shares(status)),
        ("checkpoints", _checkpoints(status)),
        ("WARNING", _unsaved(status)),
    ]
    rows += [(name, _figure(log, name)) for name in sorted({**log.metrics, **log.metrics_of_epoch})]
    lines = [f"  {name:<20} {text}" for name, text in rows if text]
    if log.shadow is not None:
        lines += _shadow(log.shadow)
    if timeline.stragglers:
        now = {slow.member for slow in status.stragglers}
        lines.append("  stragglers")
        for member, slow in sorted(timeline.stragglers.items()):
            until = "until the end" if member in now else "not any more at the end"
            lines.append(f"    {straggler(slow, status.procs)}; {until}")
    changes = [timeline.changes[key] for key in sorted(timeline.changes)]
    lines.append("  membership changes")
    lines += [f"    {_change(change)}" for change in changes]
    return lines


def figures(log: LogStatus) -> str:
    """Return the script's metrics as one line, and what they are means of; empty if there are none.

    Returns:
        Text such as "loss 0.123 (last N rounds)".
    """
    if not log.metrics:
        return ""
    means = "  ".join(
        f"{name} {as_number(value):.4g}" for name, value in sorted(log.metrics.items())
    )
    return f"{means} (last {METRIC_ROUNDS} rounds)"


def _figure(log: LogStatus, name: str) -> str:
    parts = []
    if name in log.metrics_of_epoch:
        parts.append(f"{as_number(log.metrics_of_epoch[name]):.4g} in the last epoch")
    if name in log.metrics:
        parts.append(f"{as_number(log.metrics[name]):.4g} in the last {METRIC_ROUNDS} rounds")
    return ", ".join(parts)


def straggler(slow: StragglerStatus, procs: int) -> str:
    """Return a sentence about a slow rank: which, how slow, since when, and the response.

    Args:
        slow: The straggler's entry in the status.
        procs: Members per replica, to compute the rank's place.

    Returns:
        One line of text.
    """
    done = {
        StragglerResponse.TOLERATE: "tolerated, nothing is replaced",
        StragglerResponse.RESTART_IN_PLACE: "its process was started again",
        StragglerResponse.REPLACE: "its replica is replaced, one per cooldown",
    }
    place = place_of(slow.member, procs)
    since = _time_of_day(slow.since_wall_s)
    text = f"rank {place} takes {slow.percent} % of the median step since {since}"
    if slow.action not in done:  # an action of a later version, or none reported yet
        return text
    what = done[StragglerResponse(slow.action)]
    return f"{text}: {what} (straggler.respond: {slow.action})"


def _time_of_day(wall_s: float) -> str:
    """Return the local time; a damaged status may hold a time that no calendar has."""
    try:
        return datetime.fromtimestamp(wall_s).strftime("%H:%M:%S")
    except (OverflowError, OSError, ValueError):
        return "an unknown time"


def shadow_line(shadow: ShadowStatus, mode: str) -> str:
    """Return as one line what another mode would have changed.

    Args:
        shadow: The report of mode Shadow.
        mode: Name of the other mode.

    Returns:
        The waiting that it would have saved, and the gradients that would have been late.
    """
    saved_s, late = shadow.saved_s.get(mode) or 0.0, shadow.late.get(mode, 0)
    share = f" ({saved_s / shadow.waited_s:.0%})" if shadow.waited_s else ""
    return f"{saved_s:.1f} s of waiting saved{share}, {late:,} of {shadow.fresh:,} gradients late"


def _shadow(shadow: ShadowStatus) -> list[str]:
    waited = f"the ranks waited {shadow.waited_s:.1f} s in them, summed"
    return [
        f"  shadow: {shadow.rounds:,} rounds ran as Full, {waited}; with these arrivals",
        *(f"    {mode:<10} {shadow_line(shadow, mode)}" for mode in shadow.saved_s),
        "    a forecast: it cannot know when a rank that nobody waits for would arrive next",
    ]


def _streamed(status: Status) -> str:
    """Return how many rounds were streamed while backward() ran; empty if none was.

    Returns:
        The share of the rounds, and how many were aborted and why.
    """
    log, void = status.log, status.log.rounds.get(Trigger.VOID, 0)
    if not log.streamed + void:
        return ""
    made = sum(log.rounds.values()) - void
    text = f"{log.streamed / made:.0%} of the rounds ran beside backward()" if made else "none"
    if not void:
        return text
    whys = {
        str(why): sum(int(rank.facts.get(Fact.GIVEN_UP + why) or 0.0) for rank in status.ranks)
        for why in GivenUp
    }
    return f"{text}; {void:,} were given up and made again ({_counts(whys)})"


def _checkpoints(status: Status) -> str:
    """Return how many checkpoints were written; empty if no rank has tried to write one.

    Returns:
        The counts, the last version, and the seconds that training waited for them.
    """

    def total(fact: Fact) -> float:
        return sum(rank.facts.get(fact) or 0.0 for rank in status.ranks)

    written, failed, skipped = map(total, (Fact.SAVED, Fact.SAVE_FAILED, Fact.SAVE_SKIPPED))
    if not written + failed + skipped:
        return ""
    last = max(as_number(rank.facts.get(Fact.SAVED_VERSION, -1.0)) for rank in status.ranks)
    parts = [f"{written:.0f} written"]
    parts += [f"the last of version {last:.0f}"] if last >= 0 else []
    parts += [f"{skipped:.0f} skipped"] if skipped else []
    parts += [f"{failed:.0f} failed"] if failed else []
    exposed, hidden = total(Fact.SAVE_EXPOSED_S), total(Fact.SAVE_HIDDEN_S)
    return f"{', '.join(parts)}; {exposed:.2f} s exposed, {hidden:.2f} s hidden"


def _unsaved(status: Status) -> str:
    """Return a warning that the final weights were not saved; empty if there is none.

    Returns:
        The warning, with the setting that makes this an error.
    """
    if not status.unsaved:
        return ""
    return f"{status.unsaved}; set spec.checkpoint.required: true to make this an error"


def verdict(job: str, outcome: Outcome, *, interrupted: bool) -> str:
    """Return one line that says how the job ended.

    A job that was stopped in order has released its ranks too, but it is not complete.

    Args:
        job: Name of the job.
        outcome: How it ended.
        interrupted: True if the user has ended it.

    Returns:
        Text such as "job mnist: Complete".
    """
    if outcome.complete:
        return f"job {job}: stopped by the user" if interrupted else f"job {job}: Complete"
    return f"job {job}: Failed ({outcome.reason})"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {n:,}" for name, n in sorted(counts.items()) if n) or "0"


def _rounds(status: Status, timeline: Timeline) -> str:
    """Return the number of rounds of this run, and of the runs that it continues.

    Returns:
        One line of text.
    """
    before = timeline.version_before
    text = f"{status.version - before:,} in {timeline.seconds:.1f} s"
    if not before:
        return text
    return f"{text}, after {before:,} of runs before, which the totals below count too"


def _applied(log: LogStatus) -> str:
    if not sum(log.rounds.values()):
        return "not known: the job ended before a rank had told its figures"
    return f"{log.samples_applied:,}, of these {log.samples_late:,} late"


def _epochs(log: LogStatus) -> str:
    if not log.epochs_exact and not log.epochs_short:
        return ""
    text = f"{log.epochs_exact} with each sample applied exactly once"
    if log.epochs_short:
        text += f", {log.epochs_short} with dropped samples"
    if log.samples_left_out:
        text += f"; drop_last left out {log.samples_left_out:,} samples of each"
    return text


def _shares(status: Status) -> str:
    ranks = sorted(status.ranks, key=lambda rank: rank.member)
    known = ((r, status.log.shares.get(str(r.member))) for r in ranks)
    return ", ".join(
        f"rank {place_of(rank.member, status.procs)} {share:.0%}"
        for rank, share in known
        if share is not None
    )


def _change(change: MembershipChange) -> str:
    costs = [f"agreed after {change.agree_s:.2f} s"]
    costs.append(
        "never started" if change.start_s is None else f"all started after {change.start_s:.2f} s"
    )
    if change.gap_s is not None:
        costs.append(f"longest gap between rounds {change.gap_s:.2f} s")
    number = change.generation.short
    return f"{number:<5} round {change.version:<6} {change.why} ({'; '.join(costs)})"
