"""What is known of the job's processes: who registered, is silent, is known dead (R6, R25)."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline.core.messages import Away, Doing, Inventory, Network, Register, pod_of
from paceline.core.protocol.ids import NO_GENERATION, GenerationId, MemberId
from paceline.core.protocol.snapshot import Kept


@dataclass(slots=True)
class KnownRank:
    """One rank process. Silence makes it suspect, only evidence makes it dead."""

    member: MemberId
    register: Register | None = None
    connected: bool = False
    heard_ns: int = 0
    ready_ns: int = 0
    """When it was first ready to train."""
    gone_ns: int | None = None
    """When its line to the agent, or the agent's connection, was closed."""
    suspect: str = ""
    """Why it is asked nothing more; empty if it is not suspect."""
    dead: str = ""
    """The evidence; empty as long as it may live."""
    pid: int = 0
    alive_ns: int | None = None
    """When its agent first said that it lives."""
    unheard: bool = False
    """Lives for long and has not registered, and that was told."""
    last: GenerationId = NO_GENERATION
    """Its last GEN record, with the active ranks of that record and its version: what it would
    report, as far as known (R5)."""
    gen_active: tuple[MemberId, ...] = ()
    version: int = 0
    has_state: bool = False
    """Has weights, if only those from before it was left out."""
    checkpoint: Kept | None = None
    """The newest one that it has said it sees."""
    current: bool = False
    """Has the state of this coordinator's generation."""
    leaving: bool = False
    left_early: bool = False
    stopped: GenerationId | None = None
    started: GenerationId | None = None
    mute: bool = False
    """Suspect since it owed an answer: a heartbeat is none."""
    dismissed: bool = False
    finished: bool = False
    """Its process has ended after it was released (R17)."""
    newborn: bool = False
    """Its agent started it while this coordinator was in power, and it has never registered: it
    can be in no generation that this coordinator does not know."""
    kill_asked: bool = False
    doing: Doing | None = None
    """With its last heartbeat, and `promise` too."""
    promise: GenerationId = NO_GENERATION
    active: bool = False
    benched: bool = False
    done: bool = False
    step_s: float = 0.0
    """These four with its last heartbeat, for the status, stragglers and who is drained first."""
    away: Away | None = None
    """Likewise: since when its script has not come back to step()."""
    away_told: bool = False
    facts: dict[str, float] = field(default_factory=dict)
    """Its last figures, of `facts_version`."""
    facts_version: int = 0
    carrier: Network = Network.UNKNOWN
    """What carries its data channel to other pods; from its agent."""

    @property
    def present(self) -> bool:
        """Can be asked: registered over its agent's connection, neither suspect nor dead."""
        return self.register is not None and self.connected and not self.suspect and not self.dead

    @property
    def ready(self) -> bool:
        return self.register is not None and self.register.ready


@dataclass(slots=True)
class KnownPod:
    """One agent."""

    slot: int
    attempt: int
    host: str = ""
    connected: bool = False
    awake_ns: int = 0
    """Since when it is heard without a long pause: before that it may have slept through what its
    ranks said (R43)."""
    heard_ns: int = 0
    silent: bool = False
    """After the release it has said nothing for so long that nobody waits for its word."""
    living: set[MemberId] = field(default_factory=set)
    """Processes that it has started and not reaped."""
    known: bool = False
    """Its agent has said which processes it has."""
    newborn: bool = False
    """Named by an inventory for the first time while this coordinator was in power: as long as its
    agent has not reported, no process of it is in a generation unknown here."""
    listed: bool = False
    """By an inventory, ever."""
    draining: bool = False
    done: str = ""
    """Outcome of the whole pod, once it has ended."""
    since_ns: int = 0


@dataclass(slots=True)
class Roster:
    ranks: dict[MemberId, KnownRank] = field(default_factory=dict)
    pods: dict[tuple[int, int], KnownPod] = field(default_factory=dict)
    inventory: Inventory | None = None
    listed: frozenset[tuple[int, int]] = frozenset()
    """Pods of the inventory."""

    def take(self, inventory: Inventory) -> None:
        self.inventory, self.listed = inventory, frozenset(inventory.pods)

    def may_greet(self, slot: int, attempt: int) -> bool:
        """Return whether an agent may speak for this pod: an inventory has listed it, the newest or
        one before it (C4), or no inventory is known yet."""
        known = self.pods.get((slot, attempt))
        listed = (slot, attempt) in self.listed or (known is not None and known.listed)
        return self.inventory is None or listed

    def rank(self, member: MemberId) -> KnownRank:
        if member not in self.ranks:
            self.ranks[member] = KnownRank(member)
        return self.ranks[member]

    def pod(self, slot: int, attempt: int, now_ns: int) -> KnownPod:
        key = (slot, attempt)
        if key not in self.pods:
            self.pods[key] = KnownPod(slot, attempt, since_ns=now_ns)
        return self.pods[key]

    def running_pods(self) -> list[KnownPod]:
        """Return the pods that have not ended.

        A pod that was killed never says so: it is gone when the newest inventory does not list it.
        """
        return [pod for key, pod in self.pods.items() if self._runs(key, pod)]

    def _runs(self, key: tuple[int, int], pod: KnownPod) -> bool:
        if pod.done:
            return False
        newer_than_inventory = pod.connected and not pod.listed
        return self.inventory is None or key in self.listed or newer_than_inventory

    def present(self) -> list[KnownRank]:
        return [r for _, r in sorted(self.ranks.items()) if r.present]

    def is_dead(self, member: MemberId) -> bool:
        seen = self.ranks.get(member)
        if seen is not None and seen.dead:
            return True
        return self._gone_by_inventory(member)

    def _gone_by_inventory(self, member: MemberId) -> bool:
        """The newest inventory does not list its pod, so no process of it lives (R25). A rank that
        still talks overrules it (C4), and so does the agent of a pod that no inventory has listed
        yet: the inventory may be older than the pod."""
        if self.inventory is None:
            return False
        key = pod_of(member)
        if key in self.listed:
            return False
        pod = self.pods.get(key)
        if pod is not None and pod.connected and not pod.listed:
            return False
        seen = self.ranks.get(member)
        return seen is None or not seen.connected or bool(seen.suspect)

    def unaccounted(self, asked: set[MemberId]) -> str:
        """R6 (b): who of the job may live without having promised; empty if nobody may.

        Only an inventory can tell, since it names every pod of the job that may have processes."""
        if self.inventory is None:
            return "no inventory of the job's pods is known"
        for key in self.inventory.pods:
            pod = self.pods.get(key)
            if pod is None or not (pod.known or pod.newborn):
                return f"pod {key[0]}#{key[1]} has not reported yet"
        silent = (
            member
            for member, seen in self.ranks.items()
            if not (member in asked or seen.dismissed or seen.newborn or self.is_dead(member))
        )
        first = min(silent, default=None)
        if first is None:
            return ""
        seen = self.ranks[first]
        if seen.register is None and seen.alive_ns is not None:
            return f"rank {first} runs and has not registered yet, as pl.init() does"
        return f"rank {first} is silent and not known dead"

    def of_pod(self, slot: int, attempt: int) -> list[KnownRank]:
        return [seen for member, seen in self.ranks.items() if pod_of(member) == (slot, attempt)]

    def agent_of(self, member: MemberId) -> KnownPod | None:
        """The connected agent of a rank, which can kill it and give evidence."""
        pod = self.pods.get(pod_of(member))
        return pod if pod is not None and pod.connected else None

    def forget_dead(self, keep: set[MemberId], limit: int) -> None:
        """Bound the memory: the oldest dead that no generation needs go first, and with the last
        rank of a pod that is gone, the pod."""
        dead = [m for m in self.ranks if m not in keep and self.is_dead(m)]
        for member in dead[: max(0, len(dead) - limit)]:
            del self.ranks[member]
        if self.inventory is None:
            return
        named = {pod_of(member) for member in self.ranks} | self.listed
        gone = [key for key, pod in self.pods.items() if key not in named and not pod.connected]
        for key in gone[: max(0, len(gone) - limit)]:
            del self.pods[key]
