"""The dashboard "Paceline rank": one worker against the others of its job.

`R` selects the chosen worker. The others are drawn as their median and their worst, so that the
panels are the same for 5 ranks and for 500.
"""

from __future__ import annotations

from typing import Final

from scripts.grafana import COUNT, RATE, Panel, Query, Row, or_zero, quantile
from scripts.job_panels import NAME, OF_JOB, OTHERS, WHO, J, per_worker

R: Final = f'{{{OF_JOB}, worker="$worker"}}'


def _against(numerator: str, denominator: str) -> tuple[Query, ...]:
    """Return queries for a ratio of two counters: the worker's, and the median and highest."""
    return _beside(per_worker(numerator, denominator, R), per_worker(numerator, denominator, J))


def _share(counter: str) -> tuple[Query, ...]:
    """Return queries for the growth of a counter: of the worker, and of all workers."""
    return _beside(*(f"sum by ({WHO}) (rate({counter}{of}{RATE}))" for of in (R, J)))


def _beside(own: str, each: str) -> tuple[Query, ...]:
    """Return queries for the worker's value, and the median and the highest of all workers."""
    return (
        Query(own, NAME),
        Query(f"quantile(0.5, {each})", "median of all"),
        Query(f"max({each})", "highest of all"),
    )


def _slower(numerator: str, denominator: str) -> str:
    """Return the query for the worker's ratio relative to the median of all workers."""
    each = per_worker(numerator, denominator, J)
    return f"{per_worker(numerator, denominator, R)} / on () group_left () quantile(0.5, {each})"


RANK: Final = (
    Row(
        "Which one is it, and what does it cost?",
        (
            Panel(
                "Where does it run?",
                "none",
                "Pod and node of this worker. Two lines: its pod was replaced a moment ago.",
                (
                    Query(
                        f"max by (worker, pod, node, namespace) (paceline_rank_state_info{R} == 1)",
                        "",
                    ),
                ),
                kind="table",
                height=5,
                hidden=("namespace",),
            ),
            Panel(
                "State",
                COUNT,
                "Of its process. waiting: it was ended and is started again after a pause.",
                (Query(f"max by (state) (paceline_rank_state_info{R} == 1)", "{{state}}"),),
                kind="stat",
                width=4,
                height=5,
                words=((1, "process"),),
                name_too=True,
            ),
            Panel(
                "Costs each other",
                "percentunit",
                "Share of the time of each other rank that is spent waiting for this one.",
                (Query(f"sum(rate(paceline_blamed_seconds_total{R}{RATE})) / {OTHERS}", "costs"),),
                kind="stat",
                width=4,
                height=5,
                colours=((None, "green"), (0.1, "orange"), (0.2, "red")),
            ),
            Panel(
                "Computes, by median",
                "none",
                "Seconds that it computes for a step, as a multiple of the median of all. 1: as "
                "fast as the others.",
                (
                    Query(
                        _slower("paceline_compute_seconds_total", "paceline_steps_total"), "times"
                    ),
                ),
                kind="stat",
                width=4,
                height=5,
                colours=((None, "green"), (1.2, "orange"), (1.5, "red")),
            ),
            Panel(
                "Started again",
                COUNT,
                "Times that its process was started again while its pod lived.",
                (Query(f"sum(paceline_rank_restarts_total{R})", "times"),),
                kind="stat",
                width=4,
                height=5,
                colours=((None, "green"), (1, "orange"), (4, "red")),
            ),
        ),
    ),
    Row(
        "Is it slow, and why?",
        (
            Panel(
                "What does it cost each other rank?",
                "percentunit",
                "Share of the time of each other rank. The line is where the alert begins.",
                _beside(
                    *(
                        f"sum by ({WHO}) (rate(paceline_blamed_seconds_total{of}{RATE})) / {OTHERS}"
                        for of in (R, J)
                    )
                ),
                line=0.2,
            ),
            Panel(
                "How long does it compute for a step?",
                "s",
                "Above the median: its processor, GPU or data. Beside it, and still late: its "
                "network.",
                _against("paceline_compute_seconds_total", "paceline_steps_total"),
            ),
            Panel(
                "How late does it come?",
                "s",
                "Mean of its arrival after the first one of a round.",
                _against("paceline_arrival_lag_seconds_sum", "paceline_arrival_lag_seconds_count"),
                log=True,
            ),
            Panel(
                "How long does it wait for others?",
                "s",
                "Mean for a round. The slow rank waits least.",
                _against("paceline_round_wait_seconds_sum", "paceline_round_wait_seconds_count"),
                log=True,
            ),
            Panel(
                "How long does a transfer take here?",
                "s",
                "From GO to the complete sum. Above the others: its link.",
                _against(
                    "paceline_round_transfer_seconds_sum", "paceline_round_transfer_seconds_count"
                ),
                log=True,
            ),
            Panel(
                "How long are its steps?",
                "s",
                "From the end of one step() to the end of the next, of this worker alone. Longest: "
                "upper bound of its bucket.",
                (
                    Query(quantile(0.5, "paceline_step_duration_seconds", R), "median"),
                    Query(quantile(0.95, "paceline_step_duration_seconds", R), "95 %"),
                    Query(quantile(1, "paceline_step_duration_seconds", R), "longest"),
                ),
                log=True,
            ),
        ),
    ),
    Row(
        "Where does its time go, and what becomes of its work?",
        (
            Panel(
                "How much of its time is it held in step()?",
                "percentunit",
                "Communication that nothing hid.",
                _share("paceline_exposed_seconds_total"),
                highest=1.0,
            ),
            Panel(
                "How long does it wait for data?",
                "percentunit",
                "Share of its time that it waited for a lease, that is, for data to be dealt.",
                _share("paceline_data_wait_seconds_total"),
                highest=1.0,
            ),
            Panel(
                "How old is what it contributes?",
                "none",
                "Rounds between the weights that it computed on and those that it was applied to.",
                _against(
                    "paceline_contribution_age_rounds_sum",
                    "paceline_contribution_age_rounds_count",
                ),
            ),
            Panel(
                "How many of its samples are applied?",
                "suffix:samples/s",
                "fresh: in the round of their own step. late: in a later one.",
                (Query(f"sum by (kind) (rate(paceline_samples_total{R}{RATE}))", "{{kind}}"),),
                stacked=True,
            ),
            Panel(
                "Which of its samples were dropped?",
                COUNT,
                "So far. nonfinite on one worker only: suspect its hardware.",
                (
                    Query(
                        or_zero(
                            f"sum by (reason) (paceline_samples_dropped_total{R})", J, "reason"
                        ),
                        "{{reason}}",
                    ),
                ),
            ),
            Panel(
                "How often was it benched, or started again?",
                COUNT,
                "So far. Benched: it was silent and got no data until it reported back.",
                (
                    Query(or_zero(f"sum(paceline_benched_total{R})", J), "benched"),
                    Query(f"sum(paceline_rank_restarts_total{R})", "started again"),
                ),
            ),
        ),
    ),
)
