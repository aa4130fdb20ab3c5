"""The public Python API of Paceline: everything that a training script needs.

    import paceline as pl

    pl.init()
    optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loader = pl.DataLoader(dataset, batch_size=64, num_workers=2)
    for epoch in loader.epochs(10):
        for x, y in loader:
            loss_fn(model(x), y).backward()
            optimizer.step()

Each name is imported when it is first used, because the coordinator, the agent and the operator
import parts of this package without torch, and start often.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from paceline.train.context import init
    from paceline.train.group import group
    from paceline.train.job import evaluating, finish, is_publisher, log, progress, rank, size, stop
    from paceline.train.loader import DataLoader
    from paceline.train.optimizer import DistributedOptimizer
    from paceline.train.script.words import attach, keep, step
    from paceline.train.steps import steps

    __version__: str

__all__ = [
    "DataLoader",
    "DistributedOptimizer",
    "__version__",
    "attach",
    "evaluating",
    "finish",
    "group",
    "init",
    "is_publisher",
    "keep",
    "log",
    "progress",
    "rank",
    "size",
    "step",
    "steps",
    "stop",
]

_HOME = {
    "DataLoader": "loader",
    "DistributedOptimizer": "optimizer",
    "attach": "script.words",
    "evaluating": "job",
    "finish": "job",
    "group": "group",
    "init": "context",
    "is_publisher": "job",
    "keep": "script.words",
    "log": "job",
    "progress": "job",
    "rank": "job",
    "size": "job",
    "step": "script.words",
    "steps": "steps",
    "stop": "job",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value = import_module("importlib.metadata").version("paceline")
    elif name in _HOME:
        value = getattr(import_module(f"paceline.train.{_HOME[name]}"), name)
    else:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
