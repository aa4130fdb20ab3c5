"""The command line and environment that start a rank. A pure function of job and machine.

Over MPI a rank needs a process manager of its own, `mpiexec -n 1`, which speaks PMI with it. Other
ranks are started directly. Either way the first program is the shim (`agent.shim`). It receives the
order (command, environment, folder) from the agent and becomes the user's command.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from paceline_api.errors import PacelineError
from paceline_api.ids import MemberId
from paceline_api.jobfile import JobFile
from paceline_api.names import RESERVED_ENV, TORCHELASTIC
from paceline_api.types.enums import Backend

from paceline import scratch
from paceline.agent import shim
from paceline.agent.network import nccl_environment
from paceline.environment import PREFIX, AgentSettings, rank_environment

ENV_HWLOC: Final = "HWLOC_XMLFILE"
"""Variable with the file from which hwloc reads the machine. Without it hydra writes a file into
/tmp, whatever TMPDIR is, and the file stays if hydra is killed."""
ENV_COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Variable with the folder in which torch keeps compiled code. The default is in TMPDIR, which is
removed with the rank."""
_REFERENCE: Final = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


class ShimOrder(msgspec.Struct, frozen=True):
    """Order that the agent sends to a shim: the command to become, and its surroundings."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """Variables that are added to the environment that the launcher leaves."""
    dir: str
    umask: int | None = None
    """The user's umask, if the agent runs with another one."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Command line, environment and folders that start one rank."""

    argv: tuple[str, ...]
    env: dict[str, str]
    guarded: bool
    """True if there is a chain of launchers between agent and rank."""
    order: ShimOrder
    folders: tuple[Path, ...]
    """Folders to make before the launch, and to remove when nothing of the rank is left."""


def find_mpiexec() -> str:
    """Find the mpiexec that belongs to this interpreter, or else the first one in PATH.

    Returns:
        An absolute path, since hydra looks for its helpers beside the name under which it was
        called. Empty if there is none.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec") or ""


def needs_mpi(backend: str, mpiexec: str) -> bool:
    """Return True if the ranks have to be started by mpiexec.

    Args:
        backend: Backend of the job. `auto` works without MPI.
        mpiexec: Path of mpiexec, or an empty text.

    Returns:
        False if the ranks are started directly.

    Raises:
        PacelineError: MPI is asked for and there is no mpiexec.
    """
    if backend == Backend.MPI and not mpiexec:
        raise PacelineError(
            "spec.collective.backend: mpi needs mpiexec, and there is none in PATH",
            hint="pip install mpich, or set the backend to auto",
        )
    return backend in (Backend.MPI, Backend.AUTO) and bool(mpiexec)


def plan_rank(
    settings: AgentSettings,
    spec: JobFile,
    member: MemberId,
    *,
    shard: int = 0,
    outside: Mapping[str, str],
    mpiexec: str,
    socket_name: str,
    key: str,
    agent_pid: int,
    sockets: Path,
    temporary: Path,
) -> LaunchPlan:
    """Return how to start one rank.

    Args:
        settings: Settings of the agent.
        spec: The job.
        member: Member id of the new process.
        shard: Which shard of the model it holds.
        outside: The agent's own environment.
        mpiexec: Path of mpiexec. Empty: start the rank directly.
        socket_name: Name of the agent's socket for shims.
        key: Key of this launch, with which the shim introduces itself.
        agent_pid: Pid of the agent.
        sockets: The agent's own folder for sockets (`Scratch`).
        temporary: The agent's own folder for temporary files (`Scratch`).

    Returns:
        The plan.
    """
    name = f"{member.slot}.{member.local}-{member.attempt}" + (f"-{shard}" if shard else "")
    own_sockets, own_temporary = sockets / name, temporary / name / scratch.TMPDIR
    # Variables of a torchrun around the run. `pl.init()` uses them to detect one inside it, and a
    # script that nobody has launched must not find a group (S16).
    strange = (PREFIX, TORCHELASTIC)
    inherited = {
        name: text
        for name, text in outside.items()
        if not name.startswith(strange) and name not in RESERVED_ENV
    }
    own: dict[str, str] = {"TMPDIR": str(own_temporary)}
    own[ENV_COMPILED] = inherited.get(ENV_COMPILED, str(temporary.parent / "torchinductor"))
    if settings.local or settings.procs * spec.model > 1:
        # Otherwise each rank of a machine would start one thread per core.
        own.setdefault("OMP_NUM_THREADS", inherited.get("OMP_NUM_THREADS", "1"))
    own["LOCAL_RANK"] = str(member.local * spec.model + shard)
    own["GLOO_SOCKET_IFNAME"] = "lo"
    if spec.model > 1:
        own.update(group_of(shard, spec.model))
    own["PYTHONUNBUFFERED"] = inherited.get("PYTHONUNBUFFERED", "1")  # so that logs appear at once
    derived = rank_environment(settings, member, shard, scratch=own_sockets)
    known = {**inherited, **own, **derived}
    for name, text in spec.env:
        known[name] = own[name] = expand(text, known)
    if spec.gpu_direct:
        own.update(nccl_environment(settings.run_dir, member))
    own.update(derived)
    order = ShimOrder(
        tuple(expand(part, known) for part in spec.command), own, spec.working_dir, settings.umask
    )
    env = {
        **inherited,
        # This file does not exist: hwloc then examines the machine itself.
        ENV_HWLOC: inherited.get(ENV_HWLOC, str(own_temporary / "hwloc.xml")),
        "TMPDIR": str(own_temporary),
        shim.ENV_SOCKET: socket_name,
        shim.ENV_KEY: key,
        shim.ENV_AGENT: str(agent_pid),
        shim.ENV_GUARD: "1" if mpiexec else "0",
    }
    argv = (*_launcher(mpiexec), *shim_argv())
    folders = tuple(dict.fromkeys((own_sockets, own_temporary.parent, own_temporary)))
    return LaunchPlan(argv, env, bool(mpiexec), order, folders)


def group_of(shard: int, model: int) -> dict[str, str]:
    """Return the variables of a rank that holds one shard of the model, for torch's process group.

    The ranks of its group start and end together. `pl.group()` connects them and knows the port
    (D20). Other ranks have no such variables: a script of `paceline launch` gets those of torchrun
    there, and without it `init_process_group()` finds no group and fails at once (S16).

    Args:
        shard: Which shard this rank holds.
        model: Number of shards.

    Returns:
        Environment variables.
    """
    return {
        "RANK": str(shard),
        "WORLD_SIZE": str(model),
        "MASTER_ADDR": "127.0.0.1",
    }


def shim_argv() -> Sequence[str]:
    """Return the command line of the shim, with an isolated interpreter without site-packages."""
    # Isolated, without site-packages: starts in 15 ms, and no module of the user shadows it.
    return (sys.executable, "-I", "-S", str(Path(shim.__file__).resolve()))


def _launcher(mpiexec: str) -> Sequence[str]:
    if not mpiexec:
        return ()
    # With the address hydra does not resolve the host's name, which may fail in containers.
    # With `fork` it does not ask a batch system of the host.
    return (mpiexec, "-launcher", "fork", "-localhost", "127.0.0.1", "-n", "1")


def expand(text: str, known: Mapping[str, str]) -> str:
    """Expand $(NAME) as Kubernetes does: unknown names stay unchanged, and $$ is a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        return "$" if name is None else known.get(name, match.group(0))

    return _REFERENCE.sub(replace, text)
