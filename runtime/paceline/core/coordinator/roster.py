"""Known processes of the job: which ones are registered, silent or dead (R6, R25)."""

from __future__ import annotations

from dataclasses import dataclass, field

from paceline_api.ids import NO_GENERATION, GenerationId, MemberId, pod_of
from paceline_api.status import LogStatus
from paceline_api.types.enums import Network

from paceline.core.messages import Heartbeat, Inventory, Register
from paceline.core.protocol.snapshot import Kept


@dataclass(slots=True)
class KnownRank:
    """One rank process. Silence makes it suspect; only evidence makes it dead (R25)."""

    member: MemberId
    register: Register | None = None
    """Last registration of the rank; None before the first one."""
    connected: bool = False
    """True while messages of this rank arrive: over its line and its agent's connection (R43)."""
    heard_ns: int = 0
    """Time of its last message or heartbeat."""
    ready_ns: int = 0
    """Time at which it was first ready to train."""
    gone_ns: int | None = None
    """Time at which its line or its agent's connection was closed; None while both are open."""
    suspect: str = ""
    """Reason why it is not asked anything; empty if it is not suspect."""
    dead: str = ""
    """Evidence of its death; empty while it may live."""
    pid: int = 0
    alive_ns: int | None = None
    """Time at which its agent first reported that the process runs."""
    unheard: bool = False
    """True once an Event has named it as a process that runs without having registered."""
    last: GenerationId = NO_GENERATION
    """Id of its last GEN record, as far as known (R5)."""
    gen_active: tuple[MemberId, ...] = ()
    """Active ranks of the record `last` (R6)."""
    version: int = 0
    """Version of its committed state."""
    has_state: bool = False
    """True if it has weights, even if they date from before it was left out."""
    checkpoint: Kept | None = None
    """The newest checkpoint that it has reported to see."""
    current: bool = False
    """True if it has the state of the generation that this coordinator formed last."""
    leaving: bool = False
    """True if it drains."""
    left_early: bool = False
    """True if its script left the training loop before the job was over (D7)."""
    stopped: GenerationId | None = None
    """Generation in which it reported the stop round; None before (R17)."""
    started: GenerationId | None = None
    """Generation of its last STARTED."""
    mute: bool = False
    """True if suspect because it owes an answer or is stuck. A heartbeat does not clear that."""
    dismissed: bool = False
    """True once it was ordered to end."""
    finished: bool = False
    """True if its process has ended after it was released (R17)."""
    newborn: bool = False
    """True if its agent started it while this coordinator was in charge, and it has not registered.
    It cannot be in a generation that this coordinator does not know."""
    kill_asked: bool = False
    """True once its agent was asked to kill it."""
    promise: GenerationId = NO_GENERATION
    """Highest generation that it has promised, from its last heartbeat (R3)."""
    beat: Heartbeat = field(init=False)
    """Last heartbeat of the rank that was listed in a beat of its pod; `version`, `promise`, `last`
    may be older than those here."""
    away_reported: bool = False
    """True once an Event has named its stuck script."""
    facts: dict[str, float] = field(default_factory=dict)
    """What it has measured about itself, by `Fact`, from its last figures."""
    log: LogStatus | None = None
    """What its round log says, from its last figures; None if they do not report it."""
    figures_version: int = 0
    """Version of its committed state when it sent its last figures."""
    carrier: Network = Network.UNKNOWN
    """Network that carries its data channel to other pods, as reported by its agent."""

    def __post_init__(self) -> None:
        self.beat = Heartbeat(self.member, NO_GENERATION, NO_GENERATION, 0)

    @property
    def present(self) -> bool:
        """Return True if it can be asked: registered, connected, and neither suspect nor dead."""
        return self.register is not None and self.connected and not self.suspect and not self.dead

    @property
    def ready(self) -> bool:
        """True if it has registered with its model and data known: it may become a member."""
        return self.register is not None and self.register.ready


@dataclass(slots=True)
class KnownPod:
    """One pod, which is one agent with its rank processes."""

    slot: int
    attempt: int
    host: str = ""
    connected: bool = False
    """True while its agent has a connection to this coordinator."""
    awake_ns: int = 0
    """Time since which its agent has been heard without a long pause. Before that, the agent may
    have been stopped together with the messages of its ranks (R43)."""
    heard_ns: int = 0
    """Time of the last message of its agent."""
    silent: bool = False
    """True if the job ends without a report of this agent, which stays silent after the release."""
    living: set[MemberId] = field(default_factory=set)
    """Rank processes that the agent has started and not reaped."""
    known: bool = False
    """True once the agent has reported which processes it has."""
    newborn: bool = False
    """True if an inventory named this pod for the first time while this coordinator was in charge.
    Until the agent reports, no process of the pod can be in a generation that is unknown here."""
    listed: bool = False
    """True if any inventory has ever listed this pod."""
    draining: bool = False
    """True once the pod was asked to drain."""
    done: str = ""
    """Outcome of the whole pod, once it has ended; empty before."""
    since_ns: int = 0
    """Time at which this pod became known."""


@dataclass(slots=True)
class Roster:
    """All known ranks and pods of the job, and the newest inventory."""

    ranks: dict[MemberId, KnownRank] = field(default_factory=dict)
    """Known ranks, by member id."""
    pods: dict[tuple[int, int], KnownPod] = field(default_factory=dict)
    """Known pods, by slot and attempt."""
    inventory: Inventory | None = None
    """The newest inventory; None before the first one."""
    listed: frozenset[tuple[int, int]] = frozenset()
    """Slot and attempt of the pods that the newest inventory lists."""

    def take(self, inventory: Inventory) -> None:
        """Replace the inventory."""
        self.inventory, self.listed = inventory, frozenset(inventory.pods)

    def may_greet(self, slot: int, attempt: int) -> bool:
        """Return True if an agent may speak for this pod.

        It may if any inventory has listed the pod, the newest or an earlier one (C4), or if no
        inventory is known yet.

        Args:
            slot: Slot of the pod.
            attempt: Attempt of the pod in that slot.

        Returns:
            True if the greeting may be accepted.
        """
        known = self.pods.get((slot, attempt))
        listed = (slot, attempt) in self.listed or (known is not None and known.listed)
        return self.inventory is None or listed

    def rank(self, member: MemberId) -> KnownRank:
        """Return the record of a rank; create it if the rank is new."""
        if member not in self.ranks:
            self.ranks[member] = KnownRank(member)
        return self.ranks[member]

    def pod(self, slot: int, attempt: int, now_ns: int) -> KnownPod:
        """Return the record of a pod; create it if the pod is new."""
        key = (slot, attempt)
        if key not in self.pods:
            self.pods[key] = KnownPod(slot, attempt, since_ns=now_ns)
        return self.pods[key]

    def running_pods(self) -> list[KnownPod]:
        """Return the pods that have not ended.

        A pod that was killed sends no last message: it has ended once the newest inventory does not
        list it.

        Returns:
            The pods, in the order in which they became known.
        """
        return [pod for key, pod in self.pods.items() if self._runs(key, pod)]

    def _runs(self, key: tuple[int, int], pod: KnownPod) -> bool:
        if pod.done:
            return False
        newer_than_inventory = pod.connected and not pod.listed
        return self.inventory is None or key in self.listed or newer_than_inventory

    def present(self) -> list[KnownRank]:
        """Return the ranks that can be asked, in rank order."""
        return [r for _, r in sorted(self.ranks.items()) if r.present]

    def is_dead(self, member: MemberId) -> bool:
        """Return True if there is evidence that this process does not live (R25)."""
        rank = self.ranks.get(member)
        if rank is not None and rank.dead:
            return True
        return self._gone_by_inventory(member)

    def _gone_by_inventory(self, member: MemberId) -> bool:
        """Return True if the newest inventory proves that no process of this pod lives (R25).

        Two things overrule an inventory that does not list the pod: a rank that still sends
        messages (C4), and the connected agent of a pod that no inventory has ever listed. In the
        second case the inventory may be older than the pod.

        Args:
            member: The rank in question.

        Returns:
            True if the inventory proves the death.
        """
        if self.inventory is None:
            return False
        key = pod_of(member)
        if key in self.listed:
            return False
        pod = self.pods.get(key)
        if pod is not None and pod.connected and not pod.listed:
            return False
        rank = self.ranks.get(member)
        return rank is None or not rank.connected or bool(rank.suspect)

    def unaccounted(self, asked: set[MemberId]) -> str:
        """Return which process may live without having promised, or an empty string if none may.

        Only an inventory can rule that out, since it names every pod of the job that may have
        processes. This is condition (b) of R6.

        Args:
            asked: Members that have promised, or will be asked to.

        Returns:
            One sentence that names the first such pod or rank; empty if there is none.
        """
        if self.inventory is None:
            return "no inventory of the job's pods is known"
        for key in self.inventory.pods:
            pod = self.pods.get(key)
            if pod is None or not (pod.known or pod.newborn):
                return f"pod {key[0]}#{key[1]} has not reported yet"
        silent = (
            member
            for member, rank in self.ranks.items()
            if not (member in asked or rank.dismissed or rank.newborn or self.is_dead(member))
        )
        first = min(silent, default=None)
        if first is None:
            return ""
        rank = self.ranks[first]
        if rank.register is None and rank.alive_ns is not None:
            return f"rank {first} runs and has not registered yet, as pl.init() does"
        return f"rank {first} is silent and not known dead"

    def of_pod(self, slot: int, attempt: int) -> list[KnownRank]:
        """Return the known ranks of one pod."""
        return [rank for member, rank in self.ranks.items() if pod_of(member) == (slot, attempt)]

    def agent_of(self, member: MemberId) -> KnownPod | None:
        """Return the connected agent of a rank, which can kill it and give evidence; else None."""
        pod = self.pods.get(pod_of(member))
        return pod if pod is not None and pod.connected else None

    def forget_dead(self, keep: set[MemberId], limit: int) -> None:
        """Drop the oldest dead ranks, and pods whose last rank was dropped, to bound memory.

        Args:
            keep: Members that a generation still needs.
            limit: Number of dead ranks, and of gone pods, that are kept.
        """
        dead = [m for m in self.ranks if m not in keep and self.is_dead(m)]
        for member in dead[: max(0, len(dead) - limit)]:
            del self.ranks[member]
        if self.inventory is None:
            return
        named = {pod_of(member) for member in self.ranks} | self.listed
        gone = [key for key, pod in self.pods.items() if key not in named and not pod.connected]
        for key in gone[: max(0, len(gone) - limit)]:
            del self.pods[key]
