"""The order of work after a round: first what the main thread waits for, then the rest."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from paceline.core.protocol.records import DataPlan
from paceline.worker import engine
from paceline.worker.metrics.rounds import RoundMetrics
from paceline.worker.state.committed import Committed
from paceline.worker.state.gradients import Gradients
from torch import nn

PATIENCE_S = 60.0


def test_round_metrics_are_recorded_after_the_main_thread_has_resumed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    order: list[str] = []
    counted = threading.Semaphore(0)
    applied, resumed = RoundMetrics.applied, engine.Engine.resumed

    def counts(metrics: RoundMetrics, go: Any, *rest: Any) -> None:
        applied(metrics, go, *rest)
        order.append(f"figures of round {go.round}")
        counted.release()

    def goes_on(session: engine.Engine, resume: Any) -> None:
        order.append(f"version {resume.version}")
        resumed(session, resume)

    monkeypatch.setattr(RoundMetrics, "applied", counts)
    monkeypatch.setattr(engine.Engine, "resumed", goes_on)
    session = engine.Engine(None)
    try:
        model = nn.Linear(2, 1)
        gradients = Gradients(model.named_parameters())
        whole = Committed(model, torch.optim.SGD(model.parameters(), lr=0.1), gradients)
        session.begin(gradients, whole, DataPlan(), 2)
        for _ in range(3):
            model(torch.ones(2, 2)).sum().backward()
            session.step(leases=(), samples=2, unit=1, metrics=())
        for _ in range(3):  # those of the last round arrive without another step
            assert counted.acquire(timeout=PATIENCE_S)
    finally:
        session.close()
    figures = [what for what in order if what.startswith("figures")]
    assert figures == [f"figures of round {n}" for n in range(3)]
    for n in range(3):
        assert order.index(f"version {n + 1}") < order.index(figures[n])
