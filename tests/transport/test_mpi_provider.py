"""A libfabric provider that the environment names is used, or the error explains its absence."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from paceline.agent.launch import find_mpiexec
from paceline.transport.mpi.links import mpi_environment
from paceline.transport.mpi.provider import ProviderError, check_provider

from testing import left_files
from testing.agent_harness import pod
from testing.processes.history import descendants

pytestmark = pytest.mark.processes

MISSING = "no_such_provider;ofi_rxm"
MAKE = """\
import sys
from paceline.transport.factory import make_transport
transport = make_transport(sys.argv[1], local=True)
facts = transport.describe()
print(facts.get("mpi.provider"), facts.get("left out.mpi"), sep="|")
transport.shutdown()
"""


def environment(provider: str) -> dict[str, str]:
    return os.environ | mpi_environment(local=True) | {"FI_PROVIDER": provider}


def test_a_working_provider_is_accepted_and_leaves_no_files() -> None:
    tmpdir = Path(tempfile.gettempdir())
    below = partial(descendants, os.getpid())
    with left_files.OwnFiles(below, tmpdir, period_s=0.01) as own:
        check_provider(environment("tcp"))
        check_provider(environment("tcp;ofi_rxm"))
    assert own.left() == []


def test_a_provider_that_fails_is_reported_with_the_error_of_mpi_and_a_hint() -> None:
    with pytest.raises(ProviderError) as error:
        check_provider(environment(MISSING))
    for word in (f"FI_PROVIDER={MISSING}", "OFI call", "hint: ", "spec.fabric.profile", "auto"):
        assert word in str(error.value)


def made(backend: str, provider: str) -> subprocess.CompletedProcess[str]:
    """Make a rank's data channel in a process under its own mpiexec."""
    return subprocess.run(
        [find_mpiexec(), "-n", "1", sys.executable, "-c", MAKE, backend],
        env=environment(provider),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.exhaustive
def test_the_transport_reports_its_provider() -> None:
    done = made("mpi", "tcp;ofi_rxm")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "ofi;tcp;ofi_rxm|None"


def test_auto_continues_without_mpi_and_logs_it() -> None:
    done = made("auto", MISSING)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("None|MPI does not work with FI_PROVIDER=no_such_provider;")
    assert "backend auto goes on without mpi: MPI does not work with" in done.stderr


@pytest.mark.parametrize("by", ["pod", "container"])
def test_the_environment_of_a_pod_reaches_the_rank_through_mpiexec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    if by == "pod":
        monkeypatch.setenv("FI_PROVIDER", "tcp;ofi_rxm")
    of_job = (("FI_PROVIDER", "tcp;ofi_rxm"),) if by == "container" else ()
    script = "import os\nprint('provider', os.environ['FI_PROVIDER'], 'PMI_RANK' in os.environ)\n"

    async def body() -> None:
        async with pod(tmp_path, script, backend="mpi", env=of_job) as (agent, _):
            await agent.printed("provider tcp;ofi_rxm True")

    asyncio.run(body())
