"""The lower half of the dashboard "Paceline job": members, transport, checkpoints, memory.

Counters of rare events (losses, failures) are shown as they are: a rate would miss the first event,
because the series begins with it.
"""

from __future__ import annotations

from typing import Final

from scripts.grafana import COUNT, RANGE, RANGE_END, RATE, Panel, Query, Row, or_zero
from scripts.job_panels import TO_RANK, WHO, J, W


def _most(counter: str) -> str:
    """Return the query for the five workers with the most of a rare event.

    They stay the same through the shown time.

    Returns:
        A PromQL expression.
    """
    most = f"topk(5, max by ({WHO}) (max_over_time({counter}{W}{RANGE_END})) > 0)"
    return or_zero(f"sum by ({WHO}) ({counter}{W}) and on (worker, pod) {most}", J, "pod")


def _memory(window: str = "") -> str:
    """Return the query for the memory of each pod of the job.

    The kubelet does not know which pods belong to it, so the job's own series select them.

    Returns:
        A PromQL expression.
    """
    used = (
        f'container_memory_working_set_bytes{{namespace="$namespace", container="trainer"}}{window}'
    )
    most = f"max_over_time({used})" if window else used
    return (
        f"max by (pod) ({most}) and on (pod) max by (pod) (paceline_coordinator_connected_info{J})"
    )


MEMBERS: Final = Row(
    "Who is in the job?",
    (
        Panel(
            "How many ranks are there?",
            COUNT,
            "active below members: a rank is joining, or benched because it is silent.",
            (Query(f"max by (ranks) (paceline_world_size_ranks{J})", "{{ranks}}"),),
        ),
        Panel(
            "Generation and incarnation",
            COUNT,
            "Each step of the generation is one change of the membership. The incarnation grows "
            "when the coordinator is replaced; the generation then begins anew.",
            (
                Query(f"max(paceline_generation_number{J})", "generation"),
                Query(f"max(paceline_incarnation_number{J})", "incarnation"),
            ),
        ),
        Panel(
            "Who joined and who left?",
            COUNT,
            "So far, as seen by the rank that has lived longest. leave: drained. dead: seen dead. "
            "silent: out of reach.",
            (
                Query(or_zero(f"max(paceline_joined_total{J})", J), "joined"),
                Query(or_zero(f"max by (why) (paceline_left_total{J})", J, "why"), "left: {{why}}"),
            ),
        ),
        Panel(
            "In what state are the processes?",
            COUNT,
            "Processes by state. waiting: it was ended and is started again after a pause.",
            (Query(f"sum by (state) (paceline_rank_state_info{W})", "{{state}}"),),
            stacked=True,
            width=12,
        ),
        Panel(
            "Who was started again or benched? The five most",
            COUNT,
            "So far. Started again: the process died and its pod did not. Benched: it was silent "
            "and got no data until it reported back.",
            (
                Query(_most("paceline_rank_restarts_total"), "{{pod}} ({{worker}}) started again"),
                Query(_most("paceline_benched_total"), "{{pod}} ({{worker}}) benched"),
            ),
            width=12,
            links=TO_RANK,
        ),
        Panel(
            "What does a change of the membership cost?",
            "s",
            "Mean seconds from the last round before it to the first one after it, in the shown "
            "time. detect: until it is known. prepare: until all agree. wire: until all are "
            "connected. resume: until the first round.",
            (
                Query(
                    f"sum by (phase) (increase(paceline_resize_phase_seconds_total{J}{RANGE})) / "
                    "on () group_left () "
                    f"sum(increase(paceline_resize_duration_seconds_count{J}{RANGE}))",
                    "{{phase}}",
                ),
            ),
            kind="bargauge",
            empty="no data, or no change",
            width=12,
        ),
        Panel(
            "Is the coordinator there?",
            COUNT,
            "Pods that are connected to it. Rounds go on without it; changes of the membership "
            "wait.",
            (
                Query(f"sum(paceline_coordinator_connected_info{J})", "connected pods"),
                Query(f"count(paceline_coordinator_connected_info{J})", "pods"),
            ),
            width=12,
        ),
    ),
)

TRANSPORT: Final = Row(
    "What carries the gradients?",
    (
        Panel(
            "Which transport and algorithm is in use?",
            COUNT,
            "Chosen by measurement for buffers up to each size; one line per size is the rule. "
            "Ranks: how many say so.",
            (
                Query(
                    "count by (size_class, transport, algorithm) "
                    f"(paceline_transport_selected_info{J} == 1)",
                    "ranks",
                ),
            ),
            kind="table",
        ),
        Panel(
            "Does RDMA carry them, or TCP?",
            COUNT,
            "Ranks by what moves their data to other pods, seen in open devices and port counters. "
            "Empty until enough has moved, and for a job within one pod.",
            (
                Query(
                    f"count by (carrier) (paceline_transport_carrier_info{W} == 1)", "{{carrier}}"
                ),
            ),
            stacked=True,
            empty="no data, or not known yet",
        ),
        Panel(
            "How do its sums travel?",
            COUNT,
            "Ranks by the type that float32 sums travel as, and by why all of them get the same "
            "bits: the order of additions; compared when the group was made; one rank, since "
            "they differed.",
            (
                Query(
                    f"count by (transport, wire, bits) (paceline_transport_sums_info{W} == 1)",
                    "{{transport}} as {{wire}}, bits: {{bits}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "How fast are sums moved?",
            "Bps",
            "Bytes of the buffers by the seconds of reducing them, of one rank. Overhead of the "
            "algorithm is not counted, so compare with itself over time, not with a link's speed.",
            (
                Query(
                    "sum by (transport, algorithm) "
                    f"(rate(paceline_payload_bytes_total{W}{RATE})) / "
                    "sum by (transport, algorithm) "
                    f"(rate(paceline_transfer_seconds_total{W}{RATE}))",
                    "{{transport}} {{algorithm}}",
                ),
            ),
        ),
        Panel(
            "How many bytes are reduced?",
            "Bps",
            "Of one rank, mean of the chosen workers.",
            (
                Query(
                    "avg by (transport) (sum by (worker, transport) "
                    f"(rate(paceline_payload_bytes_total{W}{RATE})))",
                    "{{transport}}",
                ),
            ),
        ),
        Panel(
            "What does the choice of the transport cost?",
            "s",
            "Regret: seconds per reduction that the worst rank loses, by its own measurement, "
            "against what would be best for it. Near 0: the choice is right.",
            (
                Query(
                    f"max by (size_class) (paceline_transport_regret_seconds{J})", "{{size_class}}"
                ),
            ),
        ),
        Panel(
            "How many reductions failed?",
            COUNT,
            "So far, of the worst rank. A few with each lost rank are in order: its round is "
            "abandoned and made again.",
            (
                Query(
                    or_zero(
                        f"max by (transport) (paceline_transport_errors_total{J})", J, "transport"
                    ),
                    "{{transport}}",
                ),
            ),
            width=24,
            height=6,
        ),
    ),
)

KEEPING: Final = Row(
    "Checkpoints, memory and the cost of these figures",
    (
        Panel(
            "Are checkpoints written?",
            COUNT,
            "So far. failed: the disk refused; training goes on. skipped: the one before was not "
            "on the disk yet.",
            (
                Query(
                    or_zero(f"sum by (result) (paceline_checkpoints_total{J})", J, "result"),
                    "{{result}}",
                ),
            ),
        ),
        Panel(
            "How many rounds would be lost with all ranks?",
            COUNT,
            "Rounds in the weights less those in the newest checkpoint.",
            (
                Query(
                    f"max(paceline_committed_rounds{J}) - max(paceline_checkpoint_rounds{J})",
                    "not in a checkpoint",
                ),
            ),
            empty="no checkpoints",
        ),
        Panel(
            "What do checkpoints cost?",
            "percentunit",
            "Share of the time of the ranks that write. Copying may hold up a round; writing runs "
            "beside training.",
            (
                Query(f"max(rate(paceline_checkpoint_exposed_seconds_total{J}{RATE}))", "copying"),
                Query(f"max(rate(paceline_checkpoint_hidden_seconds_total{J}{RATE}))", "writing"),
            ),
            empty="no checkpoints",
        ),
        Panel(
            "How much memory do the workers take? The five largest",
            "bytes",
            "Of the container, /dev/shm included; from the kubelet, which Prometheus must scrape "
            "too. A line that grows without end will be killed at the limit.",
            (
                Query(
                    f"{_memory()} and on (pod) topk(5, {_memory(RANGE_END)})",
                    "{{pod}}",
                ),
                Query(f"quantile(0.5, {_memory()})", "median of all"),
            ),
            width=16,
        ),
        Panel(
            "What do these figures cost?",
            "percentunit",
            "Share of a processor: ranks writing them (estimated) and the agent answering scrapes, "
            "mean of the workers. Writing is expected below 0.1 %.",
            (
                Query(f"avg(rate(paceline_telemetry_seconds_total{J}{RATE}))", "writing"),
                Query(f"avg(rate(paceline_scrape_seconds_total{J}{RATE}))", "scraping"),
            ),
        ),
    ),
)

LOWER: Final = (MEMBERS, TRANSPORT, KEEPING)
