"""The catalog of a worker's metrics, as data: name, kind, labels with all values, help and writer.

The layout of the shared memory (`records`), the page that Prometheus scrapes (`collector`) and the
reference in docs/ follow from this list, so a new metric is one entry here. A label has a fixed set
of values: never a step, a round or a name that grows. Job, namespace, pod and node come from the
scrape. `worker` (slot.process) is added to each series of a rank and stays the same when the rank
is restarted.

scripts/metrics_reference.py generates docs/reference/metrics.md from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import product
from typing import Final

from paceline_api.types.enums import Mode, Network, Wire

from paceline.core.agent.supervise import PlacePhase
from paceline.core.anatomy.dissect import Part
from paceline.core.anatomy.samples import FIGURES_MAX
from paceline.core.collectives.conduct import Bits
from paceline.core.collectives.schedules import ALGORITHMS
from paceline.core.collectives.select import CLASS_NAMES, NATIVE
from paceline.core.protocol.records import DROP_MEANINGS, DropReason, GivenUp, Trigger
from paceline.core.status import Fact
from paceline.refusals import Entry, RefusalReason


class MetricKind(StrEnum):
    """The kind of a metric, as in Prometheus."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Writer(StrEnum):
    """The writer of a metric. Records have no locks, so each metric has exactly one."""

    MAIN = "main"
    """Main thread of the rank: the user's loop, inside calls of the runtime."""
    COMM = "comm"
    """Communication thread of the rank. In a streamed round its data thread writes the counters of
    the transfers in its place."""
    AGENT = "agent"
    """The agent itself, at each scrape."""


FIGURE: Final = "figure"
"""Label of a script's own metrics. Its values are known only at run time. So the record keeps the
names of the first `samples.FIGURES_MAX`, and numbers represent them until the page is made."""

PEER: Final = "peer"
"""Label of a rank that was waited for: slot.process. For each worker the PEERS_MAX peers that cost
it most are shown; they may be others at the next scrape."""
PEERS_MAX: Final = 8
"""Upper bound on the peers that are shown for a worker."""

LABELS: Final[Mapping[str, tuple[str, ...]]] = {
    FIGURE: tuple(map(str, range(FIGURES_MAX))),
    PEER: tuple(map(str, range(PEERS_MAX))),
    "part": tuple(Part),
    "overlap": ("exposed", "hidden"),
    "free_of": ("lateness", "network"),
    "mode": tuple(Mode),
    "trigger": tuple(Trigger),
    "reason": tuple(DropReason),
    "cause": tuple(GivenUp),
    "kind": ("fresh", "late"),
    "ranks": ("members", "active"),
    "why": ("leave", "dead", "silent"),
    "phase": ("detect", "prepare", "wire", "resume"),
    "transport": ("mpi", "gloo", "nccl", "shm", "hier:mpi", "hier:gloo"),
    "algorithm": (*ALGORITHMS, NATIVE),
    "size_class": CLASS_NAMES,
    "wire": (*Wire, "none"),
    "bits": tuple(Bits),
    "state": tuple(PlacePhase),
    "carrier": tuple(network for network in Network if network),
    "result": ("written", "failed", "skipped"),
    "entry": tuple(Entry),
    "refusal": tuple(RefusalReason),
}
"""All values of each label."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the catalog."""

    name: str
    kind: MetricKind
    writer: Writer
    help: str
    """Help text: the meaning of the value, then each label with the meaning of its values. One
    line."""
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of the buckets without +Inf."""
    fact: str = ""
    """Name under which the rank reports the value to the coordinator as well (`core.status.Fact`),
    without the value of the first label, which is appended; empty if it does not. Series that
    differ in other labels only are summed."""
    once: bool = False
    """True if a pod has one value, without the label `worker`; False if each rank has its own."""

    def children(self) -> tuple[tuple[str, ...], ...]:
        """Return all combinations of label values, in a fixed order."""
        return tuple(product(*(LABELS[label] for label in self.labels)))


class _Declares:
    """Makes the entries of one writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def counter(
        self, name: str, text: str, *labels: str, fact: str = "", once: bool = False
    ) -> Metric:
        return Metric(name, MetricKind.COUNTER, self._writer, text, labels, fact=fact, once=once)

    def gauge(
        self, name: str, text: str, *labels: str, fact: str = "", once: bool = False
    ) -> Metric:
        return Metric(name, MetricKind.GAUGE, self._writer, text, labels, fact=fact, once=once)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Metric:
        return Metric(name, MetricKind.HISTOGRAM, self._writer, text, (), buckets)


_ROUND_S: Final = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_STEP_S: Final = (0.003, 0.01, 0.03, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0, 60.0)
_RESIZE_S: Final = (0.03, 0.1, 0.2, 0.5, 1.0, 3.0, 10.0, 30.0, 60.0, 300.0)
_SHARE: Final = (0.1, 0.25, 0.4, 0.5, 0.6, 0.75, 0.85, 0.9, 0.95, 0.999)
_AGE: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 16.0, 32.0, 64.0)

_main, _comm, _agent = _Declares(Writer.MAIN), _Declares(Writer.COMM), _Declares(Writer.AGENT)

CATALOG: Final[tuple[Metric, ...]] = (
    # ---- steps of the user's loop: does it make progress, where does its time go ----
    _main.counter(
        "paceline_steps_total",
        "Steps of the loop that announced a gradient. kind: fresh (applied in its own round), late "
        "(kept for a later round, or dropped).",
        "kind",
    ),
    _main.histogram(
        "paceline_step_duration_seconds",
        "From the end of one step() to the end of the next: the loop's time per step. After "
        "pl.evaluating() it begins anew.",
        _STEP_S,
    ),
    _main.counter(
        "paceline_compute_seconds_total",
        "Time of the loop between two step(): loading, forward, backward; without waiting for "
        "leases and without pl.evaluating().",
    ),
    _main.counter(
        "paceline_exposed_seconds_total",
        "Time that the loop was held in step(): communication that nothing hid.",
    ),
    _main.counter(
        "paceline_data_wait_seconds_total",
        "Time that the loop waited for a lease, that is, for data to be dealt to it. Loading them "
        "is not in it.",
    ),
    _comm.counter(
        "paceline_weight_copies_total",
        "Copies of the committed weights into the model, but for the last one, at its end.",
    ),
    _comm.counter("paceline_weight_copy_seconds_total", "Time for these copies, on the host."),
    # ---- the whole job: progress and the script's metrics, from its lowest active rank ----
    _comm.gauge(
        "paceline_progress_ratio",
        "How far the job is, from 0 to 1. Like the four after it, it is of the whole job, told by "
        "one of its ranks; no series where nothing says where the end is.",
    ),
    _comm.gauge("paceline_epoch_number", "Epochs done so far, with the part of the present one."),
    _comm.gauge("paceline_remaining_seconds", "Time to the end, at the speed of the last minutes."),
    _comm.gauge(
        "paceline_figure_number",
        "Sum of value x weight of what the script has reported with pl.log, over all ranks, as far "
        "as its gradients were applied. figure: the first names of the script.",
        FIGURE,
    ),
    _comm.gauge(
        "paceline_figure_weight_number",
        "Sum of the weights. The increase of the sum by that of the weights is the figure's mean.",
        FIGURE,
    ),
    # ---- rounds: why do they start, which rank waits for which, what does a transfer cost ----
    _comm.counter(
        "paceline_rounds_total",
        "Rounds applied as they came; those in the state that a joiner gets are not in it. "
        "trigger: all (everybody arrived), quorum, deadline, initiator (the drawn rank), tail "
        "(nothing more to come), bench (a silent rank was left out), void (streamed and given up).",
        "mode",
        "trigger",
    ),
    _comm.counter(
        "paceline_rounds_streamed_total",
        "Rounds of which segments were reduced while backward() still ran.",
    ),
    _comm.counter(
        "paceline_rounds_given_up_total",
        "Streamed rounds that this rank made void. cause: late (it kept the others waiting), "
        "dropped (the batch), nonfinite, rewritten (a gradient, after it was handed over).",
        "cause",
        fact=Fact.GIVEN_UP,
    ),
    _comm.counter(
        "paceline_transfer_hidden_seconds_total",
        "Part of the transfers of streamed rounds that ran beside backward() here.",
    ),
    _comm.histogram(
        "paceline_round_duration_seconds",
        "From one applied round to the next: the gap between two updates, a change of the "
        "generation included.",
        _ROUND_S,
    ),
    _comm.histogram(
        "paceline_round_wait_seconds",
        "From the own fresh arrival until GO reached this rank: waiting for others, next to "
        "nothing for the last one.",
        _ROUND_S,
    ),
    _comm.histogram(
        "paceline_round_transfer_seconds",
        "From GO on this rank to the complete sum: moving and adding data, without waiting for "
        "arrivals.",
        _ROUND_S,
    ),
    _comm.counter(
        "paceline_update_seconds_total",
        "Time to take a round's sum over, clip it and step the optimizer, on the host.",
    ),
    _comm.counter(
        "paceline_payload_bytes_total",
        "Bytes of the buffers reduced, before any overhead of the algorithm.",
        "transport",
        "algorithm",
    ),
    _comm.counter(
        "paceline_transfer_seconds_total",
        "Time to reduce these bytes; their quotient is the algorithm's bandwidth.",
        "transport",
        "algorithm",
    ),
    # ---- stragglers: which rank is late, by how much, what does it cost the others ----
    _comm.histogram(
        "paceline_arrival_lag_seconds",
        "Own fresh arrival after the first fresh one of the round, on the starter's clock.",
        _ROUND_S,
    ),
    _comm.counter(
        "paceline_arrivals_last_total",
        "Rounds with several fresh ranks of which this one arrived last.",
    ),
    _comm.counter(
        "paceline_blamed_seconds_total",
        "In those rounds: from the last arrival of anybody else to its own, times the other fresh "
        "ranks.",
    ),
    _comm.counter(
        "paceline_wait_avoided_seconds_total",
        "Waiting of this rank that the mode has saved against Full: it had arrived, the round "
        "started without a rank that had not, and until the next announcement of that one this "
        "rank did not wait. Not counted if that one was fresh again in the very next round, nor "
        "with collective.pipeline, where a rank does not wait there in Full either.",
    ),
    _comm.counter(
        "paceline_shadow_waited_seconds_total",
        "Waiting for the last arrival in rounds that ran in Shadow, summed over all ranks, from "
        "the second of them that this rank applied. All ranks that live equally long say the same.",
    ),
    _comm.counter(
        "paceline_shadow_saved_seconds_total",
        "Part of it that another mode would have saved. mode: the one meant. From the arrivals as "
        "they were: it cannot know when a rank that nobody waits for would arrive next.",
        "mode",
    ),
    _comm.counter(
        "paceline_shadow_late_gradients_total",
        "Gradients of these rounds that would have missed their round in another mode. mode: the "
        "one meant.",
        "mode",
    ),
    _comm.histogram(
        "paceline_participation_ratio",
        "Contributors of a round as a share of its active ranks.",
        _SHARE,
    ),
    _comm.histogram(
        "paceline_contribution_age_rounds",
        "Age of what this rank had in a round: version applied to less that of its oldest batch; "
        "0 = computed on the newest weights.",
        _AGE,
    ),
    _comm.counter(
        "paceline_jumps_total",
        "Times that this rank was late and went on from the newest committed weights with its work "
        "still to be applied.",
    ),
    # ---- samples: were they applied, late, dropped or dealt again (promise I1) ----
    _comm.counter(
        "paceline_samples_total",
        "Samples of this rank applied. kind: fresh, late (in a later round than their own).",
        "kind",
    ),
    _comm.counter(
        "paceline_samples_dropped_total",
        "Samples of this rank that are never applied. reason: "
        + ", ".join(f"{reason} ({meaning})" for reason, meaning in DROP_MEANINGS.items())
        + ".",
        "reason",
    ),
    _comm.counter(
        "paceline_samples_redealt_total",
        "Samples that anybody held when it was left out or benched, and that others got; the same "
        "figure on all ranks.",
    ),
    # ---- membership: how often does it change, what does a change cost ----
    _comm.gauge(
        "paceline_generation_number",
        "Counter of the generation in force; begins anew with each incarnation.",
    ),
    _comm.gauge("paceline_incarnation_number", "Incarnation of the coordinator that formed it."),
    _comm.gauge("paceline_rank_index", "Index of this rank in the generation in force."),
    _comm.gauge("paceline_committed_rounds", "Rounds applied to the committed weights."),
    _comm.gauge(
        "paceline_world_size_ranks",
        "Ranks of the generation in force. ranks: members, active (neither joining nor benched).",
        "ranks",
    ),
    _comm.counter("paceline_generations_total", "Generations that this rank has started."),
    _comm.counter(
        "paceline_joined_total",
        "Ranks that joined in these generations, after the first one of this rank.",
    ),
    _comm.counter(
        "paceline_left_total",
        "Ranks that were left out of them. why: leave (drained), dead, silent, replaced.",
        "why",
    ),
    _comm.counter("paceline_benched_total", "Times that this rank was benched."),
    _comm.histogram(
        "paceline_resize_duration_seconds",
        "From the last round before a change of the generation to the first round after it, on a "
        "rank that lived through both.",
        _RESIZE_S,
    ),
    _comm.counter(
        "paceline_resize_phase_seconds_total",
        "The same, in parts. phase: detect (last round to promise), prepare (promise to COMMIT), "
        "wire (COMMIT to started), resume (started to the first round).",
        "phase",
    ),
    # ---- transport: which one is in use, is it the right one ----
    _comm.gauge(
        "paceline_transport_selected_info",
        "1 for the algorithm chosen by measurement for buffers of this size.",
        "transport",
        "algorithm",
        "size_class",
        fact=Fact.CARRIED,
    ),
    _comm.gauge(
        "paceline_transport_sums_info",
        "1 for how each chosen transport sums in the present group. wire: what float32 travels as, "
        "none where nothing travels. bits: why all ranks get the same ones: order (of the "
        "additions), compared (the group tried the library's own allreduce), one_rank (which gave "
        "other bits, so one rank reduces and broadcasts).",
        "transport",
        "wire",
        "bits",
    ),
    _comm.gauge(
        "paceline_transport_regret_seconds",
        "What this rank loses per reduction by the choice, which is made from the means over all "
        "ranks: its own measurement of the chosen one minus its own best, at the same payload.",
        "size_class",
    ),
    _comm.counter(
        "paceline_transport_errors_total",
        "Reductions that failed or were abandoned.",
        "transport",
    ),
    _agent.gauge(
        "paceline_transport_carrier_info",
        "1 for what carries the data channel to other pods, found out from open devices and port "
        "counters; no series until enough has moved. carrier: TCP, RDMA, GPUDirect.",
        "carrier",
    ),
    _comm.counter(
        "paceline_refused_total",
        "Messages and connections that this rank refused; the job goes on. entry: rendezvous "
        "(where ranks meet before a data channel is wired), peers (announcements, GO and states); "
        "others are not a rank's. refusal: other_user, unauthenticated (no proof that it knows the "
        "job's token), unknown_peer (meant for another rank), too_large, malformed, too_slow, "
        "too_many (strangers at once).",
        "entry",
        "refusal",
    ),
    # ---- checkpoints: are they written, what do they cost ----
    _comm.counter(
        "paceline_checkpoints_total",
        "Checkpoints that this rank was to write. result: written, failed (the disk; training goes "
        "on), skipped (the one before was not on the disk yet).",
        "result",
        fact=Fact.SAVES,
    ),
    _comm.gauge(
        "paceline_checkpoint_rounds",
        "Rounds in the weights of the last one that it published.",
        fact=Fact.SAVED_VERSION,
    ),
    _comm.counter(
        "paceline_checkpoint_exposed_seconds_total",
        "Time in which the communication thread copied the state: what a round may wait for.",
        fact=Fact.SAVE_EXPOSED_S,
    ),
    _comm.counter(
        "paceline_checkpoint_hidden_seconds_total",
        "Time in which the copies were written, beside training.",
        fact=Fact.SAVE_HIDDEN_S,
    ),
    # ---- anatomy: the parts of a step; means of the last steps, computed by the agent ----
    _agent.gauge(
        "paceline_anatomy_step_seconds",
        "Mean of one of the last steps (64 at most), in parts that add up to it. part: loading (in "
        "our loader), forward, backward (with the loss), script (its own work between), lease "
        "(waiting for data to be dealt); and held in step(): blocked (until the last rank had "
        "arrived), reduction (what was exposed of it), update, copy, protocol (the rest).",
        "part",
    ),
    _agent.gauge(
        "paceline_anatomy_reduction_seconds",
        "Reduction of segments of this size, per step. overlap: exposed (the loop was held "
        "meanwhile), hidden (it computed).",
        "overlap",
        "size_class",
    ),
    _agent.gauge(
        "paceline_anatomy_blocked_seconds",
        "Part blocked of a step, by whom this rank waited for. peer: the worker that arrived last; "
        "of many, those that cost most.",
        PEER,
    ),
    _agent.gauge(
        "paceline_anatomy_gap_seconds",
        "From the end of one update to the beginning of the next: what work in the background may "
        "take.",
    ),
    _agent.gauge(
        "paceline_anatomy_ideal_seconds",
        "What a step would take. free_of: lateness (nobody else were late), network (reductions "
        "took no time that is exposed).",
        "free_of",
    ),
    # ---- the agent, and the cost of all this ----
    _agent.counter(
        "paceline_agent_refused_total",
        "The same for the agent. entry: rank_pipe (reports of its ranks), agent_http (metrics and "
        "steps); the others are not an agent's. refusal: as above.",
        "entry",
        "refusal",
        once=True,
    ),
    _agent.counter(
        "paceline_telemetry_seconds_total",
        "Time that ranks spent on writing these figures, estimated: observations of histograms x "
        "measured cost of one with the counters that come with it.",
        once=True,
    ),
    _agent.counter(
        "paceline_scrape_seconds_total",
        "Time that the agent spent on this page.",
        once=True,
    ),
    _agent.counter("paceline_rank_restarts_total", "Processes started again in place."),
    _agent.gauge(
        "paceline_rank_state_info",
        "1 for the state of the process in this place.",
        "state",
    ),
    _agent.gauge(
        "paceline_coordinator_connected_info",
        "1 while the coordinator is there.",
        once=True,
    ),
    _agent.counter(
        "paceline_coordinator_connections_total",
        "Connections to the coordinator.",
        once=True,
    ),
)
"""All metrics, in the order of the page."""

BY_NAME: Final[Mapping[str, Metric]] = {metric.name: metric for metric in CATALOG}
"""The metrics by name."""
