"""How a rank is started: argv and environment, as a pure function of the job and the machine.

Over MPI a rank needs a process manager of its own, `mpiexec -n 1`, that speaks PMI to it; others
are started directly. Either way the first program is the shim (`agent.shim`), which receives the
order - command, environment, folder - from the agent and turns into the user's command.
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
from paceline_api.jobfile import JobFile
from paceline_api.names import TORCHELASTIC
from paceline_api.types.enums import Backend

from paceline import scratch
from paceline.agent import shim
from paceline.agent.network import nccl_environment
from paceline.core.protocol.ids import MemberId
from paceline.environment import PREFIX, AgentSettings, rank_environment

ENV_HWLOC: Final = "HWLOC_XMLFILE"
"""Where hwloc reads the machine from. Without it hydra writes a file into /tmp, whatever TMPDIR is,
which stays there if hydra is killed."""
ENV_COMPILED: Final = "TORCHINDUCTOR_CACHE_DIR"
"""Where torch keeps what it has compiled; by default in TMPDIR, where it would go with a rank."""
_REFERENCE: Final = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


class ShimOrder(msgspec.Struct, frozen=True):
    """What the shim shall become."""

    argv: tuple[str, ...]
    env: dict[str, str]
    """Added to the environment that the launcher leaves."""
    dir: str
    umask: int | None = None
    """Of the user, where the agent has one of its own."""


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    argv: tuple[str, ...]
    env: dict[str, str]
    guarded: bool
    """There is a chain of launchers between agent and rank."""
    order: ShimOrder
    folders: tuple[Path, ...]
    """To be made before the launch, and removed when nothing of the rank is left."""


def find_mpiexec() -> str:
    """The mpiexec that belongs to this interpreter, else the first one in PATH; empty if none.

    An absolute path: hydra looks for its helpers beside the name under which it was called.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec") or ""


def needs_mpi(backend: str, mpiexec: str) -> bool:
    """Raises PacelineError if MPI is asked for and missing; `auto` goes without."""
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
    """`outside`: the agent's own environment. `mpiexec`: empty to start the rank directly.
    `sockets`, `temporary`: the agent's own folders (`Scratch`)."""
    name = f"{member.slot}.{member.local}-{member.attempt}" + (f"-{shard}" if shard else "")
    own_sockets, own_temporary = sockets / name, temporary / name / scratch.TMPDIR
    # Of a torchrun around the run. One within it is a mistake, which `pl.init()` finds by these.
    strange = (PREFIX, TORCHELASTIC)
    inherited = {name: text for name, text in outside.items() if not name.startswith(strange)}
    own: dict[str, str] = {"TMPDIR": str(own_temporary)}
    own[ENV_COMPILED] = inherited.get(ENV_COMPILED, str(temporary.parent / "torchinductor"))
    if settings.local or settings.procs * spec.model > 1:
        # Ranks that share a machine would each start a thread per core.
        own.setdefault("OMP_NUM_THREADS", inherited.get("OMP_NUM_THREADS", "1"))
    alone = spec.model == 1
    own.update(group_of_one(member) if alone else group_of(member, shard, spec.model))
    own["PYTHONUNBUFFERED"] = inherited.get("PYTHONUNBUFFERED", "1")  # logs while they happen
    told = rank_environment(settings, member, shard, scratch=own_sockets)
    known = {**inherited, **own, **told}
    for name, text in spec.env:
        known[name] = own[name] = expand(text, known)
    if spec.gpu_direct:
        own.update(nccl_environment(settings.run_dir, member))
    own.update(told)
    order = ShimOrder(
        tuple(expand(part, known) for part in spec.command), own, spec.working_dir, settings.umask
    )
    env = {
        **inherited,
        # Where nothing is: then hwloc looks at the machine itself.
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


def group_of_one(member: MemberId) -> dict[str, str]:
    """What `torch.distributed.init_process_group()` reads. A job's ranks come and go, which no
    process group of torch's can follow: each rank is alone in its own (D14)."""
    return {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": str(member.local),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any that is free
        "GLOO_SOCKET_IFNAME": "lo",
    }


def group_of(member: MemberId, shard: int, model: int) -> dict[str, str]:
    """The same of a rank that holds a shard of the model. Those of its group come and go with it;
    `pl.group()` joins them, and knows the port (D20)."""
    return {
        "RANK": str(shard),
        "WORLD_SIZE": str(model),
        "LOCAL_RANK": str(member.local * model + shard),
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def shim_argv() -> Sequence[str]:
    # Isolated and without site-packages: it starts in 15 ms and nothing of the user's shadows it.
    return (sys.executable, "-I", "-S", str(Path(shim.__file__).resolve()))


def _launcher(mpiexec: str) -> Sequence[str]:
    if not mpiexec:
        return ()
    # The address spares hydra the look-up of the host's name, which containers may not resolve;
    # `fork` keeps it from asking a batch system of the host for help.
    return (mpiexec, "-launcher", "fork", "-localhost", "127.0.0.1", "-n", "1")


def expand(text: str, known: Mapping[str, str]) -> str:
    """$(NAME) as Kubernetes does it: unknown names stay as they are, $$ is a dollar sign."""

    def replace(match: re.Match[str]) -> str:
        name = match.group(1)
        return "$" if name is None else known.get(name, match.group(0))

    return _REFERENCE.sub(replace, text)
