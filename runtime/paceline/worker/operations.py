"""Communication thread of a rank whose script steps its own optimizers (docs/design/scripts.md).

A round is an operation of the script: the main thread brings flat buffers, this thread sums them
over the data channel in host memory, and the main thread takes the sums. There are no gradients,
weights and optimizers here. The state of a script is read only while its main thread waits in an
operation, through the function that `train.script` has set.
"""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from paceline_api.ids import GenerationId, MemberId

from paceline.clock import now_ns
from paceline.core.messages import PeerMessage, StateTransfer
from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.pending import BufferName, BufferOp, Merge, Scale, Swap, Zero
from paceline.core.protocol.places import Path, Spot
from paceline.core.protocol.records import Go, Operation
from paceline.core.rank import events as ev
from paceline.core.rank.membership import expects
from paceline.errors import StateError
from paceline.transport.base import HOST, Transport
from paceline.transport.native import copies
from paceline.worker.bucket_sums import BucketSums, fill
from paceline.worker.comm_thread import CommThread
from paceline.worker.state.bit_sums import hash_of
from paceline.worker.state.codec import Decoder, Encoder, as_is, as_tensor, read_header
from paceline.worker.state.committed import Bytes
from paceline.worker.state.flat import bytes_of, fill_from_bytes

KEPT_BYTES_MAX: Final = 1 << 20
"""Upper bound on the result of a call that is kept for ranks that join later."""
KEPT_TOTAL_MAX: Final = 64 << 20
"""Upper bound on all kept results together. What comes after it cannot be repeated."""
SETS_MAX: Final = 2
"""Upper bound on the free sets of buffers of one kind of operation: that of the present one, and
that of the last one, whose sums are kept (R7)."""
KINDS_MAX: Final = 8
"""Upper bound on the kinds of operations whose buffers are kept: a script makes few of them."""
NOTHING: Final = (("float32", 1),)
"""Buffers of a round in which no script waits in an operation. Its sum only shows that all ranks
have taken part."""


class Result(NamedTuple):
    """What an operation returned."""

    sums: list[torch.Tensor]
    """The sums, one flat tensor for each part; for a backward pass the averages."""
    contributors: int
    """Number of ranks that took part, those that are late with a step included."""
    missing: int
    """Number of slots that did not take part and whose scripts have not ended."""
    name: str = ""
    """The operation with its arguments, of a result that is kept."""


@dataclass
class ScriptState:
    """The state of a script, as the donor sends it and a rank that joins receives it."""

    header: Any
    """JSON of `train.script.state`."""
    buffers: list[Bytes]
    is_own: bool = False
    """True if whoever loads the state may keep the memory of the buffers."""


@dataclass
class Operations:
    """What the main thread and the communication thread of a script share; guarded by `lock`."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    path: Path[Result] = field(default_factory=Path)
    source: list[torch.Tensor] = field(default_factory=list)
    """Buffers of the operation in which the main thread waits."""
    latest: Result | None = None
    """Result of the last operation that was completed since the main thread began to wait."""
    result: Result | None = None
    """What the main thread takes when it goes on; set when it is let go. Until it has read this,
    the others may already complete the next step without it, which sets `latest`."""
    average: Result | None = None
    """The last backward pass that was averaged. A rank that is late with it takes this (S17.2)."""
    received: ScriptState | None = None
    """State of the donor that was received last."""
    kept_bytes: int = 0
    read_state: Callable[[], tuple[Any, list[torch.Tensor]]] = lambda: (None, [])
    """Returns the script's state, as JSON and tensors. Called while the main thread waits in an
    operation."""
    places: Callable[[Any], dict[int, torch.Tensor]] = lambda _: {}
    """Returns the tensors of the script in which buffers of a state can be received, by the index
    of the buffer, given the header."""
    loads: Callable[[Spot], bool] | None = None
    """Set while the main thread asks for the state: returns True if it loads that of a donor that
    waits at a spot before it does anything else."""
    weights: Callable[[], list[torch.Tensor]] = list
    """Returns the trained parameters, for the hash that ranks compare."""

    def completed(self, go: Go, result: Result) -> None:
        """Record an operation that the job has completed. Communication thread."""
        operation = go.operation
        if operation is None:
            return
        size = sum(each.nbytes for each in result.sums)
        keep = operation.is_call and size <= KEPT_BYTES_MAX
        keep = keep and self.kept_bytes + size <= KEPT_TOTAL_MAX
        spot = Spot(operation.place, operation.number)
        if keep and spot.is_at_point:
            self.kept_bytes += size
            sums = [each.cpu().clone() for each in result.sums]
            result = result._replace(sums=sums, name=operation.name)
        self.path.completed(spot, result, keep=keep)


class ScriptThread(CommThread):
    """Runs the state machine of a rank whose script steps its own optimizers."""

    operations: Operations
    transport: Transport
    bucket_sums: BucketSums
    is_begun = False
    """True once the main thread has begun the job."""
    _copying: tuple[_Copying, ...] = ()
    """States that are copied while the script waits in an operation."""

    def begin_with(self, operations: Operations, transport: Transport) -> None:
        """Give the thread what it needs. Main thread, before the first event."""
        self.operations, self.transport = operations, transport
        self.bucket_sums = BucketSums(self._channel, self._peers.wake)
        self._peers.place = self._place
        self._placed: tuple[StateTransfer | None, dict[int, torch.Tensor]] = None, {}
        """The state that arrives in tensors of the script, and these by the index of their part."""
        self._passed: GenerationId | None = None
        """Generation of the state that this rank has forwarded last."""
        copies.library()  # compiled now if it has to be, so that no round waits for it
        self._scratch: list[torch.Tensor] = []
        self._last: list[torch.Tensor] = []
        """Sums of the operation before, until the next one is complete (R7)."""
        self._averaged: list[torch.Tensor] = []
        """Sums of the last backward pass, until those of the next one are complete."""
        self._late: list[torch.Tensor] = []
        """Sum of the gradients that came too late for their step (S17.2)."""
        self._spare: dict[tuple[tuple[str, int], ...], list[list[torch.Tensor]]] = {}
        """Buffers that are free, by their types and sizes."""
        self.is_begun = True
        self._named_ended: frozenset[MemberId] = frozenset()
        self._results: dict[int, Result] = {}
        """Results of rounds that this rank completed as a passive member."""

    # ---- rounds -------------------------------------------------------------------------------

    @property
    def _streams(self) -> BucketSums | None:
        return self.bucket_sums if self.is_begun else None

    def _reduce(self, effect: ev.Reduce) -> ev.Event | None:
        self._catch_up()
        self._metrics.reducing(effect.go, self.machine.state, now_ns())
        go, begun_ns, scratch = effect.go, now_ns(), self._take_buffers(effect.go.operation)
        source = None
        if effect.source is not None:
            late = effect.source is BufferName.LATE
            source = self._late if late else self.operations.source
        factor = 1.0
        if source is not None and not is_call(go):
            factor = 1 / self.machine.state.log.weigh(go).divisor
        if go.streamed:
            self._scratch = scratch
            self.bucket_sums.reduce(effect, scratch, source, factor)
            return None
        if source is None:
            torch._foreach_zero_(scratch)
        elif is_call(go):
            torch._foreach_copy_(scratch, source)
        else:
            for each, bucket in zip(scratch, source, strict=True):
                fill(each, bucket, factor)
        failed = self._channel.sum(scratch)
        if failed is not None:
            return failed  # an abandoned call may still write to the buffers: they are given up
        self._scratch = scratch
        self._later.append(partial(self._metrics.reduced, now_ns()))
        return ev.Reduced(now_ns() - begun_ns)

    def _summed(self, outcome: ev.Reduced) -> None:
        del outcome  # the sums are in the scratch
        self._later.append(partial(self._metrics.reduced, now_ns()))

    def _take_buffers(self, operation: Operation | None) -> list[torch.Tensor]:
        """Return memory for the sums of an operation; None for a round without one."""
        parts = NOTHING if operation is None else operation.parts
        if operation is not None and not operation.is_call:
            parts = tuple((dtype, n + 1) for dtype, n in parts)  # the flag of a void round
        free = self._spare.get(parts)
        if free:
            return free.pop()
        return [self.transport.zeros(n, getattr(torch, dtype), HOST) for dtype, n in parts]

    def _give_back(self, buffers: list[torch.Tensor]) -> None:
        parts = parts_of(buffers)
        free = self._spare.setdefault(parts, [])
        if len(free) < SETS_MAX:
            free.append(buffers)
        if len(self._spare) > KINDS_MAX:
            self._spare.pop(next(iter(self._spare)))

    def _apply(self, go: Go, weighing: Weighing, *, hash_due: bool) -> ev.Event | None:
        begun_ns = now_ns()
        value = None
        if hash_due:
            # The script makes its step with this sum later, so these are the weights before it.
            value = hash_of([each.reshape(-1) for each in self.operations.weights()])
        self._took(go, self._scratch, weighing)
        now, rank = now_ns(), self.machine.state
        self._later.append(partial(self._metrics.applied, go, rank, now, now - begun_ns))
        return None if value is None else ev.Hashed(self.machine.state.log.version, value)

    def _took(self, go: Go, sums: list[torch.Tensor], weighing: Weighing) -> None:
        if self._last and self._last is not self._averaged:
            self._give_back(self._last)
        if not is_call(go):
            # The main thread may still read the average when other rounds follow. Two steps later
            # it has taken the one between.
            if self._averaged:
                self._give_back(self._averaged)
            self._averaged = sums
        self._last, self._scratch = sums, []
        log = self.machine.state.log
        if log.done and not is_call(go):
            self._name_ended(log.done, min(set(log.active) - log.done, default=None))
        # Late ranks make the step too, and are not missing (S17.4).
        ranks = len(weighing.contributors) if is_call(go) else int(weighing.divisor)
        held = sums if is_call(go) else [each[:-1] for each in sums]
        result = Result(held, ranks, log.wanted_slots - ranks - len(log.done))
        with self.operations.lock:
            self.operations.latest = result
            if not is_call(go):
                self.operations.average = result
            self.operations.completed(go, result)

    def _name_ended(self, ended: frozenset[MemberId], first: MemberId | None) -> None:
        """Say once, on the first rank that goes on, that a step was made without ranks (S14).

        Args:
            ended: Ranks whose script has ended.
            first: The lowest of the others.
        """
        new = ended - self._named_ended
        if new and first == self.machine.state.me:
            self._named_ended |= new
            logging.getLogger("paceline.rank").warning(
                "the script of rank %s has ended with exit code 0, and others make more steps: "
                "from here on gradients are averaged without it",
                ", ".join(map(str, sorted(new))),
            )

    def _hand_over(self, *, late: bool) -> None:
        """Set what the main thread takes; a late one takes the average made without it (S17.2)."""
        operations = self.operations
        with operations.lock:
            operations.result = operations.average if late else operations.latest

    def _change(self, op: BufferOp) -> None:
        """Keep the gradient with which the main thread came too late, or forget those (S17.2)."""
        source = self.operations.source
        match op:
            case Swap():
                self._late = [
                    # Half precision becomes float32, like in the sums.
                    each.to(HOST, torch.promote_types(each.dtype, torch.float32), copy=True)
                    for each in source
                ]
            case Merge(late_factor=late, grad_factor=grad):
                for each, more in zip(self._late, source, strict=True):
                    each.mul_(late).add_(more.to(HOST), alpha=grad)
            case Zero(which=BufferName.LATE):
                self._late = []
            case Scale(which=BufferName.LATE, factor=factor):
                for each in self._late:
                    each.mul_(factor)

    # ---- effects ------------------------------------------------------------------------------

    def _do(self, effect: ev.Prompt) -> ev.Event | None:
        match effect:
            case ev.ChangeBuffers(op=op):
                self._change(op)
            case ev.Queue(go=go):
                if go.operation is not None and go.operation.is_call:
                    # The log is not known yet, and so neither is who was missing.
                    self._results[go.round] = Result([x.clone() for x in self._scratch], 0, 0)
                self._give_back(self._scratch)
                self._scratch = []
            case ev.DropQueue():
                self._results.clear()
                return super()._do(effect)
            case ev.InstallPart(go=go, weighing=weighing):
                self._install_part(go, weighing)
            case ev.InstallState(queued=queued):
                self._install(queued)
            case ev.PassState(state=state):
                self._passed = state.generation
                return super()._do(effect)
            case ev.SendPart(to=to, part=part, with_result=with_result):
                sums = [bytes_of(as_tensor(x)) for x in self._last] if with_result else []
                self._peers.send_bulk(to, part, sums)
            case ev.SendState(to=to, state=state):
                self._send_state(to, state)
            case ev.Resume(late=late):
                self._send_copies()
                self._hand_over(late=late)
                self._main.resumed(effect)
            case ev.Exit():
                self._send_copies()
                self._main.exited(effect)
            case _:
                return super()._do(effect)
        return None

    def _install_part(self, go: Go, weighing: Weighing) -> None:
        sums = self._take_buffers(go.operation)
        for each, data in zip(sums, self._part, strict=True):
            fill_from_bytes(each, data)
        self._took(go, sums, weighing)

    def _send_state(self, to: MemberId, state: StateTransfer) -> None:
        """Send the state of the script, which waits in an operation or has ended.

        A rank that is active already has to receive the state before the operation can end, so the
        script's tensors stay as they are until then, and are sent without a copy. If a new
        generation lets the script go on earlier, the receiver drops what comes of this one (R4).

        Any other rank gets a copy. If no active rank waits for it, the operation goes on meanwhile,
        and only the script waits for the copy.

        Args:
            to: Receiver of the state.
            state: The message that the state goes with, and to whom `to` forwards it.
        """
        header, tensors = self._read_state()
        receivers, active = {to, *state.onward}, set(self.machine.state.log.active)
        if receivers <= active:
            self._peers.send_bulk(to, state, [header, *(bytes_of(as_is(x)) for x in tensors)])
            return
        self._copying += (_Copying(to, state, header, tensors, self._peers.wake),)
        if receivers & active or self.machine.state.operation is None:
            self._send_copies()

    def _send_copies(self, *, wait: bool = True) -> None:
        """Send the states that are copied.

        Args:
            wait: True to wait for all of them, before the script goes on.
        """
        ready = [each for each in self._copying if wait or each.is_ready]
        self._copying = tuple(each for each in self._copying if each not in ready)
        for copying in ready:
            parts = copying.result()
            if copying.state.generation == self.machine.state.gen_id:
                self._peers.send_bulk(copying.to, copying.state, parts)

    def _take_outcome(self) -> None:
        if self._copying:
            self._send_copies(wait=False)
        super()._take_outcome()

    def _read_state(self) -> tuple[bytes, list[torch.Tensor]]:
        """Return the header of the state, and its tensors in the memory of the script."""
        operations, operation = self.operations, self.machine.state.operation
        encoder: Encoder[torch.Tensor] = Encoder(as_tensor)
        with operations.lock:
            kept = [
                [list(at), r.name, *r[1:3], encoder.encode(r.sums, "a kept result")]
                for at, r in operations.path.kept.items()
            ]
            done, here = list(operations.path.done), operations.path.here
        script, tensors = operations.read_state()
        header = {
            "spot": list(here if operation is None else (operation.place, operation.number)),
            "ended": operation is None,
            "done": done,
            "kept": kept,
            "first": len(encoder.buffers),
            "script": script,
        }
        return json.dumps(header).encode(), [*encoder.buffers, *tensors]

    def _place(self, message: PeerMessage, parts: Sequence[Bytes], size: int) -> Bytes | None:
        """Return the memory in which the next part of an arriving state is loaded.

        The others wait for this rank. So where the script loads a state as soon as it is here, the
        weights are received in the model. If the state is not installed after all, the script
        still waits for one, which replaces all of these weights.

        Args:
            message: What arrives.
            parts: Its parts before.
            size: Number of bytes of the next one.

        Returns:
            Memory of a tensor of the script; None for new memory.
        """
        if not isinstance(message, StateTransfer) or not parts:
            return None
        if len(parts) == 1:
            self._placed = message, self._places_of(message, parts[0])
        if self._placed[0] is not message:
            return None
        tensor = self._placed[1].get(len(parts) - 1)
        return bytes_of(tensor) if tensor is not None and tensor.nbytes == size else None

    def _places_of(self, message: StateTransfer, header: Bytes) -> dict[int, torch.Tensor]:
        rank, loads = self.machine.state, self.operations.loads
        # Only the last state is loaded, and what is forwarded has to stay as it is.
        if loads is None or message.onward or not expects(rank, message):
            return {}
        try:
            summary = read_header(bytes(header))
            if summary["ended"] or not loads(Spot(*summary["spot"])):
                return {}
            places = self.operations.places(summary["script"])
            return {int(summary["first"]) + at: tensor for at, tensor in places.items()}
        except (StateError, LookupError, TypeError, ValueError):
            return {}  # it cannot be installed either, which says why

    def _install(self, queued: tuple[tuple[Go, Weighing], ...]) -> None:
        generation = self.machine.state.gen_id
        header, *buffers = self._staged.pop(generation)
        self._staged.clear()
        self._placed = None, {}
        self._peers.drop_placed()  # the script goes on, and its tensors are its own again
        summary = read_header(bytes(header))
        decoder = Decoder(buffers)
        with self.operations.lock:
            path = self.operations.path
            if self.machine.state.follows:
                path.follows, path.state = True, None
            else:
                path.state, path.is_final = Spot(*summary["spot"]), bool(summary["ended"])
            for at, name, contributors, missing, sums in summary["kept"]:
                decoded = decoder.decode(sums, HOST)
                path.kept[Spot(*at)] = Result(decoded, contributors, missing, name)
            path.done = Spot(*summary["done"])
            is_own = generation != self._passed
            received = ScriptState(summary["script"], buffers[summary["first"] :], is_own=is_own)
            self.operations.received = received
            wanted = self.machine.state.log.wanted_slots
            for go, weighing in queued:
                result = self._results.get(go.round)
                count = len(weighing.contributors)
                if result is not None:
                    result = result._replace(contributors=count, missing=wanted - count)
                    self.operations.completed(go, result)
                elif go.operation is not None:
                    path.done = Spot(go.operation.place, go.operation.number)
        self._results.clear()


class _Copying:
    """A copy of a state, made by a thread of its own while the script waits in an operation."""

    def __init__(
        self,
        to: MemberId,
        state: StateTransfer,
        header: bytes,
        tensors: Sequence[torch.Tensor],
        wake: Callable[[], None],
    ) -> None:
        """Begin to copy.

        Args:
            to: Receiver of the state.
            state: The message that the state goes with.
            header: Header of the state.
            tensors: Tensors of the script, which must not change before `result` has returned.
            wake: Called by the thread when the copy is ready.
        """
        self.to, self.state = to, state
        self._parts: list[Bytes] = [header]
        self._error: BaseException | None = None
        self._wake, self.is_ready = wake, False
        self._thread = threading.Thread(
            target=self._run, args=(tensors,), name="paceline-copy", daemon=True
        )
        self._thread.start()

    def _run(self, tensors: Sequence[torch.Tensor]) -> None:
        try:
            self._parts.extend(bytes_of(as_tensor(each)) for each in tensors)
        except BaseException as error:  # raised again in the communication thread
            self._error = error
        self.is_ready = True
        self._wake()

    def result(self) -> list[Bytes]:
        """Wait for the copy, and return the header and the buffers."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._parts


def is_call(go: Go) -> bool:
    """Return True if the sums of a round are those of a call, or of nothing."""
    return go.operation is None or go.operation.is_call


def parts_of(buffers: Sequence[torch.Tensor]) -> tuple[tuple[str, int], ...]:
    """Return data type and number of elements of each buffer, as in `Operation.parts`."""
    return tuple((str(each.dtype).removeprefix("torch."), each.numel()) for each in buffers)
