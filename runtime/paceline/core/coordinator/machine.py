"""The coordinator: events in, effects out. It owns no state that it could not lose (R1, R5, R6).

One change of the membership runs through PREPARE (asked ranks promise and report), COMMIT (the
answer of `forming.form`) and STARTED (all members have the log and their links). Whatever
disturbs it makes the next proposal. Two coordinators at once do no harm: promises are ordered by
incarnation, and the later one makes the earlier one retire.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec.structs import replace

from paceline.core import messages as m
from paceline.core.coordinator import forming, report
from paceline.core.coordinator.events import (
    AgentGone,
    Config,
    Effect,
    Event,
    FromAgent,
    FromRank,
    Happened,
    JobEnded,
    RankGone,
    Retire,
    SetInventory,
    SetTargets,
    Tick,
    ToAgent,
    ToRank,
    WakeAt,
)
from paceline.core.coordinator.roster import Roster, Seen
from paceline.core.coordinator.scale import pods_to_drain
from paceline.core.ids import NO_GENERATION, GenerationId, MemberId
from paceline.core.records import Gen, Pacing, Request, Settings
from paceline.core.status import Outcome, Status

DEAD_KEPT = 64
"""Dead ranks that status remembers."""
GONE_NS = 500_000_000
"""A closed connection without an agent's word makes a rank suspect after this long."""
COMPLAINT_NS = 200_000_000
"""A complaint waits so long for the evidence that usually follows it."""


LATE_STARTS_MAX = 3
"""So often a coordinator that has formed nothing overtakes a later one before it retires."""


class Phase(StrEnum):
    RECOVER = "recover"
    """Nothing formed yet by this coordinator."""
    PREPARING = "preparing"
    WAITING = "waiting"
    """Answers are in, evidence is missing (R6)."""
    STARTING = "starting"
    """COMMIT is out, not everybody has STARTED."""
    RUNNING = "running"
    RELEASED = "released"
    """RELEASE is out (R17)."""
    ENDED = "ended"


class Coordinator:
    """One job's membership."""

    def __init__(self, config: Config, *, uid: str, now_ns: int, wall_s: float = 0.0) -> None:
        self.config = config
        self.uid = uid
        self.now_ns = now_ns
        self._wall_offset_s = wall_s - now_ns / 1e9
        self.replicas = config.replicas
        self.settings = config.settings
        self.phase = Phase.RECOVER
        self.roster = Roster()
        self.diary = report.Diary()
        self.incarnation = 0
        self.counter = 0
        self.proposal = NO_GENERATION
        self.asked: set[MemberId] = set()
        self.asked_ns = 0
        self.reports: dict[MemberId, m.Prepared] = {}
        self.commit: m.Commit | None = None
        self.unstarted: set[MemberId] = set()
        self.why = ""
        """What the current change is about."""
        self.due_ns: int | None = None
        """When a change that was asked for begins at the latest."""
        self.ready_ns: int | None = None
        """When the first rank was ready."""
        self.request: Request | None = None
        self.request_number = 0
        self.failures = 0
        self.late_starts = 0
        self.version = 0
        self.had_state = False
        self.outcome: Outcome | None = None
        self.wake_ns: int | None = None
        self.effects: list[Effect] = []

    @property
    def gen(self) -> Gen | None:
        """The generation that this coordinator formed last."""
        return self.commit.gen if self.commit else None

    @property
    def wanted_ranks(self) -> int:
        return self.replicas * self.config.procs

    def wall_s(self) -> float:
        return self._wall_offset_s + self.now_ns / 1e9

    def status(self, now_ns: int) -> Status:
        """A report for people and programs; nothing is decided from it."""
        self.now_ns = max(self.now_ns, now_ns)
        return report.status(self)

    # ---- events ---------------------------------------------------------------------------

    def handle(self, now_ns: int, event: Event) -> list[Effect]:
        """Take one event; the effects are to be carried out in this order."""
        self._forgive_own_sleep(now_ns)
        self.now_ns = now_ns
        self.effects = []
        if self.phase is Phase.ENDED and not isinstance(event, FromRank):
            return []
        match event:
            case FromRank(message=message):
                self._from_rank(message)
            case RankGone(member=member):
                seen = self.roster.rank(member)
                seen.connected, seen.gone_ns = False, now_ns
            case FromAgent(message=message):
                self._from_agent(message)
            case AgentGone(slot=slot, attempt=attempt):
                self.roster.pod(slot, attempt, now_ns).connected = False
            case SetInventory(inventory=inventory):
                self._set_inventory(inventory)
            case SetTargets(targets=targets):
                self._set_targets(targets)
            case Tick():
                pass
        if self.phase is not Phase.ENDED:
            self._settle()
        return self.effects

    def _forgive_own_sleep(self, now_ns: int) -> None:
        """Who was stopped itself has heard nobody, which says nothing about them."""
        late_ns = now_ns - self.wake_ns if self.wake_ns is not None else 0
        if late_ns > self.config.freeze_timeout_ns // 2:
            for seen in self.roster.ranks.values():
                seen.heard_ns += late_ns
                seen.gone_ns = None if seen.gone_ns is None else seen.gone_ns + late_ns
            self.asked_ns += late_ns
        self.wake_ns = None

    def _from_rank(self, message: m.RankMessage) -> None:
        seen = self.roster.rank(message.member)
        seen.heard_ns = self.now_ns
        if self.phase in (Phase.RELEASED, Phase.ENDED) and isinstance(message, m.Register):
            self._answer_late(message)
            return
        match message:
            case m.Register():
                self._register(seen, message)
            case m.Heartbeat():
                self._heartbeat(seen, message)
            case m.Prepared():
                if message.id == self.proposal and self.phase is Phase.PREPARING:
                    self.reports[message.member] = message
                    self.request_number = max(self.request_number, message.request)
            case m.Refused():
                self._refused(message)
            case m.Started():
                seen.has_state = seen.has_state or message.has_state
                if self.gen is not None and message.id == self.gen.id:
                    seen.started = message.id
                    self.unstarted.discard(message.member)
            case m.Stopped():
                seen.stopped, seen.version = message.id, message.version
            case m.Complain():
                if self.gen is not None and message.id == self.gen.id:
                    lost = f" (rank {message.lost})" if message.lost else ""
                    self._want_change(
                        f"rank {message.member} lost its data channel{lost}: {message.why}",
                        COMPLAINT_NS,
                    )
            case m.Leaving():
                seen.leaving = True
                seen.left_early = message.early
                if self.gen is None or message.member not in self.gen.members:
                    self._dismiss(seen, "drained before it was a member")
                else:
                    self._want_change(f"rank {message.member} leaves", 0)
            case m.Fatal():
                self._fail(message.reason, f"rank {message.member}: {message.message}")

    def _register(self, seen: Seen, register: m.Register) -> None:
        first = seen.register is None
        was_ready = seen.ready
        seen.register = register
        seen.newborn = False
        seen.connected, seen.gone_ns, seen.suspect = True, None, ""
        seen.pid, seen.version = register.pid, register.version
        seen.promise, seen.has_state = register.promise, register.has_state
        seen.leaving = register.leaving
        self.version = max(self.version, register.version)
        self.had_state = self.had_state or register.version > 0
        self.request_number = max(self.request_number, register.request)
        if register.released is not None:
            self._release(*register.released)
            return
        for known in (register.promise, register.last):
            self._learn(known)
        if self.request is not None:
            self.effects.append(ToRank(register.member, m.Ask(self.request)))
        if self.phase is Phase.ENDED:
            return
        if register.ready and not was_ready:
            self.ready_ns = self.ready_ns or self.now_ns
            self._happened("RankReady", f"rank {register.member} is ready on {register.host}")
        elif first:
            self._happened("RankStarted", f"rank {register.member} started on {register.host}")
        if self.gen is not None and register.member in self.gen.members:
            behind = register.promise < self.gen.id
            if behind and register.member not in self.unstarted:
                self._want_change(f"rank {register.member} came back", 0)

    def _heartbeat(self, seen: Seen, beat: m.Heartbeat) -> None:
        if beat.version > self.version:
            self.version = beat.version
            self.failures = 0  # progress ends the row of failures (C8)
        self.had_state = self.had_state or beat.version > 0
        self.diary.committed(beat.version, self.now_ns)
        seen.version, seen.promise, seen.leaving = beat.version, beat.promise, beat.leaving
        seen.facts = beat.facts
        if seen.suspect:
            seen.suspect = ""
            self._happened("RankBack", f"rank {beat.member} answers again")
            self._want_change(f"rank {beat.member} answers again", 0)
        if self.phase is not Phase.ENDED:
            self._learn(beat.promise)
        if beat.promise > self.proposal and beat.promise[:2] == self.proposal[:2]:
            self._want_change(f"rank {beat.member} has promised {beat.promise}", 0)

    def _refused(self, message: m.Refused) -> None:
        self._learn(message.promise)
        if message.id == self.proposal and self.phase is not Phase.ENDED:
            self.counter = max(self.counter, message.promise.counter)
            self._want_change(f"rank {message.member} had promised {message.promise}", 0)

    def _learn(self, known: GenerationId) -> None:
        """R1, R3: be above what is known; give way to a later incarnation."""
        if self.proposal == NO_GENERATION:
            self.incarnation = max(self.incarnation, known.incarnation + 1)
        elif (known.incarnation, known.coordinator) > (self.incarnation, self.uid):
            if self.gen is None and self.late_starts < LATE_STARTS_MAX:
                # It asked before it knew everybody and has formed nothing: it is still new.
                self.late_starts += 1
                self.incarnation = known.incarnation + 1
                self._want_change("a rank knows a later coordinator", 0)
                return
            self.phase = Phase.ENDED
            self.effects.append(Retire(f"coordinator of generation {known} is later"))
        else:
            self.counter = max(self.counter, known.counter)

    def _from_agent(self, message: m.AgentMessage) -> None:
        match message:
            case m.AgentHello():
                pod = self.roster.pod(message.slot, message.attempt, self.now_ns)
                pod.connected = pod.known = True
                pod.connected_ns = self.now_ns
                pod.living = set(message.living)
                for member in message.living:
                    self.roster.rank(member)
                for member in message.dead:
                    self._died(member, "reaped by its agent", 0)
                if message.released is not None:
                    self._release(*message.released)
            case m.AgentBeat():
                pod = self.roster.pod(message.slot, message.attempt, self.now_ns)
            case m.RankStarted():
                pod = self.roster.pod(*m.pod_of(message.member), self.now_ns)
                pod.living.add(message.member)
                seen = self.roster.rank(message.member)
                seen.pid = message.pid
                seen.newborn = self.gen is not None and seen.register is None
            case m.RankDead():
                pod = self.roster.pod(*m.pod_of(message.member), self.now_ns)
                pod.living.discard(message.member)
                self._died(message.member, message.why, message.exit_code)
                if message.released is not None:
                    self._release(*message.released)
                self._count_failure(message)
            case m.AgentDone():
                pod = self.roster.pod(message.slot, message.attempt, self.now_ns)
                pod.done = message.outcome
                pod.living.clear()
                if message.outcome == "failed":
                    self._fail("RankFailed", message.message)
        pod.heard_ns = self.now_ns

    def _died(self, member: MemberId, why: str, exit_code: int) -> None:
        seen = self.roster.rank(member)
        if seen.dead:
            return
        seen.dead, seen.exit_code, seen.connected = why, exit_code, False
        quiet = seen.dismissed or self.phase is Phase.RELEASED
        if not quiet:
            self._happened("RankDied", f"rank {member}: {why}", {"exit_code": str(exit_code)})

    def _count_failure(self, message: m.RankDead) -> None:
        seen = self.roster.rank(message.member)
        if message.exit_code == 0 or seen.kill_asked or self.phase is Phase.ENDED:
            return
        if self.phase is Phase.RELEASED:
            self._fail("ScriptFailed", f"rank {message.member} after the end: {message.why}")
            return
        if message.exit_code > 0 and not seen.ready and not self.had_state and self.gen is None:
            # No rank has ever trained: a mistake in the script or the image, not bad luck.
            self._fail("ScriptFailed", f"rank {message.member}: {message.why}")
            return
        self.failures += 1
        if self.failures > self.config.backoff_limit:
            self._fail(
                "BackoffLimitExceeded",
                f"{self.failures} processes failed without a committed round in between; "
                f"the last one was rank {message.member}: {message.why}",
            )

    def _set_inventory(self, inventory: m.Inventory) -> None:
        known = self.roster.inventory
        if known is not None and inventory.revision <= known.revision:
            return
        self.roster.inventory = inventory
        for member in sorted(self.roster.ranks):
            if self.roster.is_dead(member):
                self._died(member, f"its pod is gone (inventory {inventory.revision})", 0)

    def _set_targets(self, targets: m.Targets) -> None:
        if targets.replicas is not None and targets.replicas != self.replicas:
            self._happened("Scaled", f"replicas {self.replicas} -> {targets.replicas}")
            self.replicas = targets.replicas
        if targets.settings is not None or targets.stop:
            self.request_number += 1
            self.settings = self._settled(targets.settings) or self.settings
            settings = self.settings if targets.settings else None
            self.request = Request(self.request_number, settings, targets.stop)
            for seen in self.roster.present():
                self.effects.append(ToRank(seen.member, m.Ask(self.request)))

    def _settled(self, settings: Settings | None) -> Settings | None:
        """A change of the mode keeps the pacing that the first generation settled."""
        if settings is not None and settings.pacing is Pacing.AUTO:
            return replace(settings, pacing=self.settings.pacing)
        return settings

    # ---- what follows ---------------------------------------------------------------------

    def _settle(self) -> None:
        self._suspect_the_silent()
        for pod in pods_to_drain(self.roster, self.replicas):
            pod.draining = True
            self._happened("Draining", f"replica {pod.slot} leaves: {self.replicas} are wanted")
            self.effects.append(ToAgent(pod.slot, pod.attempt, m.DrainPod("scaled down")))
        if self.phase is Phase.RELEASED:
            self._end_when_all_have_left()
        elif self.phase is Phase.PREPARING:
            self._evaluate()
        else:
            self._find_reason()
            self._release_when_stopped()
            self._change_when_due()
            if self.phase is Phase.STARTING and not self.unstarted:
                self._running()
        self._fail_when_everybody_left()
        self._wake()

    def _want_change(self, why: str, within_ns: int) -> None:
        due = self.now_ns + within_ns
        if self.due_ns is None or due < self.due_ns:
            self.due_ns, self.why = due, why
            self.diary.cause(why, self.now_ns)

    def _find_reason(self) -> None:
        """A member died, somebody can join, or this coordinator is new (A9)."""
        if self.gen is None:
            self._find_first_reason()
            return
        watched = set(self.gen.members) | self.unstarted
        for member in sorted(watched):
            seen = self.roster.rank(member)
            if self.roster.is_dead(member) or seen.suspect:
                self._want_change(f"rank {member}: {seen.dead or seen.suspect}", 0)
        joiners = self._joiners()
        if joiners and not self._some_stopped():
            missing = self.wanted_ranks - len(self.gen.members) - len(joiners)
            names = ", ".join(map(str, joiners))
            coming = missing > 0 and any(
                not p.draining and not p.done for p in self.roster.pods.values() if not p.living
            )
            within = min(self.config.settle_ns, 2_000_000_000) if coming else 0
            self._want_change(f"rank {names} joins", within)

    def _find_first_reason(self) -> None:
        """A new coordinator waits for the ranks of the last record, a new job for all its ranks."""
        if self.ready_ns is None:
            return
        ready = [s for s in self.roster.present() if s.ready]
        registers = [s.register for s in ready if s.register is not None]
        best = max(registers, key=lambda r: (r.has_state, r.last, r.version), default=None)
        if best is not None and best.has_state:
            missing = [
                x
                for x in best.members
                if x not in self.roster.ranks
                or not (self.roster.rank(x).present or self.roster.is_dead(x))
            ]
            within = self.config.freeze_timeout_ns if missing else 0
            self._want_change("the coordinator is new", within - (self.now_ns - self.ready_ns))
        elif ready:
            within = 0 if len(ready) >= self.wanted_ranks else self.config.settle_ns
            self._want_change("the job starts", within - (self.now_ns - self.ready_ns))

    def _joiners(self) -> list[MemberId]:
        assert self.gen is not None
        return [
            s.member
            for s in self.roster.present()
            if s.ready and s.member not in self.gen.members and not s.leaving
        ]

    def _change_when_due(self) -> None:
        if self.due_ns is None or self.now_ns < self.due_ns:
            return
        expected = {s.member for s in self.roster.present() if s.ready}
        waits = self._would_wait(expected)
        if waits:
            # The unready can promise too, which is what R6 (b) may need.
            expected = {s.member for s in self.roster.present()}
            waits = self._would_wait(expected)
        if waits:
            if self.phase is not Phase.WAITING:
                self._happened("WaitingForEvidence", f"{self.why}: {waits}")
            self.phase = Phase.WAITING
            self.diary.waits = waits
            return
        self._prepare(expected)

    def _would_wait(self, expected: set[MemberId]) -> str:
        """PREPARE is only sent when its COMMIT could be (R6)."""
        registers = {x: self.roster.rank(x).register for x in expected}
        full = [r for r in registers.values() if r is not None and r.has_state]
        if not expected:
            return "no rank is there"
        unaccounted = self.roster.unaccounted(expected)
        if self.gen is not None and any(self.roster.rank(x).has_state for x in expected):
            leaving = {x for x in expected if self.roster.rank(x).leaving}
            return forming.may_commit(self.gen.active, expected, leaving, unaccounted)
        if not full:
            enough = 2 * len(expected) > self.wanted_ranks
            return "" if enough or not unaccounted else unaccounted
        best = max(full, key=lambda r: (r.last, r.version))
        active = best.gen_active
        leaving = {x for x in expected if self.roster.rank(x).leaving}
        return forming.may_commit(active, expected, leaving, unaccounted)

    def _prepare(self, asked: set[MemberId]) -> None:
        self.counter += 1
        self.proposal = GenerationId(max(1, self.incarnation), self.uid, self.counter)
        self.incarnation = self.proposal.incarnation
        self.phase = Phase.PREPARING
        self.asked, self.asked_ns = asked, self.now_ns
        self.reports = {}
        self.due_ns = None
        self.diary.prepared(self.now_ns)
        for member in sorted(asked):
            self.effects.append(ToRank(member, m.Prepare(self.proposal)))

    def _evaluate(self) -> None:
        """All who were asked have answered, or cannot: commit, or ask again."""
        lost = [x for x in self.asked if not self.roster.rank(x).present]
        if lost or self.due_ns is not None:
            self._want_change(self.why or f"rank {lost[0]} was lost during the change", 0)
            self.phase = Phase.WAITING
            self._change_when_due()
            return
        if set(self.reports) != self.asked:
            return
        registers = {x: r for x in self.asked if (r := self.roster.rank(x).register) is not None}
        answer = forming.form(
            self.proposal,
            self.reports,
            registers,
            dead={x: "dead" for x in self.roster.ranks if self.roster.is_dead(x)},
            unaccounted=self.roster.unaccounted(set(self.reports)),
            replicas_ranks=self.wanted_ranks,
            settings=self.settings,
            state_lost=self._state_lost(),
        )
        match answer:
            case forming.Wait(why=why):
                self.phase = Phase.WAITING
                self._happened("WaitingForEvidence", f"{self.why}: {why}")
                self.diary.waits = why
                self._want_change(self.why, self.config.freeze_timeout_ns)
            case forming.Broken():
                self._fail(answer.reason, answer.message, answer.hint)
            case m.Commit():
                self._commit(answer)

    def _state_lost(self) -> str:
        if not self.had_state or self.config.state_can_return:
            return ""
        return f"all ranks that had the weights of version {self.version} are lost"

    def _commit(self, commit: m.Commit) -> None:
        gen = commit.gen
        self.commit = commit
        self.settings = commit.gen.settings or self.settings
        self.phase = Phase.STARTING
        self.version = max(self.version, gen.version)
        self.unstarted = {*gen.members, commit.holder, commit.donor}
        for member in sorted(self.reports):
            seen = self.roster.rank(member)
            if self.reports[member].leaving and member not in gen.members:
                seen.dismissed = True
                self.unstarted.discard(member)
                if member == commit.holder and commit.behind:
                    self.unstarted.add(member)
            self.effects.append(ToRank(member, commit))
        self.diary.committed_generation(self, gen)
        self._happened(
            "GenerationFormed",
            f"generation {gen.id}: {len(gen.members)} ranks, {len(gen.active)} active",
            {"why": self.why, "version": str(gen.version)},
        )
        self.why = ""
        self.diary.waits = ""
        self.roster.forget_dead(set(gen.members), DEAD_KEPT)

    def _running(self) -> None:
        self.phase = Phase.RUNNING
        self.diary.all_started(self.now_ns)

    # ---- silence --------------------------------------------------------------------------

    def _suspect_the_silent(self) -> None:
        """Silence makes suspect; a living agent kills the silent rank, which is evidence (R6)."""
        for member, seen in sorted(self.roster.ranks.items()):
            if seen.register is None or self.roster.is_dead(member) or seen.suspect:
                continue
            agent = self.roster.agent_of(member)
            limit_ns, since_ns = self._patience(seen)
            silent_ns = self.now_ns - since_ns
            if silent_ns < limit_ns or seen.dismissed:
                continue
            seen.suspect = f"silent for {silent_ns / 1e9:.1f} s"
            self._happened("RankSilent", f"rank {member} is {seen.suspect}")
            if agent is not None:
                seen.kill_asked = True
                kill = m.KillRank(member, seen.suspect)
                self.effects.append(ToAgent(agent.slot, agent.attempt, kill))

    def _patience(self, seen: Seen) -> tuple[int, int]:
        """(bound, start) of the silence after which a rank is suspect, in nanoseconds."""
        freeze_ns = self.config.freeze_timeout_ns
        if seen.gone_ns is not None:
            agent = self.roster.agent_of(seen.member)
            if agent is None:
                return GONE_NS, seen.gone_ns
            return freeze_ns, max(seen.gone_ns, agent.connected_ns)
        if seen.member in self.unanswered():
            return freeze_ns, min(self.asked_ns, seen.heard_ns)
        return freeze_ns, seen.heard_ns

    def unanswered(self) -> set[MemberId]:
        """Who owes an answer to PREPARE or a STARTED."""
        if self.phase is Phase.PREPARING:
            return self.asked - set(self.reports)
        return self.unstarted if self.phase is Phase.STARTING else set()

    def _wake(self) -> None:
        """The next moment at which something can follow from time alone."""
        times = []
        if self.due_ns is not None and self.phase is not Phase.PREPARING:
            times.append(self.due_ns)
        for member, seen in self.roster.ranks.items():
            if seen.register is None or seen.suspect or self.roster.is_dead(member):
                continue
            limit_ns, since_ns = self._patience(seen)
            times.append(since_ns + limit_ns)
        later = [t for t in times if t > self.now_ns]
        if later:
            self.wake_ns = min(later)
            self.effects.append(WakeAt(self.wake_ns))

    # ---- the end --------------------------------------------------------------------------

    def _some_stopped(self) -> bool:
        return any(s.stopped is not None for s in self.roster.ranks.values())

    def _release_when_stopped(self) -> None:
        """R17: all members with state have reported the stop round."""
        if self.gen is None or self.phase not in (Phase.STARTING, Phase.RUNNING):
            return
        members = [self.roster.rank(x) for x in self.gen.with_state]
        others = [self.roster.rank(x) for x in self.gen.members if x not in self.gen.with_state]
        waiting = [s for s in members if s.stopped != self.gen.id]
        waiting += [s for s in others if s.has_state and s.stopped != self.gen.id]
        if not waiting:
            self._release(self.gen.id, max(s.version for s in members))

    def _release(self, generation: GenerationId, version: int) -> None:
        if self.phase in (Phase.RELEASED, Phase.ENDED):
            return
        self.phase = Phase.RELEASED
        self.version = version
        self.diary.released = (generation, version)
        self._happened("Released", f"all ranks have version {version}; the job is complete")
        for seen in self.roster.present():
            self.effects.append(ToRank(seen.member, m.Release(generation, version)))

    def _answer_late(self, register: m.Register) -> None:
        seen = self.roster.rank(register.member)
        seen.register, seen.connected, seen.gone_ns = register, True, None
        if self.diary.released is not None:
            answer: m.Release | m.Dismiss = m.Release(*self.diary.released)
        else:
            answer = m.Dismiss("the job has ended")
        self.effects.append(ToRank(register.member, answer))

    def _end_when_all_have_left(self) -> None:
        """Complete once every rank that was released has ended; its script may still fail."""
        living = [
            s
            for x, s in self.roster.ranks.items()
            if s.register is not None
            and not self.roster.is_dead(x)
            and (s.connected or self.roster.agent_of(x))
        ]
        if not living:
            self._end(Outcome(True, "Complete", f"{self.version} rounds, released on all ranks"))

    def _fail_when_everybody_left(self) -> None:
        """Nobody is left to hand over to: all ranks drain, or all scripts ended early (D7)."""
        if self.gen is None or self.phase in (Phase.RELEASED, Phase.ENDED):
            return
        members = [self.roster.rank(x) for x in self.gen.members]
        if all(s.leaving or self.roster.is_dead(s.member) for s in members) and any(
            s.leaving and not self.roster.is_dead(s.member) for s in members
        ):
            if any(s.left_early for s in members):
                self._fail(
                    "ScriptEndedEarly",
                    "the scripts of all ranks left their training loop before its end",
                    hint="run all epochs, or end the job with a stop request",
                )
            else:
                self._fail("Interrupted", f"all ranks were drained at version {self.version}")

    def _fail(self, reason: str, message: str, hint: str = "") -> None:
        if self.phase is not Phase.ENDED:
            self._end(Outcome(False, reason, message, hint))

    def _end(self, outcome: Outcome) -> None:
        self.phase = Phase.ENDED
        self.outcome = outcome
        for seen in self.roster.present():
            self._dismiss(seen, outcome.reason)
        for pod in self.roster.pods.values():
            if pod.connected:
                shutdown = m.Shutdown(outcome.reason)
                self.effects.append(ToAgent(pod.slot, pod.attempt, shutdown))
        self._happened(outcome.reason, outcome.message)
        self.effects.append(JobEnded(outcome))

    def _dismiss(self, seen: Seen, why: str) -> None:
        seen.dismissed = True
        self.effects.append(ToRank(seen.member, m.Dismiss(why)))

    def _happened(self, reason: str, message: str, facts: dict[str, str] | None = None) -> None:
        self.diary.happened(reason, message, facts or {}, self.wall_s())
        self.effects.append(Happened(reason, message, facts or {}))
