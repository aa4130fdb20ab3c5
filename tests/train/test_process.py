"""A job that is over has restored what it changed in the script's process."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import paceline as pl
import pytest
import torch
from paceline.errors import UsageError
from paceline.train import context
from paceline.train.mistakes import explain_errors
from paceline.transport.variables import restore_variables, set_variable
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils.data import TensorDataset


@pytest.fixture
def _ends() -> Iterator[None]:
    yield
    now = context.session()
    if now is not None:
        now.close()  # type: ignore[attr-defined]


def state_of_process(model: nn.Module) -> dict[str, Any]:
    return {
        "interpreter lock": sys.getswitchinterval(),
        "hooks for errors": (sys.excepthook, threading.excepthook, sys.unraisablehook),
        "environment": dict(os.environ),
        "signal handlers": {s: signal.getsignal(s) for s in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "threads of torch": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "modes of torch": (torch.is_grad_enabled(), torch.get_default_dtype()),
        "random numbers": torch.initial_seed(),
        "hooks of optimizers": dict(torch_optimizer._global_optimizer_pre_hooks),
        "hooks of the model": (dict(model._forward_pre_hooks), dict(model._forward_hooks)),
        "hooks of parameters": [p._post_accumulate_grad_hooks for p in model.parameters()],
        "working folder": Path.cwd(),
    }


@pytest.mark.usefixtures("_ends")
@pytest.mark.parametrize("end", ["stop", "the loop"])
def test_a_job_restores_what_it_changed_in_the_process(end: str) -> None:
    def shows(*_: object) -> None:
        """Stand in for the script's own hook."""

    own, sys.excepthook = sys.excepthook, shows
    sys.setswitchinterval(0.005)  # a job of an earlier test may not have ended
    try:
        # Large enough for several segments, which have hooks.
        model = nn.Sequential(nn.Linear(600, 600), nn.Linear(600, 600))
        importlib.import_module("torch._dynamo")  # its variables are not the job's
        before = state_of_process(model)
        pl.init()
        optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        loader = pl.DataLoader(TensorDataset(torch.ones(4, 600)), 2)
        during = {}
        for _ in loader.epochs(1):
            for (x,) in loader:
                model(x).sum().backward()
                during = state_of_process(model)
                optimizer.step()
                if end == "stop":
                    break
            if end == "stop":
                pl.stop()
                break
        changed = {name for name in before if before[name] != during[name]}
        assert {"interpreter lock", "hooks for errors"} <= changed
        assert {"hooks of optimizers", "hooks of the model", "hooks of parameters"} <= changed
        after = state_of_process(model)
        for name in before.keys() - {"hooks of parameters"}:
            assert after[name] == before[name], name
        assert not any(after["hooks of parameters"])
    finally:
        sys.excepthook = own


@pytest.mark.usefixtures("_ends")
def test_finishing_before_all_samples_are_used_is_an_error() -> None:
    """Finish early; the script would otherwise end there without a message."""
    model = nn.Linear(2, 1)
    pl.init()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = pl.DataLoader(TensorDataset(torch.ones(4, 2)), 2)
    for _ in loader.epochs(1):
        for (x,) in loader:
            model(x).sum().backward()
            optimizer.step()
            break
        break
    with pytest.raises(UsageError, match=r"samples of the job are left(.|\n)*pl.stop"):
        pl.finish()


def test_environment_variables_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TEST_SET", "mine")
    monkeypatch.delenv("PACELINE_TEST_UNSET", raising=False)
    for value in ("one", "two"):
        set_variable("PACELINE_TEST_SET", value)
        set_variable("PACELINE_TEST_UNSET", value)
        assert os.environ["PACELINE_TEST_SET"] == os.environ["PACELINE_TEST_UNSET"] == value
    restore_variables()
    assert os.environ["PACELINE_TEST_SET"] == "mine"
    assert "PACELINE_TEST_UNSET" not in os.environ


def test_errors_still_reach_the_scripts_own_excepthook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[object] = []
    reported: list[str] = []
    monkeypatch.setattr(sys, "excepthook", lambda *error: shown.append(error[1]))
    mine = sys.excepthook
    end = explain_errors(lambda why, _: reported.append(why))
    error = ValueError("of the script")
    sys.excepthook(ValueError, error, None)
    assert shown == [error]
    assert "of the script" in reported[0]
    end()
    assert sys.excepthook is mine
    end = explain_errors(lambda why, _: reported.append(why))
    monkeypatch.setattr(sys, "excepthook", later := lambda *_: None)
    end()
    assert sys.excepthook is later, "it was set by the script since"
