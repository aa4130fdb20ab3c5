"""The upper half of the dashboard "Paceline job": progress, time, who is waited for, gradients.

`J` selects the job's series, `W` those of the chosen workers. A worker is slot.process and keeps
its series when it is started again. Counters of rare events are shown as they stand: a rate would
not see the first event, because the series begins with it.
"""

from __future__ import annotations

from typing import Final

from scripts.grafana import (
    JOB,
    RANGE,
    RATE,
    Panel,
    Query,
    Row,
    mean,
    quantile,
)

OF_JOB: Final = f'namespace="$namespace", {JOB}="$job"'
J: Final = f"{{{OF_JOB}}}"
W: Final = f'{{{OF_JOB}, worker=~"$worker"}}'
NONE: Final = "none"


def _share(metric: str) -> str:
    """Seconds per second and rank of a counter of seconds."""
    return f"avg(rate({metric}{W}{RATE}))"


def _per_round(metric: str) -> str:
    """Seconds of a counter for one round and rank."""
    return f"sum(rate({metric}{W}{RATE})) / sum(rate(paceline_rounds_total{W}{RATE}))"


PROGRESS: Final = Row(
    "Is it making progress?",
    (
        Panel(
            "Rounds in the weights",
            "short",
            "Rounds applied to the committed weights. It stands still when the job does.",
            (Query(f"max(paceline_committed_rounds{J})", "rounds"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Ranks",
            "short",
            "Members of the generation in force, and those of them that rounds count on: neither "
            "joining nor benched.",
            (Query(f"max by (ranks) (paceline_world_size_ranks{J})", "{{ranks}}"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "How many rounds per second, and what starts them?",
            "ops",
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
            "How many gradients per second are applied?",
            "ops",
            "Contributions of all ranks to rounds. In a partial mode this, not the rounds, is the "
            "speed of training.",
            (
                Query(
                    f"sum(rate(paceline_contribution_age_rounds_count{J}{RATE}))",
                    "contributions",
                ),
            ),
        ),
        Panel(
            "How many samples per second are applied?",
            "ops",
            "fresh: in the round of their own step. late: in a later one.",
            (Query(f"sum by (kind) (rate(paceline_samples_total{J}{RATE}))", "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "How long is a step of the loop?",
            "s",
            "From the end of one step() to the end of the next, over the chosen workers. A 95 % "
            "line far above the median means uneven steps, not slow ones.",
            (
                Query(quantile(0.5, "paceline_step_duration_seconds", W), "median"),
                Query(quantile(0.95, "paceline_step_duration_seconds", W), "95 %"),
                Query(mean("paceline_step_duration_seconds", W), "mean"),
            ),
        ),
        Panel(
            "How long is the gap between two updates?",
            "s",
            "From one applied round to the next, changes of the membership included.",
            (
                Query(quantile(0.5, "paceline_round_duration_seconds", J), "median"),
                Query(quantile(0.99, "paceline_round_duration_seconds", J), "99 %"),
            ),
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
        ),
        Panel(
            "How much communication is hidden behind computing?",
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
                    f"sum by (cause) (rate(paceline_rounds_given_up_total{W}{RATE}))"
                    f" / on () group_left () sum(rate(paceline_rounds_total{W}{RATE}))",
                    "given up: {{cause}}",
                ),
            ),
            empty=NONE,
        ),
    ),
)

BLAME: Final = Row(
    "Who is waited for?",
    (
        Panel(
            "For whom did others wait, in the shown time?",
            "s",
            "Seconds of all other ranks together that a rank cost by arriving last; the twenty "
            "worst. The slow rank itself waits least: look here, not at waiting times.",
            (
                Query(
                    "sort_desc(topk(20, sum by (worker) "
                    f"(increase(paceline_blamed_seconds_total{W}{RANGE}))))",
                    "{{worker}}",
                ),
            ),
            kind="bargauge",
            empty=NONE,
        ),
        Panel(
            "Who is waited for, when?",
            "percentunit",
            "Seconds per second that the others together waited for this rank. With 4 ranks, 300 % "
            "means that three do nothing else.",
            (
                Query(
                    f"sum by (worker) (rate(paceline_blamed_seconds_total{W}{RATE}))", "{{worker}}"
                ),
            ),
        ),
        Panel(
            "Who arrives last?",
            "percentunit",
            "Share of the rounds of which a rank was the last fresh one. All alike: chance. One "
            "near 100 %: a straggler.",
            (
                Query(
                    f"sum by (worker) (rate(paceline_arrivals_last_total{W}{RATE})) / "
                    f"sum by (worker) (rate(paceline_rounds_total{W}{RATE}))",
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            "How late does each rank come?",
            "s",
            "Mean of the own arrival after the first one of the round.",
            (Query(mean("paceline_arrival_lag_seconds", W, "worker"), "{{worker}}"),),
        ),
        Panel(
            "How long does each rank compute for a step?",
            "s",
            "The straggler's own side: its line is above the others if its processor or its data "
            "is slow, and beside them if its network is.",
            (
                Query(
                    f"sum by (worker) (rate(paceline_compute_seconds_total{W}{RATE})) / "
                    f"sum by (worker) (rate(paceline_steps_total{W}{RATE}))",
                    "{{worker}}",
                ),
            ),
        ),
        Panel(
            "How much waiting does the mode save?",
            "percentunit",
            "Seconds per second, all ranks together. Saved: against Full, as it went. In Shadow: "
            "what the mode named would save, from the arrivals as they were.",
            (
                Query(f"sum(rate(paceline_wait_avoided_seconds_total{J}{RATE}))", "saved"),
                Query(
                    "max by (mode) (sum by (worker, mode) "
                    f"(rate(paceline_shadow_saved_seconds_total{J}{RATE})))",
                    "{{mode}} would save",
                ),
                Query(
                    f"max(sum by (worker) (rate(paceline_shadow_waited_seconds_total{J}{RATE})))",
                    "waited in Shadow",
                ),
            ),
            empty="nothing yet",
        ),
    ),
)

FRESH: Final = Row(
    "What becomes of the gradients?",
    (
        Panel(
            "Are gradients in time?",
            "ops",
            "Steps whose gradient was applied in its own round (fresh), and those kept for a later "
            "one or dropped (late).",
            (Query(f"sum by (kind) (rate(paceline_steps_total{W}{RATE}))", "{{kind}}"),),
            stacked=True,
        ),
        Panel(
            "How old are contributions?",
            "short",
            "Rounds between the weights that a gradient was computed on and those that it is "
            "applied to. 0: on the newest. spec.collective.maxAge bounds it.",
            (
                Query(mean("paceline_contribution_age_rounds", W), "mean"),
                Query(quantile(0.99, "paceline_contribution_age_rounds", W), "99 %"),
            ),
        ),
        Panel(
            "How many ranks take part in a round?",
            "percentunit",
            "Mean share of the active ranks that had something in a round. In Quorum near "
            "quorum / ranks when rounds start early.",
            (Query(mean("paceline_participation_ratio", J), "participation"),),
            highest=1.0,
        ),
        Panel(
            "Which samples were dropped?",
            "short",
            "Samples never applied, so far, of the workers that run now. stale: older than maxAge. "
            "nonfinite: NaN or Inf. skipped: the script made no step of the batch. revoked: a sum "
            "with work that others had got.",
            (Query(f"sum by (reason) (paceline_samples_dropped_total{J})", "{{reason}}"),),
            empty=NONE,
        ),
        Panel(
            "How many samples were dealt again?",
            "short",
            "Samples that a lost or benched rank held and that others got, so far. They count once "
            "all the same.",
            (Query(f"max(paceline_samples_redealt_total{J})", "dealt again"),),
            empty=NONE,
        ),
        Panel(
            "Who jumps ahead?",
            "ops",
            "Times per second that a late rank went on from the newest weights. Its work is not "
            "lost; it is applied late.",
            (Query(f"sum by (worker) (rate(paceline_jumps_total{W}{RATE}))", "{{worker}}"),),
            empty=NONE,
        ),
    ),
)

UPPER: Final = (PROGRESS, TIME, BLAME, FRESH)
