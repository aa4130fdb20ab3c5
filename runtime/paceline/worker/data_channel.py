"""The data channel of one generation: opened, used for one reduction at a time, then abandoned.

Translates results and errors of the transport into events for the state machine. A group of one
rank needs no transport.

Two threads use it, one at a time. The communication thread opens, closes and shuts the channel
down, and sums the rounds that are not streamed. The data thread sums the segments of a streamed
round (`worker.streamed_rounds`); `stop` waits for it before the communication thread closes the
channel. Only `shutdown`, at the end of a rank, may come while the data thread is still in a call.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import zip_longest

import torch
from paceline_api.ids import MemberId
from paceline_api.times import NS_PER_S

from paceline.clock import now_ns
from paceline.core.collectives.conduct import describe_conduct
from paceline.core.collectives.select import NATIVE, Method, size_class
from paceline.core.coordinator.timeouts import CONNECT_NS
from paceline.core.messages import Commit
from paceline.core.rank import events as ev
from paceline.transport.base import Abort, Group, Peer, Transport, TransportAborted, TransportError
from paceline.transport.rendezvous import secret_of
from paceline.worker.metrics.rounds import RoundMetrics

log = logging.getLogger("paceline.rank")


class DataChannel:
    """Drives a transport for one generation after another.

    See the module for which thread calls what.
    """

    def __init__(
        self,
        transport: Transport,
        abort: Abort,
        metrics: RoundMetrics,
        shard: int = 0,
        token: str = "",
    ) -> None:
        """Create a channel that is not open yet.

        Args:
            transport: Moves and sums the buffers. The channel drives it from now on.
            abort: Flag that ends a blocking call from another thread.
            metrics: Counts what was moved, and errors.
            shard: Index of the model's shard, which is summed with the same shard of the other
                groups (R53); 0 if each rank holds the whole model.
            token: The job's token, with which peers prove that they belong to the job.
        """
        self._shard, self._secret = shard, secret_of(token)
        self._transport, self._abort, self._metrics = transport, abort, metrics
        self._members: tuple[MemberId, ...] = ()
        self._methods: tuple[Method, ...] = ()

    def open(self, commit: Commit, me: MemberId) -> ev.ChannelOpened | ev.ChannelFailed:
        """Connect to all members of a generation. Communication thread.

        Blocks for CONNECT_NS at most, or until the abort flag is raised.

        Args:
            commit: The generation, with the addresses of its members.
            me: This rank, which is one of them.

        Returns:
            ChannelOpened with the reasons for the chosen transport, or ChannelFailed.
        """
        self._members = members = commit.gen.members
        if self.is_alone:
            return ev.ChannelOpened()
        endpoints = dict(commit.endpoints)
        group = Group(
            key=f"{commit.gen.id}" + (f"/{self._shard}" if self._shard else ""),
            number=(commit.gen.id.incarnation << 20) + commit.gen.id.counter,
            peers=tuple(Peer(str(m), endpoints[m].of(self._shard).data) for m in members),
            rank=members.index(me),
            secret=self._secret,
        )
        try:
            self._transport.open(group, self._abort, CONNECT_NS / NS_PER_S)
        except TransportError as error:
            return self._failed(error)
        facts = sorted(self._transport.describe().items())
        log.info("data channel: %s", "; ".join(f"{name}: {fact}" for name, fact in facts))
        self._methods = self._transport.methods()
        conducts = self._transport.conducts()
        self._metrics.opened(self._methods, self._transport.regrets_s(), conducts)
        # A status shows only the beginning of this text, so what is in use comes first.
        why = [*filter(None, map(describe_conduct, conducts)), *self._transport.reasons()]
        return ev.ChannelOpened("; ".join(dict.fromkeys(why)))

    @property
    def is_alone(self) -> bool:
        """Return True if the generation has one member, so there is nothing to sum."""
        return len(self._members) < 2

    def methods(self, buffers: list[torch.Tensor]) -> list[Method]:
        """Return the transport and algorithm for each buffer; empty in a group of one."""
        return [] if self.is_alone else [self._method(buffer) for buffer in buffers]

    def machines(self) -> tuple[int, ...]:
        """Return each member's machine where sums have two levels, else () (`transport.base`)."""
        return () if self.is_alone else self._transport.machines()

    def _method(self, buffer: torch.Tensor) -> Method:
        return self._methods[size_class(buffer.nbytes)]

    def sum(
        self, buffers: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor | None] = ()
    ) -> ev.ChannelFailed | None:
        """Sum buffers over the members, in place, each in a call of its own.

        The communication thread calls this in a round that is not streamed, the data thread in a
        streamed one. Each buffer is summed by itself, so a streamed round gives the same bits
        (R27).

        Args:
            buffers: Flat, contiguous buffers of the same sizes and dtypes on all members. After a
                failure their contents are undefined, and an abandoned call may still write to them:
                the caller must not use this memory again.
            residuals: For each buffer None, or a float32 tensor of its length. A buffer with a
                residual travels as bfloat16, and what rounding takes away is added to the residual
                (`Transport.allreduce_rounded`).

        Returns:
            None if all buffers are summed, otherwise why the reduction failed.
        """
        if self.is_alone:
            return None
        halves = [residual is not None for _, residual in zip_longest(buffers, residuals)]
        done, since_ns = 0, now_ns()

        def summed() -> None:
            nonlocal done, since_ns
            buffer, ended_ns = buffers[done], now_ns()
            carried_bytes = buffer.nbytes // 2 if halves[done] else buffer.nbytes
            self._metrics.carried(self._method(buffer), carried_bytes, since_ns, ended_ns)
            done, since_ns = done + 1, ended_ns

        try:
            if not any(halves):
                self._transport.allreduce_in_turn(buffers, self._abort, NATIVE, summed)
                return None
            for buffer, residual in zip(buffers, residuals, strict=True):
                if residual is None:
                    self._transport.allreduce([buffer], self._abort, NATIVE)
                else:
                    self._transport.allreduce_rounded([buffer], [residual], self._abort, NATIVE)
                summed()
        except TransportError as error:
            self._metrics.failed(self._method(buffers[done]))
            return self._failed(error)
        return None

    def close(self) -> None:
        """Leave the group without waiting for its members. Idempotent. Communication thread."""
        self._transport.close()

    def shutdown(self) -> None:
        """Leave the group and release ports and files, without waiting. Communication thread."""
        self._transport.close()
        self._transport.shutdown()

    def _failed(self, error: TransportError) -> ev.ChannelFailed:
        rank = getattr(error, "rank", None)
        lost = self._members[rank] if rank is not None and rank < len(self._members) else None
        aborted = isinstance(error, TransportAborted)
        if not aborted:
            log.warning("data channel: %s", error)
        return ev.ChannelFailed(str(error), lost, aborted)
