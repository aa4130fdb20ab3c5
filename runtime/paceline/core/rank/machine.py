"""State machine of a rank: `handle` takes one event and returns the effects that it asks for.

Each handler only changes the state. What follows from a state, whatever caused it, is decided
afterwards by `_settle`: whether the main thread may go on, and whether there is something to
announce, start, join, serve or report. So each of these rules stands in one place.
"""

from __future__ import annotations

from typing import Final

from paceline_api.ids import MemberId

from paceline.core.messages import (
    Announce,
    Ask,
    AskState,
    Commit,
    CommitChange,
    Dismiss,
    Endpoints,
    Gathered,
    LogPart,
    PeerMessage,
    Prepare,
    Release,
    Start,
    StateTransfer,
    WeightsHash,
)
from paceline.core.rank import membership, rounds, saving, script, streaming
from paceline.core.rank.events import (
    Begin,
    ChannelFailed,
    ChannelOpened,
    CheckpointFound,
    Coming,
    Connected,
    Drain,
    Effect,
    Event,
    Finish,
    Flush,
    Hashed,
    Need,
    NotRestored,
    Published,
    Reduced,
    RefusePeer,
    Rest,
    Restored,
    Skip,
    Step,
    Tick,
    Unrest,
    Voided,
    Want,
    Written,
)
from paceline.core.rank.state import EARLY_MAX, RankState, Saving

WORD: Final = (Announce, Gathered)
REPAIR: Final = (LogPart, StateTransfer)


class Rank:
    """State machine of one rank. It is pure: it never waits, and each event brings the time."""

    def __init__(
        self, me: MemberId, *, pid: int, host: str, endpoints: Endpoints, save_every: int = 0
    ) -> None:
        """Create a rank that has not begun.

        Args:
            me: Name of this rank.
            pid: Process id, for the coordinator.
            host: Name of the host, for the coordinator.
            endpoints: Addresses at which peers reach this rank.
            save_every: Number of rounds between two checkpoints; 0 for none.
        """
        self.state = RankState(me, pid, host, endpoints, saving=Saving(every=save_every))

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Handle one event.

        Called by the communication thread only. After Exit all events are ignored.

        Args:
            now_ns: Present time in nanoseconds, on a monotonic clock: that of the lead in a group.
            event: What happened.

        Returns:
            Effects for the driver to carry out, in the order that `core.rank.events` describes.
        """
        rank = self.state
        rank.now_ns = now_ns
        rank.effects = []
        if rank.ended:
            return []
        self._dispatch(event)
        self._settle(event)
        while rank.inbox and not rank.ended:
            message = rank.inbox.popleft()
            self._peer(message)
            self._settle(message)
        return rank.effects

    def _dispatch(self, event: Event) -> None:
        rank = self.state
        match event:
            # Frequent events go first: a starter gets hundreds of announcements in a round.
            case Announce() | Gathered():
                self._peer(event)
            case Step():
                script.on_step(rank, event)
            case Reduced():
                rounds.on_reduced(rank, event)
            case Start():
                self._peer(event)
            case (
                Begin()
                | Want()
                | Skip()
                | Flush()
                | Need()
                | Rest()
                | Unrest()
                | Finish()
                | Drain()
            ):
                script.on_script(rank, event)
            case Coming():
                script.on_coming(rank, event)
            case Voided():
                rounds.on_voided(rank, event)
            case Connected():
                membership.on_connected(rank)
            case ChannelOpened():
                membership.on_channel(rank, event.why)
            case ChannelFailed():
                rounds.on_failed(rank, event)
            case Hashed():
                rounds.on_hashed(rank, event)
            case CheckpointFound():
                rank.on_disk = event
            case Restored(log=log):
                membership.on_restored(rank, log)
            case NotRestored(problem=problem):
                rank.fail("CheckpointUnusable", problem)
            case Written() | Published():
                saving.on_writer(rank, event)
            case Tick():
                pass
            case Prepare() | Commit() | CommitChange() | Release() | Dismiss() | Ask():
                membership.on_order(rank, event)
            case _:
                self._peer(event)

    def _peer(self, message: PeerMessage) -> None:
        """Handle a message of a peer, if its generation is the present one (R4, I13).

        A message that is older than the promise is dropped. One of a generation that has not
        started here is kept until it has.
        """
        rank = self.state
        if message.generation < rank.promise:
            return
        known = message.generation == rank.gen_id and not rank.frozen
        if not known or (not rank.started and not isinstance(message, REPAIR)):
            if len(rank.early) < EARLY_MAX:
                rank.early.append(message)
            return
        match message:
            case Announce() | Gathered():
                rounds.on_announce(rank, message)
            case AskState() | StateTransfer() | Start() if membership.names_strangers(
                rank, message
            ):
                rank.emit(RefusePeer())
            case Start():
                rounds.on_start(rank, message)
            case LogPart():
                membership.on_part(rank, message)
            case AskState():
                membership.on_ask_state(rank, message)
            case StateTransfer():
                membership.on_state(rank, message)
            case WeightsHash():
                rounds.on_weights_hash(rank, message)

    def _settle(self, event: Event) -> None:
        rank = self.state
        if rank.arrived_state is not None:
            membership.install(rank)
        is_word = isinstance(event, WORD)  # can only start the round
        between_rounds = rank.talks and not rank.in_flight
        if not is_word:
            script.wake(rank, between_rounds=between_rounds)
        if between_rounds:
            if not is_word:
                rounds.announce(rank)
            rounds.pass_on(rank)
            rounds.consider_start(rank)
        rounds.join(rank)
        streaming.consider_giving_up(rank)
        if is_word:
            return
        membership.serve(rank)
        rounds.report_stop(rank)
        membership.leave(rank)
        saving.save(rank)
