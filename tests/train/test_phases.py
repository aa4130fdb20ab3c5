"""The phases of a step that hooks on loader and model report; the hooks are removed afterwards."""

from __future__ import annotations

import copy
import io

import paceline as pl
import pytest
import torch
from paceline.core.anatomy.samples import StepPhase
from paceline.train import context

from testing.lone_session import LoneSession


def train(session: LoneSession) -> torch.nn.Linear:
    context.install(context.Context(session))
    model = torch.nn.Linear(2, 1)
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    loader = pl.DataLoader(torch.utils.data.TensorDataset(torch.ones(4, 2)), batch_size=2)
    for _ in loader.epochs(1):
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
            torch.save(model, io.BytesIO())
            copy.deepcopy(model)
            model.eval()
            model(x)
            model.train()
    return model


def test_loader_and_model_report_the_phases_of_a_step() -> None:
    session = LoneSession()
    model = train(session)
    one = [StepPhase.LOADING, StepPhase.SCRIPT, StepPhase.FORWARD, StepPhase.BACKWARD]
    assert session.phases[: 2 * len(one)] == 2 * one
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.long
def test_the_phase_hooks_do_not_break_the_graph_of_a_compiled_model() -> None:
    session = LoneSession()
    context.install(context.Context(session))
    model = torch.nn.Linear(2, 1)
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for _ in pl.steps(1):
        compiled(torch.ones(3, 2)).sum().backward()
        optimizer.step()
    assert session.version == 1
