"""Knowledge and decisions of a stub of a coordinator: small and honest, no network, no clock.

Worker pods that run count as ranks that train. The stub forms the first membership when all wanted
pods run, or all that the inventory lists. It drains surplus pods. It loses the state with the last
pod that has it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

Place = tuple[int, int]
"""(slot, attempt) of a worker pod."""


@dataclass
class State:
    """State that the ranks of a job carry from one coordinator to the next."""

    version: int = 0
    holders: set[str] = field(default_factory=set)
    """Uids of pods that have the weights."""


@dataclass
class Ring:
    """State machine of one coordinator."""

    job: str
    pod_uid: str
    replicas: int
    resumable: bool
    state: State
    seq: int = 0
    members: set[Place] = field(default_factory=set)
    formed: int = 0
    had_state: bool = False
    dead: set[Place] = field(default_factory=set)
    drained: set[Place] = field(default_factory=set)
    inventories: list[dict[str, Any]] = field(default_factory=list)
    targets: list[dict[str, Any]] = field(default_factory=list)
    outcome: dict[str, Any] | None = None
    stopping: bool = False
    slow: set[Place] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)
    """Inventories that omitted a living pod: a split brain."""

    @property
    def revision(self) -> int:
        """Revision of the newest inventory, or 0."""
        return self.inventories[-1]["revision"] if self.inventories else 0

    def finish(self) -> None:
        """Complete the job: all data is applied and the ranks are released."""
        self.outcome = {"complete": True, "reason": "Complete", "message": "released"}
        self.seq += 1

    def train(self) -> None:
        """Commit one more round."""
        self.state.version += 1
        self.seq += 1

    def hear(self, inventory: dict[str, Any], alive: dict[Place, str]) -> None:
        """Handle an inventory; record it in `wrong` if it omits a living pod."""
        listed = {(slot, attempt) for slot, attempt in inventory["pods"]}
        if left_out := set(alive) - listed:
            self.wrong.append(f"{left_out} live and are not in {inventory}")
        if inventory["revision"] > self.revision:
            self.inventories.append(inventory)
        self.seq += 1

    def aim(self, targets: dict[str, Any]) -> None:
        """Handle new targets."""
        self.targets.append(targets)
        self.replicas = targets.get("replicas", self.replicas)
        self.stopping |= bool(targets.get("stop"))
        self.seq += 1

    def step(self, alive: dict[Place, str]) -> set[Place]:
        """Update the membership from the pods that run now.

        Args:
            alive: (slot, attempt) of each running worker pod -> its uid.

        Returns:
            the pods that now end with exit code 0.
        """
        if self.outcome is not None:
            return set(alive)  # late pods have nothing left to do
        if not alive:
            return set()
        if self.stopping:
            self.finish()
            return set(alive)
        self.dead |= self.members - set(alive)
        uids = set(alive.values())
        if not self.state.holders & uids:
            if self.had_state:
                self.outcome = {
                    "complete": False,
                    "reason": "StateLost",
                    "message": f"all ranks with version {self.state.version} are lost",
                }
                self.seq += 1
                return set()
            if len(alive) < self.replicas and not self._all_have_come(alive):
                return set()
            self.state.holders.clear()
            if not self.resumable:
                self.state.version = 0
        if set(alive) != self.members:
            self.members = set(alive)
            self.formed += 1
            self.state.version += 1
            self.seq += 1
        self.state.holders |= uids
        self.had_state = True
        if not self.targets:
            return set()  # the number of wanted replicas is not known yet
        staying = [place for place in sorted(alive) if place not in self.drained]
        leaving = set(staying[self.replicas :])
        self.drained |= leaving
        return leaving

    def _all_have_come(self, alive: dict[Place, str]) -> bool:
        listed = self.inventories[-1]["pods"] if self.inventories else []
        return bool(listed) and {(slot, attempt) for slot, attempt in listed} == set(alive)

    def body(self) -> dict[str, Any]:
        """Return the answer to GET /v1/status."""
        ranks = [
            {
                "member": [slot, 0, attempt * 1000],
                "state": "active",
                "rank": index,
                "facts": {"step_seconds": 1.0 if (slot, attempt) in self.slow else 0.1},
            }
            for index, (slot, attempt) in enumerate(sorted(self.members))
        ]
        ranks += [
            {"member": [s, 0, a * 1000], "state": "dead", "finished": self.stopping}
            for s, a in sorted(self.dead)
        ]
        return {
            "job": self.job,
            "coordinator": self.pod_uid,
            "seq": self.seq,
            "generation": [1, self.pod_uid, self.formed],
            "changes": [{}] if self.formed else [],
            "replicas": self.replicas,
            "told": bool(self.targets),
            "inventory": self.revision,
            "ranks": ranks,
            "version": self.state.version,
            "log": {"rounds": {"all": self.state.version}, "round_s": 0.1},
            "stopping": self.stopping,
            "outcome": self.outcome,
        }
