"""Imports that scripts with frameworks share, done once in the fork server.

Each rank of a script with Lightning or transformers spends three to four CPU-seconds on packages
that have nothing to do with a job: SciPy, pandas, scikit-learn, torchmetrics. The frameworks
themselves are imported by the ranks. They take names of torch.distributed as they are imported, and
a job must have replaced those names by then.
"""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from testing.processes import fork_server
from testing.processes.forked_call import the_fork_server

FRAMEWORKS: Final = frozenset({"accelerate", "lightning", "peft", "transformers", "trl"})
BELOW_THEM: Final = ("pandas", "scipy.optimize", "scipy.signal", "sklearn", "torchmetrics")
"""Modules that the frameworks import, and that take no name of torch.distributed."""

_imported: Final[set[str]] = set()
"""Names of the fork servers that have imported them."""


def prepare_for(script: Path) -> None:
    """Make the fork server of calls import what the frameworks of a script import, if it has any.

    Args:
        script: path of a training script.
    """
    server = the_fork_server().name
    if server in _imported or not _packages_of(script) & FRAMEWORKS:
        return
    fork_server.import_in(server, [name for name in BELOW_THEM if find_spec(name.split(".")[0])])
    _imported.add(server)


def _packages_of(script: Path) -> set[str]:
    """Return the names of the packages that a script imports."""
    nodes = list(ast.walk(ast.parse(script.read_bytes())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
