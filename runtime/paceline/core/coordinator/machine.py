"""State machine of the coordinator: events in, effects out.

Each handler only updates the state. Afterwards `_settle` makes all decisions, independent of the
event that led to them: is a rank silent, must the membership change, is the job over. `_settle`
looks at all ranks. It therefore runs only after a change of something that it reads, or when its
time has come (R42). A heartbeat without news costs the same for any number of ranks.

Two coordinators at the same time do no harm: promises are ordered by incarnation, and the later
coordinator makes the earlier one retire (R3).
"""

from __future__ import annotations

from paceline_api.status import Status
from paceline_api.times import NS_PER_S

from paceline.core.coordinator import (
    agents,
    changing,
    ending,
    hearing,
    report,
    silence,
    slot_zero,
    stragglers,
)
from paceline.core.coordinator.events import (
    AgentGone,
    Config,
    Effect,
    Event,
    FromAgent,
    FromRank,
    SetInventory,
    SetTargets,
    Tick,
)
from paceline.core.coordinator.state import CoordinatorPhase, CoordinatorState


class Coordinator:
    """Membership of one job, as a pure state machine: the time comes with each event.

    It has no thread, socket or clock, and it never waits. All calls must come from one thread.
    """

    def __init__(self, config: Config, *, uid: str, now_ns: int, wall_s: float = 0.0) -> None:
        """Start in phase RECOVER, without knowledge of any rank.

        Args:
            config: Settings of the job.
            uid: Identifier that no other coordinator of this job ever has.
            now_ns: Monotonic time in nanoseconds.
            wall_s: Wall time in seconds; used only for reports.
        """
        self.state = CoordinatorState(
            config=config,
            uid=uid,
            now_ns=now_ns,
            wall_offset_s=wall_s - now_ns / NS_PER_S,
            replicas=config.replicas,
            settings=config.settings,
        )
        self.state.tell_pace()

    def status(self, now_ns: int) -> Status:
        """Return a report for people and programs. No decision is made from it.

        Args:
            now_ns: Monotonic time in nanoseconds. A time before the last event counts as that
                event's.

        Returns:
            The status, built from all ranks: O(number of ranks).
        """
        self.state.now_ns = max(self.state.now_ns, now_ns)
        return report.status(self.state)

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Process one event and return the effects that follow from it.

        The caller delivers events one at a time, and a `Tick` at the time of the latest `WakeAt`.
        An exception means that the state may be half updated: the caller must discard this
        coordinator. A new one recovers from the registrations of the ranks (R1, R10).

        Args:
            now_ns: Monotonic time in nanoseconds.
            event: A message of a rank or an agent, a closed connection, an order from the owner of
                the job, or a `Tick`.

        Returns:
            The effects, to be carried out in this order. The list belongs to the caller.
        """
        c = self.state
        silence.forgive_own_sleep(c, now_ns)
        c.now_ns = now_ns
        c.effects = []
        if c.phase is not CoordinatorPhase.ENDED or isinstance(event, FromRank):
            c.changed = self._dispatch(event) or c.changed
        elif isinstance(event, FromAgent):
            ending.answer_late_agent(c, event.message)
        if c.phase is not CoordinatorPhase.ENDED and self._is_due():
            earliest_ns = c.settled_ns + c.config.pace.pause_ns(len(c.roster.ranks))
            if now_ns < earliest_ns:
                silence.wake_by(c, earliest_ns)
            else:
                self._settle()
        return c.effects

    def _is_due(self) -> bool:
        c = self.state
        timely = c.wake_ns is not None and c.now_ns >= c.wake_ns
        return c.changed or timely or stragglers.is_due(c)

    def _dispatch(self, event: Event) -> bool:
        """Apply the event to the state; return True if something changed that `_settle` reads."""
        c = self.state
        match event:
            case FromRank(message=message):
                return hearing.from_rank(c, message)
            case FromAgent(message=message):
                return agents.from_agent(c, message)
            case AgentGone(slot=slot, attempt=attempt):
                agents.gone(c, slot, attempt)
            case SetInventory(inventory=inventory):
                agents.set_inventory(c, inventory)
            case SetTargets(targets=targets):
                hearing.set_targets(c, targets)
            case Tick():
                return False
        return True

    def _settle(self) -> None:
        c = self.state
        before = c.phase, len(c.effects)
        silence.suspect_the_silent(c)
        silence.name_those_never_heard(c)
        silence.break_off_the_stuck(c)
        silence.kill_the_silent(c)
        agents.declare_dead(c)
        agents.drain_surplus(c)
        stragglers.judge_now_and_then(c)
        ending.release_when_stopped(c)
        ending.fail_without_a_slot(c)
        if c.phase is CoordinatorPhase.RELEASED:
            silence.give_up_silent_agents(c)
            ending.end_when_all_have_left(c)
            ending.name_running_scripts(c)
        elif c.phase is CoordinatorPhase.PREPARING:
            changing.evaluate(c)
        else:
            changing.find_reason(c)
            changing.change_when_due(c)
            if c.phase is CoordinatorPhase.STARTING and not c.unstarted:
                changing.all_started(c)
        ending.fail_when_everybody_left(c)
        slot_zero.watch(c)
        # A late decision may enable one that was checked earlier in this pass. So decide again with
        # the next event.
        c.changed, c.settled_ns = (c.phase, len(c.effects)) != before, c.now_ns
        silence.wake(c)
