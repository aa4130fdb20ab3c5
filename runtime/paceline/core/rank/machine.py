"""The rank's state machine: `handle` one event, get the effects that it asks for.

Every handler only changes the state; what follows from a state, whoever caused it, is found
afterwards by `_settle`: may the main thread go on, is there something to announce, to start, to
join, to serve, to report. So each of these rules stands in one place.
"""

from __future__ import annotations

from paceline.core.messages import (
    Announce,
    Ask,
    AskState,
    Commit,
    CommitChange,
    Dismiss,
    Endpoints,
    Gathered,
    Part,
    PeerMessage,
    Prepare,
    Release,
    Start,
    State,
    WeightsHash,
)
from paceline.core.protocol.ids import MemberId
from paceline.core.rank import membership, rounds, saving, script
from paceline.core.rank.events import (
    Begin,
    ChannelFailed,
    ChannelOpened,
    Connected,
    Drain,
    Effect,
    Event,
    Finish,
    Found,
    Hashed,
    Published,
    Reduced,
    Rest,
    Restored,
    Skip,
    Step,
    Tick,
    Unrest,
    Want,
    Written,
)
from paceline.core.rank.state import EARLY_MAX, RankState, Saving


class Rank:
    """One rank. Pure: time comes with each event, nothing is waited for."""

    def __init__(
        self, me: MemberId, *, pid: int, host: str, endpoints: Endpoints, save_every: int = 0
    ) -> None:
        self.state = RankState(me, pid, host, endpoints, saving=Saving(every=save_every))

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Take one event; the effects are to be carried out in this order."""
        rank = self.state
        rank.now_ns = now_ns
        rank.effects = []
        if rank.ended:
            return []
        self._dispatch(event)
        self._settle()
        while rank.inbox and not rank.ended:
            self._peer(rank.inbox.popleft())
            self._settle()
        return rank.effects

    def _dispatch(self, event: Event) -> None:
        rank = self.state
        match event:
            case Begin() | Step() | Want() | Skip() | Rest() | Unrest() | Finish() | Drain():
                script.on_script(rank, event)
            case Reduced():
                rounds.on_reduced(rank)
            case Connected():
                membership.on_connected(rank)
            case ChannelOpened():
                membership.on_channel(rank, event.why)
            case ChannelFailed():
                rounds.on_failed(rank, event)
            case Hashed():
                rounds.on_hashed(rank, event)
            case Found():
                rank.found = event
            case Restored(log=log):
                membership.on_restored(rank, log)
            case Written() | Published():
                saving.on_writer(rank, event)
            case Tick():
                pass
            case Prepare() | Commit() | CommitChange() | Release() | Dismiss() | Ask():
                membership.on_order(rank, event)
            case _:
                self._peer(event)

    def _peer(self, message: PeerMessage) -> None:
        """Fencing: older than the promise is dropped, not yet started is kept (R4, I13)."""
        rank = self.state
        if message.generation < rank.promise:
            return
        known = message.generation == rank.gen_id and not rank.frozen
        repairs = isinstance(message, Part | State)
        if not known or (not rank.started and not repairs):
            if len(rank.early) < EARLY_MAX:
                rank.early.append(message)
            return
        match message:
            case Announce() | Gathered():
                rounds.on_announce(rank, message)
            case Start():
                rounds.on_start(rank, message)
            case Part():
                membership.on_part(rank, message)
            case AskState():
                membership.on_ask_state(rank, message)
            case State():
                membership.on_state(rank, message)
            case WeightsHash():
                rounds.on_weights_hash(rank, message)

    def _settle(self) -> None:
        rank = self.state
        script.wake(rank)
        rounds.announce(rank)
        rounds.pass_on(rank)
        rounds.consider_start(rank)
        rounds.join(rank)
        membership.serve(rank)
        rounds.report_stop(rank)
        membership.leave(rank)
        saving.save(rank)
