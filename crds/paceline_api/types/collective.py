"""`spec.collective`: when a round starts, what happens to late gradients, and how they move."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Strict

from paceline_api.types.enums import (
    Backend,
    BufferPolicy,
    MaxAgePolicy,
    Mode,
    Normalisation,
    Overlap,
    Pacing,
    Wire,
)
from paceline_api.types.model import (
    AutoDuration,
    Count,
    Duration,
    Flag,
    Grace,
    Model,
    Number,
    Positive,
    Quorum,
    behaviour,
)

Factor = Annotated[Number, Field(ge=0, le=100)]
Weight = Annotated[Number, Field(ge=0, le=1)]
Batches = Annotated[int, Strict(), Field(ge=0, le=1)]
SegmentBytes = Annotated[int, Strict(), Field(ge=2**16, le=2**30)]


class Buffers(Model):
    """The model's buffers that are not parameters, such as the running averages of BatchNorm."""

    policy: BufferPolicy | None = behaviour(BufferPolicy.AVERAGE)
    """Average: floating-point buffers are averaged over the ranks, integer ones come from the
    lowest rank. Local: each rank keeps its own, and the exported model has those of rank 0."""

    every_rounds: Positive | None = behaviour(100)
    """Rounds between two averages; there is one more at the end of the job."""


class Collective(Model):
    """How the ranks combine their gradients in rounds."""

    backend: Backend | None = behaviour(Backend.AUTO)
    """What moves the gradients. auto: nccl where each rank has a GPU of its own that holds all of
    its parameters; else the fastest as measured at the start of mpi, gloo, shared memory where all
    ranks are in one pod, and shared memory in the pods with mpi or gloo between them; in a cluster
    mpi where spec.fabric.required is RDMA, and nccl where it is GPUDirect. shm: shared memory only,
    for jobs of one pod. All but nccl move GPU memory by way of host memory, which is slow."""

    mode: Mode | None = behaviour(Mode.QUORUM)
    """When a round starts. Full: all active ranks have arrived (plain synchronous training).
    Quorum: `quorum` ranks have arrived. Majority: more than half. Solo: the first. Deadline: all,
    or `deadline` after the first if at least `quorum` are there. Shadow: runs Full and reports
    what the other modes would have saved. A gradient that comes late counts in a later round.
    A change takes effect at a round that all ranks agree on."""

    quorum: Quorum | None = behaviour("75%")
    """Active ranks (processes, not replicas) that a round waits for: a number, or a percentage of
    the active ranks, rounded up. Used by Quorum, and as the minimum of Deadline. With fewer
    active ranks than the number, a round waits for all of them and the condition Degraded says
    so."""

    random_initiator: Flag | None = behaviour(False)
    """Majority only: a rank drawn for each round may start it as soon as it has arrived, as
    published for eager-SGD. Half of the ranks take part on average, not in every round."""

    deadline: AutoDuration | None = None
    """Deadline only, and required there: time after the first arrival, such as 50ms, or auto, the
    median of recent arrivals plus deadlineFactor times their median absolute deviation."""

    deadline_factor: Factor | None = behaviour(3.0)
    """The factor in `deadline: auto`. Larger waits longer for stragglers."""

    grace: Grace | None = behaviour("5%")
    """Time that a round still waits after its condition holds, for ranks that began their step with
    the others: a duration, or a percentage of the median round."""

    warmup_rounds: Count | None = behaviour(0)
    """Rounds at the start of the job that run in Full, whatever the mode."""

    full_every: Count | None = behaviour(0)
    """Every N-th round runs in Full, which bounds how late a gradient can be; 0: none."""

    max_age: Count | None = behaviour(4)
    """Updates of the weights by which a gradient may be late and still count in full; 0 means any
    number. With pacing Round each round is an update."""

    max_age_policy: MaxAgePolicy | None = behaviour(MaxAgePolicy.DROP)
    """What happens to a gradient older than maxAge. Drop: it is left out and counted as dropped.
    Decay: it is weighed by decayFactor for each update above maxAge. Wait: the round waits for its
    rank before that happens, so one slow rank can hold up all others."""

    decay_factor: Weight | None = behaviour(0.5)
    """Weight for each update above maxAge in `maxAgePolicy: Decay`, from 0 to 1."""

    normalisation: Normalisation | None = behaviour(Normalisation.FIXED)
    """Divisor of a round's sum of gradients. Fixed: the samples of a round in which all take part,
    so that gradients kept for later weigh the same as in synchronous training; where rounds wait
    for everybody, and with pacing Samples, those that are in the update. Applied: these in each
    case. Contributors: the ranks in the update."""

    pacing: Pacing | None = behaviour(Pacing.AUTO)
    """When the optimizer steps. Round: in every round; right for optimizers that are linear in the
    gradient. Samples: each time about the samples of a full round are in. Auto: Round for plain
    SGD, Samples for all other optimizers; the log says at the start which and why."""

    bench_after: AutoDuration | None = behaviour("auto")
    """Silence after which a rank for which all others wait is benched: it keeps its weights up to
    date but gets no data until it reports back. auto: the larger of 60s and 20 median steps."""

    freeze_timeout: Duration | None = behaviour("30s")
    """Silence of a whole process (not only of its training loop) after which its agent ends it
    and starts it again."""

    buffers: Buffers | None = behaviour()
    """The model's buffers that are not parameters, such as the running averages of BatchNorm."""

    segment_bytes: SegmentBytes | None = behaviour()
    """Gradients are reduced in segments of at most so many bytes, those that backward() makes first
    in front; the first segment is about 1 MiB. Smaller ones begin earlier and cost more messages.
    Without it 4 MiB (4194304) where the model is on a GPU, and 25 MiB where the processors that
    compute also reduce. Other names for it: bucket_cap_mb of DDP, the fusion threshold of
    Horovod."""

    wire: Wire | None = behaviour(Wire.FLOAT32)
    """Type in which float32 sums of gradients are sent. BFloat16: half of the bytes; sums are
    float32 at each hop, and what rounding takes away is added in the next round, so that it is
    late and not lost. Takes two more buffers of the model's size. Only over mpi: auto then
    leaves out nccl and gloo, which sum in the type that is sent. Inside a machine, where auto
    sums in shared memory, nothing is sent and nothing is rounded."""

    overlap: Overlap | None = behaviour(Overlap.AUTO)
    """Auto: where all ranks are about as fast, gradients are reduced while backward() still runs,
    segment by segment; a round that was started too early is aborted and repeated. Never: only
    after backward(). The sums have the same bits either way."""

    pipeline: Batches | None = behaviour(0)
    """1: step() returns once the gradient is announced, and the weights follow with the next
    step(), so that the whole reduction is hidden behind the next batch. Each gradient is then
    computed on weights that lack the one before, which costs a little convergence, and more at high
    learning rates. No round is streamed then (`overlap`). 0: step() waits for its round."""

    hash_every_rounds: Count | None = behaviour(100)
    """Rounds between two comparisons of the ranks' weights; ranks that differ end the job with the
    evidence. 0 never."""
