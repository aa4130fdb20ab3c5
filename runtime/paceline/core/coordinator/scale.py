"""Who leaves when fewer replicas are wanted (section 8, C9)."""

from __future__ import annotations

from collections.abc import Collection

from paceline.core.coordinator.roster import Pod, Roster
from paceline.core.ids import MemberId


def pods_to_drain(roster: Roster, replicas: int, members: Collection[MemberId] | None) -> list[Pod]:
    """Pods to drain now: those that do not train first, then the slowest, then the newest slot.

    `members`: None before this coordinator has formed a generation; who has state trains."""
    inventory = roster.inventory.pods if roster.inventory else None
    newest = dict(sorted(roster.pods))
    living = [
        p
        for key, p in sorted(roster.pods.items())
        if not p.done
        and not p.draining
        and p.connected
        and (inventory is None or key in inventory)
        and newest[p.slot] == p.attempt
    ]
    surplus = len(living) - replicas
    if surplus <= 0:
        return []

    def order(pod: Pod) -> tuple[bool, float, int]:
        ranks = [r for x, r in roster.ranks.items() if x in pod.living]
        running = bool(ranks) and all(
            r.has_state if members is None else r.member in members for r in ranks
        )
        step_s = max((r.facts.get("step_seconds", 0.0) for r in ranks), default=0.0)
        return (running, -step_s, -pod.slot)

    return sorted(living, key=order)[:surplus]
