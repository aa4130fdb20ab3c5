"""The upper half of the dashboard "Paceline job": progress, time, late ranks, gradients.

`J` selects the job's series, `W` those of the chosen workers. A worker is slot.process and keeps
its series after a restart. People know it by its pod and node, so these labels are shown beside it.
Counters of rare events are shown as they are: a rate would miss the first event, because the series
begins with it. No panel has a line for each of 64 workers: it shows the worst few of the shown
time, and the median of all.
"""

from __future__ import annotations

from typing import Final

from paceline.core.protocol.records import DROP_MEANINGS

from scripts.grafana import (
    COUNT,
    JOB,
    RANGE,
    RANGE_END,
    RATE,
    Link,
    Panel,
    Query,
    Row,
    mean,
    or_zero,
    quantile,
    worst,
)

OF_JOB: Final = f'namespace="$namespace", {JOB}="$job"'
J: Final = f"{{{OF_JOB}}}"
W: Final = f'{{{OF_JOB}, worker=~"$worker"}}'
WHO: Final = "worker, pod, node"
NAME: Final = "{{pod}} ({{worker}}) on {{node}}"
ROUNDS_PER_S: Final = "suffix:rounds/s"
GRADIENTS_PER_S: Final = "suffix:gradients/s"
SAMPLES_PER_S: Final = "suffix:samples/s"
OTHERS: Final = (
    "scalar(clamp_min(max(paceline_world_size_ranks{" + OF_JOB + ', ranks="active"}) - 1, 1))'
)


def _to_rank(label: str) -> tuple[Link, ...]:
    """Return a link to the dashboard of the worker that a series' `label` names."""
    return (
        Link(
            "This rank against the others",
            "/d/paceline-rank?var-datasource=${datasource}&var-scrape=${scrape}"
            f"&var-namespace=${{namespace}}&var-job=${{job}}&var-worker=${{__field.labels.{label}}}"
            "&${__url_time_range}",
        ),
    )


TO_RANK: Final = _to_rank("worker")


def _share(metric: str) -> str:
    """Return the query for seconds per second and rank of a counter of seconds."""
    return f"avg(rate({metric}{W}{RATE}))"


def _per_round(metric: str) -> str:
    """Return the query for the seconds of a counter per round and rank."""
    return f"sum(rate({metric}{W}{RATE})) / sum(rate(paceline_rounds_total{W}{RATE}))"


def per_worker(numerator: str, denominator: str, selector: str, window: str = RATE) -> str:
    """Return the query for the ratio of two counters' growth, one value per worker and pod."""
    return (
        f"sum by ({WHO}) (rate({numerator}{selector}{window})) / "
        f"sum by ({WHO}) (rate({denominator}{selector}{window}))"
    )


def _worst_and_median(numerator: str, denominator: str) -> tuple[Query, ...]:
    each = per_worker(numerator, denominator, W)
    return (
        Query(worst(each, per_worker(numerator, denominator, W, RANGE_END), "worker, pod"), NAME),
        Query(f"quantile(0.5, {each})", "median of all"),
    )


def _blame(window: str) -> str:
    """Return the query for the blamed share of the time of each other rank."""
    return f"sum by ({WHO}) (rate(paceline_blamed_seconds_total{W}{window})) / {OTHERS}"


def _row_of(expr: str) -> str:
    """Return a query with a label that sorts 2.0 before 10.0."""
    for zeros, digits in (("00", "[0-9]"), ("0", "[0-9]{2}")):
        target = f'"{zeros}$1", "worker", "({digits}[.][0-9]+)"'
        expr = f'label_replace({expr}, "row", {target})'
    return f'label_replace({expr}, "row", "$1", "worker", "([0-9]{{3,}}[.][0-9]+)")'


_GRADIENTS: Final = f"sum(rate(paceline_contribution_age_rounds_count{J}{RATE}))"
_TRAINS: Final = (
    f"(max(changes(paceline_committed_rounds{J}{RATE})) > bool 0)"
    f' * (1 + (max(paceline_world_size_ranks{{{OF_JOB}, ranks="members"}})'
    f' > bool max(paceline_world_size_ranks{{{OF_JOB}, ranks="active"}})))'
)

NOW: Final = Row(
    "Is it progressing, how fast, who costs what, and what should I do?",
    (
        Panel(
            "State",
            COUNT,
            "From its rounds and ranks. Not all ranks: one is joining or benched. Nothing here: "
            "the job has ended or is not scraped.",
            (Query(_TRAINS, "state"),),
            kind="stat",
            width=4,
            height=4,
            colours=((None, "red"), (1, "green"), (2, "orange")),
            words=((0, "stands still"), (1, "trains"), (2, "not all ranks")),
            empty="ended, or not scraped",
        ),
        Panel(
            "Progress",
            "percentunit",
            "Of all samples or steps. Nothing: the script does not say where the end is.",
            (Query(f"max(paceline_progress_ratio{J})", "progress"),),
            kind="stat",
            width=4,
            height=4,
            empty="no end known",
        ),
        Panel(
            "Time left",
            "s",
            "To the end of training, at the speed of the last minutes.",
            (Query(f"max(paceline_remaining_seconds{J})", "left"),),
            kind="stat",
            width=4,
            height=4,
            empty="no end known",
        ),
        Panel(
            "Applied",
            GRADIENTS_PER_S,
            "Contributions of all ranks to rounds. In a partial mode this, not the rounds, is the "
            "speed of training.",
            (Query(_GRADIENTS, "gradients"),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Held in step()",
            "percentunit",
            "Share of the ranks' time that is communication which nothing hid. An alert begins at "
            "30 %.",
            (Query(f"avg(rate(paceline_exposed_seconds_total{J}{RATE}))", "exposed"),),
            kind="stat",
            width=4,
            height=4,
            colours=((None, "green"), (0.15, "orange"), (0.3, "red")),
        ),
        Panel(
            "Unsaved work",
            "s",
            "About the age of the last checkpoint: rounds since then, each as long as one is now.",
            (
                Query(
                    f"(max(paceline_committed_rounds{J}) - max(paceline_checkpoint_rounds{J}))"
                    f" * {mean('paceline_round_duration_seconds', J)}",
                    "since the checkpoint",
                ),
            ),
            kind="stat",
            width=4,
            height=4,
            empty="no checkpoint",
        ),
        Panel(
            "Rounds in the weights",
            COUNT,
            "Rounds applied to the committed weights. It stands still when the job does.",
            (Query(f"max(paceline_committed_rounds{J})", "rounds"),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Epoch",
            "none",
            "Epochs done, with the part of the present one. Nothing: the job does not count in "
            "epochs.",
            (Query(f"max(paceline_epoch_number{J})", "epochs"),),
            kind="stat",
            width=4,
            height=4,
            empty="no epochs",
        ),
        Panel(
            "Ranks",
            COUNT,
            "Members of the generation in force, and those of them that rounds count on: neither "
            "joining nor benched.",
            (Query(f"max by (ranks) (paceline_world_size_ranks{J})", "{{ranks}}"),),
            kind="stat",
            width=4,
            height=4,
            name_too=True,
        ),
        Panel(
            "Mode",
            ROUNDS_PER_S,
            "The mode of the rounds that are made now, and how many per second.",
            (
                Query(
                    "topk(1, max by (mode) (sum by (worker, mode) "
                    f"(rate(paceline_rounds_total{J}{RATE}))))",
                    "{{mode}}",
                ),
            ),
            kind="stat",
            width=4,
            height=4,
            name_too=True,
        ),
        Panel(
            "Who costs most now?",
            "percentunit",
            "The rank that is waited for most: share of the time of each other rank. An alert "
            "begins at 20 %.",
            (Query(f"topk(1, {_blame(RATE)})", NAME),),
            kind="stat",
            width=8,
            height=4,
            name_too=True,
            colours=((None, "green"), (0.1, "orange"), (0.2, "red")),
            links=TO_RANK,
        ),
        Panel(
            "What does the script report?",
            "none",
            "Figures of pl.log: the weighted mean over all ranks of what was applied just now.",
            (
                Query(
                    f"sum by (figure) (delta(paceline_figure_number{J}{RATE})) / "
                    f"(sum by (figure) (delta(paceline_figure_weight_number{J}{RATE})) > 0)",
                    "{{figure}}",
                ),
            ),
            empty="no data, or nothing reported",
        ),
        Panel(
            "How fast, against what is possible?",
            GRADIENTS_PER_S,
            "Applied: contributions of all ranks. Possible: what the ranks would compute if none "
            "ever waited for anything, data to be dealt included.",
            (
                Query(_GRADIENTS, "applied"),
                Query(
                    "sum("
                    + per_worker("paceline_steps_total", "paceline_compute_seconds_total", J)
                    + ")",
                    "possible",
                ),
            ),
        ),
        Panel(
            "Which alerts fire for this job?",
            "none",
            "With rules loaded (metrics.rules.enabled). What each means and what to do is in "
            "docs/monitoring.md.",
            (
                Query(
                    "max by (alertname, severity, worker) "
                    f'(ALERTS{{alertstate="firing", {OF_JOB}}}) or on () label_replace('
                    f"0 * max(job:paceline_active_ranks:max{J}), "
                    '"alertname", "none fires", "", "")',
                    "",
                ),
            ),
            kind="table",
            empty="no data: are the rules loaded?",
        ),
    ),
)

PROGRESS: Final = Row(
    "Is it making progress?",
    (
        Panel(
            "How many rounds per second, and what starts them?",
            ROUNDS_PER_S,
            "all: everybody had arrived. quorum, deadline, initiator: the mode started the round "
            "without those that had not. tail: nothing more was to come. bench: a silent rank was "
            "left out.",
            (
                Query(
                    "max by (mode, trigger) (sum by (worker, mode, trigger) "
                    f"(rate(paceline_rounds_total{J}{RATE})))",
                    "{{mode}}: {{trigger}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "How many samples per second are applied?",
            SAMPLES_PER_S,
            "fresh: in the round of their own step. late: in a later one.",
            (Query(f"sum by (kind) (rate(paceline_samples_total{J}{RATE}))", "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "How far is the job?",
            "percentunit",
            "Of all samples or steps. A line that bends down has become slower.",
            (Query(f"max(paceline_progress_ratio{J})", "progress"),),
            highest=1.0,
            empty="no end known",
        ),
        Panel(
            "How long is a step of the loop?",
            "s",
            "From the end of one step() to the end of the next, over the chosen workers. Longest: "
            "upper bound of its bucket. A 95 % line far above the median means uneven steps.",
            (
                Query(quantile(0.5, "paceline_step_duration_seconds", W), "median"),
                Query(quantile(0.95, "paceline_step_duration_seconds", W), "95 %"),
                Query(quantile(1, "paceline_step_duration_seconds", W), "longest"),
                Query(mean("paceline_step_duration_seconds", W), "mean"),
            ),
            width=12,
            log=True,
        ),
        Panel(
            "How long is the gap between two updates?",
            "s",
            "From one applied round to the next, changes of the membership included. Longest: "
            "upper bound of its bucket, which ends at 10 seconds.",
            (
                Query(quantile(0.5, "paceline_round_duration_seconds", J), "median"),
                Query(quantile(0.99, "paceline_round_duration_seconds", J), "99 %"),
                Query(quantile(1, "paceline_round_duration_seconds", J), "longest"),
            ),
            width=12,
            log=True,
        ),
    ),
)

TIME: Final = Row(
    "Where does the time go?",
    (
        Panel(
            "Where does the loop's time go?",
            "percentunit",
            "Share of a rank's time, mean of the chosen workers. Held in step() is communication "
            "that nothing hid; waiting for data is waiting for a lease, not loading. The rest is "
            "evaluating, starting and ending.",
            (
                Query(_share("paceline_compute_seconds_total"), "compute and load"),
                Query(_share("paceline_exposed_seconds_total"), "held in step()"),
                Query(_share("paceline_data_wait_seconds_total"), "waiting for data"),
            ),
            stacked=True,
            highest=1.0,
            width=12,
        ),
        Panel(
            "What is a round made of?",
            "s",
            "Mean seconds of a round. Wait: from the own arrival until the round starts, because "
            "of others. Transfer: moving and adding data after that, which only a faster network "
            "or algorithm makes shorter.",
            (
                Query(mean("paceline_round_wait_seconds", W), "wait for others"),
                Query(mean("paceline_round_transfer_seconds", W), "transfer"),
                Query(_per_round("paceline_update_seconds_total"), "optimizer"),
                Query(_per_round("paceline_weight_copy_seconds_total"), "copy into the model"),
            ),
            stacked=True,
            width=12,
        ),
        Panel(
            "How much communication is hidden?",
            "percentunit",
            "Waiting, transfer and update, as share of a rank's time. Exposed is what the loop "
            "felt of it; the rest ran beside computing.",
            (
                Query(_share("paceline_exposed_seconds_total"), "exposed"),
                Query(
                    f"clamp_min({_share('paceline_round_wait_seconds_sum')}"
                    f" + {_share('paceline_round_transfer_seconds_sum')}"
                    f" + {_share('paceline_update_seconds_total')}"
                    f" - {_share('paceline_exposed_seconds_total')}, 0)",
                    "hidden",
                ),
            ),
            stacked=True,
            highest=1.0,
            width=12,
        ),
        Panel(
            "Do reductions run beside backward()?",
            "percentunit",
            "Streamed: share of the rounds. Beside backward(): share of a rank's time. Given up: "
            "share of the rounds that a worker made void, and why; many of them mean uneven steps.",
            (
                Query(_per_round("paceline_rounds_streamed_total"), "streamed"),
                Query(_share("paceline_transfer_hidden_seconds_total"), "beside backward()"),
                Query(
                    or_zero(
                        f"sum by (cause) (rate(paceline_rounds_given_up_total{W}{RATE}))"
                        f" / on () group_left () sum(rate(paceline_rounds_total{W}{RATE}))",
                        J,
                        "cause",
                    ),
                    "given up: {{cause}}",
                ),
            ),
            width=12,
        ),
    ),
)


def _step_waits(of: str) -> str:
    """Return the query for the seconds of a step that ranks wait for each peer.

    It is the mean of the chosen workers; `of` is the gauge.

    Returns:
        A PromQL expression.
    """
    ranks = f"count(count by (worker) (paceline_anatomy_step_seconds{W}))"
    return f"sum by (peer) ({of}) / scalar({ranks})"


_WAITED: Final = f"paceline_anatomy_blocked_seconds{W}"

STEP: Final = Row(
    "What is a step made of, and what would make it shorter?",
    (
        Panel(
            "What is one step made of?",
            "s",
            "Mean of the last steps of the chosen workers. Blocked: until the last rank had "
            "arrived. Reduction, update, copy: as far as the loop was held. Script: its own work "
            "beside loading, forward and backward.",
            (Query(f"avg by (part) (paceline_anatomy_step_seconds{W})", "{{part}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            "What would a step take?",
            "s",
            "Mean of the chosen workers. Without lateness: if nobody else were late, which a "
            "partial mode comes near to. Without network: if no reduction held the loop.",
            (
                Query(f"avg(sum by (worker) (paceline_anatomy_step_seconds{W}))", "as it is"),
                Query(
                    f"avg by (free_of) (paceline_anatomy_ideal_seconds{W})", "without {{free_of}}"
                ),
            ),
            width=12,
        ),
        Panel(
            "For whom does a step wait? The five worst",
            "s",
            "Of a step, mean of the chosen workers, by the rank that arrived last.",
            (
                Query(
                    worst(
                        _step_waits(_WAITED),
                        f"sum by (peer) (sum_over_time({_WAITED}{RANGE_END}))",
                        "peer",
                    ),
                    "{{peer}}",
                ),
            ),
            links=_to_rank("peer"),
        ),
        Panel(
            "What of the reductions is hidden, by size?",
            "s",
            "Of a step, mean of the chosen workers; the size is a segment's. Exposed: the loop was "
            "held. Hidden: it computed meanwhile. spec.collective.segmentBytes sets the size.",
            (
                Query(
                    f"avg by (overlap, size_class) (paceline_anatomy_reduction_seconds{W})",
                    "{{overlap}}, {{size_class}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "How long may work in the background take?",
            "s",
            "From the end of an update to the beginning of the next. What takes longer, such as a "
            "copy of the state, delays a round.",
            (
                Query(f"quantile(0.5, paceline_anatomy_gap_seconds{W})", "median of all"),
                Query(f"min(paceline_anatomy_gap_seconds{W})", "shortest of all"),
            ),
        ),
    ),
)

BLAME: Final = Row(
    "Who is waited for?",
    (
        Panel(
            "For whom did others wait, in the shown time?",
            "percentunit",
            "Share of its time that each other rank lost to this one, which came last; the eight "
            "worst. The slow rank itself waits least: look here, not at waiting times.",
            (Query(f"sort_desc(topk(8, {_blame(RANGE)}))", NAME),),
            kind="bargauge",
            width=12,
            height=9,
            links=TO_RANK,
        ),
        Panel(
            "Who is waited for, when? The five worst",
            "percentunit",
            "Share of the time of each other rank. The line is where the alert PacelineStraggler "
            "begins, if it lasts for a quarter of an hour.",
            (
                Query(worst(_blame(RATE), _blame(RANGE_END), "worker, pod"), NAME),
                Query(f"quantile(0.5, {_blame(RATE)})", "median of all"),
            ),
            width=12,
            height=9,
            line=0.2,
            links=TO_RANK,
        ),
        Panel(
            "Who is waited for, when? All ranks",
            "percentunit",
            "One line of the map for each rank, slot.process; the darker, the more of the time of "
            "each other rank it costs. Bands across: everybody waits for somebody in turn.",
            (Query(_row_of(_blame(RATE)), "{{row}}"),),
            kind="heatmap",
            width=24,
            height=10,
        ),
        Panel(
            "Who arrives last? The five worst",
            "percentunit",
            "Share of the rounds of which a rank was the last fresh one. All alike: chance. One "
            "near 100 %: a straggler.",
            _worst_and_median("paceline_arrivals_last_total", "paceline_rounds_total"),
            highest=1.05,
            links=TO_RANK,
        ),
        Panel(
            "How late does each rank come? The five worst",
            "s",
            "Mean of the own arrival after the first one of the round.",
            _worst_and_median(
                "paceline_arrival_lag_seconds_sum", "paceline_arrival_lag_seconds_count"
            ),
            log=True,
            links=TO_RANK,
        ),
        Panel(
            "How long does a step compute? The five slowest",
            "s",
            "The straggler's own side: its line is above the median if its processor or its data "
            "is slow, and beside it if its network is.",
            _worst_and_median("paceline_compute_seconds_total", "paceline_steps_total"),
            links=TO_RANK,
        ),
        Panel(
            "How much waiting does the mode save?",
            "percentunit",
            "Share of a rank's time. Saved: against Full, as it went. In Shadow: what the mode "
            "named would save, from the arrivals as they were.",
            (
                Query(f"avg(rate(paceline_wait_avoided_seconds_total{J}{RATE}))", "saved"),
                Query(
                    "max by (mode) (sum by (worker, mode) "
                    f"(rate(paceline_shadow_saved_seconds_total{J}{RATE}))) / ({OTHERS} + 1)",
                    "{{mode}} would save",
                ),
                Query(
                    f"max(sum by (worker) (rate(paceline_shadow_waited_seconds_total{J}{RATE})))"
                    f" / ({OTHERS} + 1)",
                    "waited in Shadow",
                ),
            ),
            width=24,
            highest=1.0,
        ),
    ),
)

FRESH: Final = Row(
    "What becomes of the gradients?",
    (
        Panel(
            "Are gradients in time?",
            GRADIENTS_PER_S,
            "Steps whose gradient was applied in its own round (fresh), and those kept for a later "
            "one or dropped (late).",
            (Query(f"sum by (kind) (rate(paceline_steps_total{W}{RATE}))", "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "How old are contributions?",
            "none",
            "Rounds between the weights that a gradient was computed on and those that it is "
            "applied to. 0: on the newest. spec.collective.maxAge bounds it.",
            (
                Query(mean("paceline_contribution_age_rounds", W), "mean"),
                Query(quantile(0.99, "paceline_contribution_age_rounds", W), "99 %"),
                Query(quantile(1, "paceline_contribution_age_rounds", W), "oldest"),
            ),
        ),
        Panel(
            "How many ranks take part in a round?",
            "percentunit",
            "Mean share of the active ranks that had something in a round. In Quorum near "
            "quorum / ranks when rounds start early.",
            (Query(mean("paceline_participation_ratio", J), "participation"),),
            highest=1.05,
        ),
        Panel(
            "Which samples were dropped?",
            COUNT,
            "Never applied so far, of the workers that run now. "
            + " ".join(f"{reason}: {meaning}." for reason, meaning in DROP_MEANINGS.items()),
            (
                Query(
                    or_zero(f"sum by (reason) (paceline_samples_dropped_total{J})", J, "reason"),
                    "{{reason}}",
                ),
            ),
        ),
        Panel(
            "How many samples were dealt again?",
            COUNT,
            "Samples that a lost or benched rank held and that others got, so far. They count once "
            "all the same.",
            (Query(or_zero(f"max(paceline_samples_redealt_total{J})", J), "dealt again"),),
        ),
        Panel(
            "Who jumps ahead? The five who do it most",
            "suffix:times/s",
            "Times per second that a late rank went on from the newest weights. Its work is not "
            "lost; it is applied late.",
            (
                Query(
                    worst(
                        f"sum by ({WHO}) (rate(paceline_jumps_total{W}{RATE}))",
                        f"sum by ({WHO}) (rate(paceline_jumps_total{W}{RANGE_END}))",
                        "worker, pod",
                    ),
                    NAME,
                ),
            ),
            links=TO_RANK,
        ),
    ),
)

UPPER: Final = (NOW, PROGRESS, TIME, STEP, BLAME, FRESH)
