"""The dashboard "Paceline cluster": all jobs side by side, and the operator.

`S` selects the jobs of the chosen namespaces. The operator's metrics have controller-runtime's
names, which other operators have too, so its own are told apart by the label that has its
controller's name, and where there is none by the processes that also have a metric of Paceline's.
"""

from __future__ import annotations

from typing import Final

from scripts.grafana import JOB, RATE, Panel, Query, Row

S: Final = '{namespace=~"$namespace"}'
BY: Final = f"by (namespace, {JOB})"
NAME: Final = "{{namespace}}/{{" + JOB + "}}"
CONTROLLER: Final = '{controller="trainingjob"}'
QUEUE: Final = '{name="trainingjob"}'
NONE: Final = "none"


def _ranks(which: str) -> str:
    return f'max {BY} (paceline_world_size_ranks{{namespace=~"$namespace", ranks="{which}"}})'


_ROUNDS: Final = (
    f"max {BY} (sum by (namespace, {JOB}, worker) (rate(paceline_rounds_total{S}{RATE})))"
)
_EXPOSED: Final = f"avg {BY} (rate(paceline_exposed_seconds_total{S}{RATE}))"
_CONNECTED: Final = f"min {BY} (paceline_coordinator_connected_info{S})"

JOBS: Final = Row(
    "Jobs",
    (
        Panel(
            "Which jobs train?",
            "short",
            "One line for each job that is scraped. No rounds per second with members above 0: it "
            "stands still. Coordinator 0: a worker has lost it.",
            (
                Query(_ranks("members"), "members"),
                Query(_ranks("active"), "active"),
                Query(f"max {BY} (paceline_committed_rounds{S})", "rounds"),
                Query(_ROUNDS, "rounds per second"),
                Query(_EXPOSED, "held in step()"),
                Query(_CONNECTED, "coordinator"),
            ),
            kind="table",
            width=24,
            units=(("held in step()", "percentunit"), ("rounds per second", "ops")),
        ),
        Panel(
            "How many rounds per second?",
            "ops",
            "Of each job. A line that ends is a job that has ended; one at 0 stands still.",
            (Query(_ROUNDS, NAME),),
        ),
        Panel(
            "How many samples per second?",
            "ops",
            "Samples applied by all ranks of a job, late ones included.",
            (Query(f"sum {BY} (rate(paceline_samples_total{S}{RATE}))", NAME),),
        ),
        Panel(
            "How many ranks are there?",
            "short",
            "Members of the generation in force.",
            (Query(_ranks("members"), NAME),),
            stacked=True,
        ),
        Panel(
            "How much of the ranks' time is communication that nothing hid?",
            "percentunit",
            "Share of time that loops were held in step(), mean of a job's ranks.",
            (Query(_EXPOSED, NAME),),
        ),
        Panel(
            "Which ranks cost the others most?",
            "percentunit",
            "The ten ranks that others wait for most, in seconds of all others per second.",
            (
                Query(
                    f"topk(10, sum by (namespace, {JOB}, worker) "
                    f"(rate(paceline_blamed_seconds_total{S}{RATE})))",
                    NAME + " {{worker}}",
                ),
            ),
            empty=NONE,
        ),
        Panel(
            "Where do samples get lost?",
            "short",
            "Samples never applied, so far, of the workers that run now.",
            (
                Query(
                    f"sum by (namespace, {JOB}, reason) (paceline_samples_dropped_total{S})",
                    NAME + ": {{reason}}",
                ),
            ),
            empty=NONE,
        ),
        Panel(
            "Which jobs lose ranks?",
            "short",
            "Ranks left out so far, drained ones not counted, as seen by the rank of each job that "
            "has lived longest.",
            (
                Query(
                    f"max {BY} (sum by (namespace, {JOB}, worker) "
                    '(paceline_left_total{namespace=~"$namespace", why!="leave"}))',
                    NAME,
                ),
            ),
            empty=NONE,
        ),
        Panel(
            "Which transports are in use?",
            "short",
            "Ranks by transport, for the largest buffers.",
            (
                Query(
                    "count by (transport, algorithm) (paceline_transport_selected_info"
                    '{namespace=~"$namespace", size_class="1MiB"} == 1)',
                    "{{transport}} {{algorithm}}",
                ),
            ),
            stacked=True,
        ),
        Panel(
            "Where do checkpoints fail?",
            "short",
            "Checkpoints not written, so far. skipped: the one before was not on the disk yet.",
            (
                Query(
                    f"sum by (namespace, {JOB}, result) (paceline_checkpoints_total"
                    '{namespace=~"$namespace", result!="written"})',
                    NAME + ": {{result}}",
                ),
            ),
            empty=NONE,
        ),
    ),
)


def _operator_quantile(q: float, histogram: str, selector: str) -> str:
    return f"histogram_quantile({q:g}, sum by (le) (rate({histogram}_bucket{selector}{RATE})))"


OPERATOR: Final = Row(
    "Operator",
    (
        Panel(
            "Is there a leader?",
            "short",
            "Operators that lead: 1, or one for each operator with a scope.manager of its own. "
            "Training goes on without; nothing is started or replaced.",
            (Query(f"sum(leader_election_master_status{QUEUE})", "leaders"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "What does the operator look after?",
            "short",
            "Jobs and pods in its memory, and coordinators that answer it. Fewer coordinators than "
            "running jobs for long: the operator does not reach them on port 7070.",
            (
                Query("max(paceline_operator_jobs)", "jobs"),
                Query("max(paceline_operator_pods)", "pods"),
                Query("max(paceline_operator_coordinators_connected)", "coordinators"),
            ),
            kind="stat",
            width=4,
        ),
        Panel(
            "In which state are the jobs?",
            "short",
            "As in the column State of kubectl get tj, of jobs without a worker too. What is not "
            "Starting, Training, Resizing, Suspended or an end is a reason of Degraded.",
            (Query("max by (state) (paceline_operator_jobs_in_state)", "{{state}}"),),
            stacked=True,
            width=16,
        ),
        Panel(
            "How many decisions, and how many fail?",
            "ops",
            "A decision looks at one job and writes what is missing. error: a fault of the "
            "operator, with a traceback in its log.",
            (
                Query(
                    f"sum by (result) (rate(controller_runtime_reconcile_total{CONTROLLER}{RATE}))",
                    "{{result}}",
                ),
            ),
        ),
        Panel(
            "How long does a decision take?",
            "s",
            "From its start to its last write.",
            tuple(
                Query(
                    _operator_quantile(q, "controller_runtime_reconcile_time_seconds", CONTROLLER),
                    f"{q * 100:g} %",
                )
                for q in (0.5, 0.95, 0.99)
            ),
        ),
        Panel(
            "What is in the queue?",
            "short",
            "Jobs that a decision is due for, now or later, those being decided, and those put in "
            "per second. Whether it keeps up is in the waiting time beside.",
            (
                Query(f"sum(workqueue_depth{QUEUE})", "waiting"),
                Query(f"sum(controller_runtime_active_workers{CONTROLLER})", "being decided"),
                Query(f"sum(rate(workqueue_adds_total{QUEUE}{RATE}))", "put in per second"),
            ),
        ),
        Panel(
            "How long does a job wait for its decision?",
            "s",
            "From due to begun. Long: the operator has too little CPU, or decisions take long.",
            tuple(
                Query(
                    _operator_quantile(q, "workqueue_queue_duration_seconds", QUEUE),
                    f"{q * 100:g} %",
                )
                for q in (0.5, 0.99)
            ),
        ),
        Panel(
            "What does the operator ask of the API server?",
            "reqps",
            "Requests by verb and answer. 409 is in order (somebody else wrote first); 403 is a "
            "missing right; 429 and 5xx are the server's.",
            (
                Query(
                    "sum by (method, code) "
                    f"(rate(rest_client_requests_total{RATE}) and on (instance) "
                    "paceline_operator_jobs)",
                    "{{method}} {{code}}",
                ),
            ),
        ),
        Panel(
            "Do the watches live?",
            "s",
            "Seconds since the last sign of life of the watch of each kind. The server sends one "
            "a minute; at 100 the watch is opened anew.",
            (Query("max by (kind) (paceline_operator_watch_age_seconds)", "{{kind}}"),),
        ),
        Panel(
            "What do the watches bring?",
            "ops",
            "Events per second by kind, and how often a watch was opened anew. The server ends one "
            "every fifty minutes by itself.",
            (
                Query(
                    f"sum by (kind) (rate(paceline_operator_watch_events_total{RATE}))",
                    "{{kind}}: events",
                ),
                Query(
                    f"sum by (kind, cause) (rate(paceline_operator_watch_restarts_total{RATE}))",
                    "{{kind}} opened anew: {{cause}}",
                ),
            ),
        ),
    ),
)
