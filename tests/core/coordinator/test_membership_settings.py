"""Settings that only the coordinator keeps to act at once when its owner changes them."""

from __future__ import annotations

from typing import Any

from paceline.coordinator.config import config_of
from paceline.core import coordinator as coord
from paceline.core import messages as m
from paceline.core import wire
from paceline.core.coordinator.report import status
from paceline_api.membership import MembershipSettings
from paceline_api.types.enums import StragglerResponse

from testing.field_samples import resolved
from tests.core.coordinator.test_coordinator import SETTLE_MS, A, B, Desk, kinds, register


def settings(*overrides: str) -> MembershipSettings:
    return MembershipSettings.of(resolved(overrides))


def send(desk: Desk, wanted: MembershipSettings) -> list[Any]:
    """Send settings as the operator does, over the wire."""
    targets = m.Targets(membership=wanted, membership_id=wanted.id)
    read = wire.body(m.Targets, wire.to_json(targets).encode())
    assert read == targets
    return desk.post(coord.SetTargets(read))


def test_a_lower_min_replicas_starts_a_job_that_waits() -> None:
    desk = Desk(replicas=4, min_replicas=3)
    desk.pods(0, 1)
    for who in (A, B):
        desk.agent(who)
        desk.say(register(who))
    assert "Prepare" not in kinds(desk.post(coord.Tick(), SETTLE_MS))
    lower = settings("minReplicas=2", "elasticity.settleSeconds=0")
    assert kinds(send(desk, lower)).count("Prepare") == 2


def test_all_settings_of_the_membership_are_taken_over_and_reported() -> None:
    desk = Desk()
    wanted = settings(
        "minReplicas=2",
        "elasticity={settleSeconds: 7, stabilizationSeconds: 8, allowedSizes: [2, 4]}",
        "checkpoint={path: /c, required: true}",
        "failurePolicy.maxSkippedBatches=3",
        "straggler.respond=[RestartInPlace]",
    )
    send(desk, wanted)
    config = desk.state.config
    assert all(getattr(config, name) == value for name, value in wanted.fields().items())
    assert config.straggler is not None
    assert config.straggler.respond == (StragglerResponse.RESTART_IN_PLACE,)
    assert status(desk.state).membership_settings == wanted.id


def test_a_new_coordinator_reports_the_settings_of_its_file() -> None:
    """The operator therefore sends settings only where they differ."""
    job = resolved(("minReplicas=3", "elasticity.settleSeconds=9"))
    config = config_of(job)
    assert config.membership_settings == MembershipSettings.of(job).id
    assert config.min_replicas == 3
    assert MembershipSettings.of(job).id != settings("minReplicas=3").id
