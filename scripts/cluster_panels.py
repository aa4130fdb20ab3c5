"""The dashboard "Paceline cluster": all jobs side by side, and the operator.

`S` selects the jobs of the chosen namespaces. The operator's metrics have controller-runtime's
names, which other operators use too. So its own are selected by the label with its controller's
name, or, where that label is missing, by the processes that also export a metric of Paceline's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from scripts.grafana import (
    COUNT,
    JOB,
    RANGE_END,
    RATE,
    Link,
    Panel,
    Query,
    Row,
    or_zero,
    worst,
)

S: Final = '{namespace=~"$namespace"}'
BY: Final = f"by (namespace, {JOB})"
NAME: Final = "{{namespace}}/{{" + JOB + "}}"
CONTROLLER: Final = '{controller="trainingjob"}'
QUEUE: Final = '{name="trainingjob"}'
JOBS_DRAWN: Final = 10
TO_JOB: Final = Link(
    "This job",
    "/d/paceline-job?var-datasource=${datasource}&var-scrape=${scrape}"
    f"&var-namespace=${{__field.labels.namespace}}&var-job=${{__field.labels.{JOB}}}"
    "&${__url_time_range}",
)
TO_JOB_OF_ROW: Final = Link(
    "This job",
    "/d/paceline-job?var-datasource=${datasource}&var-scrape=${scrape}"
    "&var-namespace=${__data.fields.namespace}&var-job=${__data.fields.job}"
    "&${__url_time_range}",
    column="job",
)


def _ranks(which: str) -> str:
    """Return the query for the number of ranks in a state, one value per job."""
    return f'max {BY} (paceline_world_size_ranks{{namespace=~"$namespace", ranks="{which}"}})'


def _rounds(window: str = RATE) -> str:
    each = f"sum by (namespace, {JOB}, worker) (rate(paceline_rounds_total{S}{window}))"
    return f"max {BY} ({each})"


def _samples(window: str = RATE) -> str:
    return f"sum {BY} (rate(paceline_samples_total{S}{window}))"


def _exposed(window: str = RATE) -> str:
    return f"avg {BY} (rate(paceline_exposed_seconds_total{S}{window}))"


def _blamed(window: str = RATE) -> str:
    """Return the query for the blamed share of the time of each other rank."""
    ranks = f'max {BY} (paceline_world_size_ranks{{namespace=~"$namespace", ranks="active"}})'
    return (
        f"sum by (namespace, {JOB}, worker, pod, node) "
        f"(rate(paceline_blamed_seconds_total{S}{window})) / "
        f"on (namespace, {JOB}) group_left () clamp_min({ranks} - 1, 1)"
    )


def _of_jobs(expr: str, score: str) -> Query:
    """Return the query for the ten jobs with the highest score in the shown time."""
    return Query(worst(expr, score, f"namespace, {JOB}", JOBS_DRAWN), NAME)


_CONNECTED: Final = f"min {BY} (paceline_coordinator_connected_info{S})"


def _column(expr: str) -> str:
    """Return a query with a line for each job that is scraped.

    A table takes its columns from the answers.

    Returns:
        A PromQL expression.
    """
    return f"({expr}) or on (namespace, {JOB}) (0 * {_CONNECTED})"


def _rare(expr: Callable[[str], str]) -> str:
    """Return the query for the ten jobs with the highest count at the end of the shown time.

    `expr` returns the expression for a modifier of its selector.

    Returns:
        A PromQL expression.
    """
    chosen = f"({expr('')}) and topk({JOBS_DRAWN}, {expr(' @ end()')})"
    return or_zero(chosen, S, JOB)


JOBS: Final = Row(
    "Jobs",
    (
        Panel(
            "Which jobs train?",
            COUNT,
            "One line for each job that is scraped. No rounds per second with members above 0: it "
            "stands still. Coordinator 0: a worker has lost it.",
            (
                Query(_column(_ranks("members")), "members"),
                Query(_column(_ranks("active")), "active"),
                Query(_column(f"max {BY} (paceline_committed_rounds{S})"), "rounds"),
                Query(_column(_rounds()), "rounds per second"),
                Query(_column(_exposed()), "held in step()"),
                Query(_CONNECTED, "coordinator"),
            ),
            kind="table",
            width=24,
            units=(
                ("members", COUNT),
                ("active", COUNT),
                ("rounds", COUNT),
                ("held in step()", "percentunit"),
                ("coordinator", COUNT),
            ),
            links=(TO_JOB_OF_ROW,),
        ),
        Panel(
            "How many rounds per second? Ten jobs",
            "suffix:rounds/s",
            "Of the ten fastest jobs. A line that ends is a job that has ended; one at 0 stands "
            "still.",
            (_of_jobs(_rounds(), _rounds(RANGE_END)),),
            links=(TO_JOB,),
        ),
        Panel(
            "How many samples per second? Ten jobs",
            "suffix:samples/s",
            "Samples applied by all ranks of a job, late ones included; the ten with most.",
            (_of_jobs(_samples(), _samples(RANGE_END)),),
            links=(TO_JOB,),
        ),
        Panel(
            "How many ranks are there? Ten jobs",
            COUNT,
            "Members of the generation in force; the ten largest jobs.",
            (
                _of_jobs(
                    _ranks("members"),
                    f'max {BY} (max_over_time(paceline_world_size_ranks{{namespace=~"$namespace", '
                    f'ranks="members"}}{RANGE_END}))',
                ),
            ),
            stacked=True,
            links=(TO_JOB,),
        ),
        Panel(
            "How much communication does nothing hide? Ten jobs",
            "percentunit",
            "Share of time that loops were held in step(), mean of a job's ranks; the ten worst. "
            "An alert begins at the line.",
            (_of_jobs(_exposed(), _exposed(RANGE_END)),),
            highest=1.0,
            line=0.3,
            links=(TO_JOB,),
        ),
        Panel(
            "Which ranks cost the others most? Ten ranks",
            "percentunit",
            "Share of the time of each other rank of the job; the ten worst of the shown time. An "
            "alert begins at the line.",
            (
                Query(
                    worst(
                        _blamed(), _blamed(RANGE_END), f"namespace, {JOB}, worker, pod", JOBS_DRAWN
                    ),
                    NAME + " {{pod}} ({{worker}}) on {{node}}",
                ),
            ),
            line=0.2,
            links=(TO_JOB,),
        ),
        Panel(
            "Where do samples get lost?",
            COUNT,
            "Samples never applied, so far, of the workers that run now.",
            (
                Query(
                    _rare(
                        lambda at: (
                            f"sum by (namespace, {JOB}, reason) "
                            f"(paceline_samples_dropped_total{S}{at})"
                        )
                    ),
                    NAME + ": {{reason}}",
                ),
            ),
            links=(TO_JOB,),
        ),
        Panel(
            "Which jobs lose ranks?",
            COUNT,
            "Ranks left out so far, drained ones not counted, as seen by the rank of each job that "
            "has lived longest.",
            (
                Query(
                    _rare(
                        lambda at: (
                            f"max {BY} (sum by (namespace, {JOB}, worker) "
                            f'(paceline_left_total{{namespace=~"$namespace", why!="leave"}}{at}))'
                        )
                    ),
                    NAME,
                ),
            ),
            links=(TO_JOB,),
        ),
        Panel(
            "Which transports are in use?",
            COUNT,
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
            COUNT,
            "Checkpoints not written, so far. skipped: the one before was not on the disk yet.",
            (
                Query(
                    _rare(
                        lambda at: (
                            f"sum by (namespace, {JOB}, result) (paceline_checkpoints_total"
                            f'{{namespace=~"$namespace", result!="written"}}{at})'
                        )
                    ),
                    NAME + ": {{result}}",
                ),
            ),
            links=(TO_JOB,),
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
            COUNT,
            "Operators that lead: 1, or one for each operator with a scope.manager of its own. "
            "Training goes on without; nothing is started or replaced.",
            (Query(f"sum(leader_election_master_status{QUEUE})", "leaders"),),
            kind="stat",
            width=4,
        ),
        Panel(
            "Jobs, pods, coordinators",
            COUNT,
            "Jobs and pods in its memory, and coordinators that answer it. Fewer coordinators than "
            "running jobs for long: the operator does not reach them on port 7070.",
            (
                Query("max(paceline_operator_jobs)", "jobs"),
                Query("max(paceline_operator_pods)", "pods"),
                Query("max(paceline_operator_coordinators_connected)", "coordinators"),
            ),
            kind="stat",
            width=4,
            name_too=True,
        ),
        Panel(
            "In which state are the jobs?",
            COUNT,
            "As in the column State of kubectl get tj, of jobs without a worker too. What is not "
            "Starting, Training, Resizing, Suspended or an end is a reason of Degraded.",
            (Query("max by (state) (paceline_operator_jobs_in_state)", "{{state}}"),),
            stacked=True,
            width=16,
        ),
        Panel(
            "How many decisions, and how many fail?",
            "suffix:decisions/s",
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
            COUNT,
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
            "suffix:events/s",
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
            width=24,
            height=6,
        ),
    ),
)
