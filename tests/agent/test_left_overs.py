"""Agents remove what a killed rank, launcher or agent leaves behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline.scratch import PREFIX

from testing.agent_harness import dead, gone, lives, pod, started, until
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

LEAVES = """
import os, pathlib, socket, sys, tempfile, time
folder = pathlib.Path(os.environ["PACELINE_SCRATCH"])
pathlib.Path(tempfile.gettempdir(), "user").write_text("x")
socket.socket(socket.AF_UNIX).bind(str(folder / "r.f"))
name = f"mpich_shm_{os.getpid():x}_0"
(folder / "shared-memory").write_text(name)
pathlib.Path("/dev/shm", name).write_text("x")
print("left", tempfile.gettempdir(), name, flush=True)
time.sleep(60)
"""
LEAVES_NAMES_OF_TORCH = """
import os, pathlib, time

def leave_and_wait():
    pathlib.Path("/dev/shm", f"torch_{os.getpid()}_1_0").touch()
    os.write(1, f"left {os.getpid()}\\n".encode())  # at once: two processes write to one pipe
    time.sleep(60)

if os.fork() == 0:
    os.setsid()  # a worker of a loader that outlives the rank's process group
    leave_and_wait()
leave_and_wait()
"""
USES_MULTIPROCESSING = """
import multiprocessing, os, time
from multiprocessing.shared_memory import SharedMemory

def work(turn):
    if {detached}:
        os.setsid()
    with turn:
        time.sleep(60)

turn = multiprocessing.get_context("spawn").Lock()  # as a loader with this context has many
memory = SharedMemory(create=True, size=4096)
multiprocessing.get_context("fork").Process(target=work, args=(turn,)).start()
print("left", turn._semlock.name.replace("/", "sem."), memory.name, flush=True)
time.sleep(60)
"""
SHARES_FILES_OF_TORCH = """
import os, time
import torch
import torch.multiprocessing

torch.multiprocessing.set_sharing_strategy("file_system")
shared = torch.ones(1000).share_memory_()
names = [name for name in os.listdir("/dev/shm") if name.startswith(f"torch_{os.getpid()}_")]
print("left", *names, "", flush=True)
time.sleep(60)
"""
LEAVES_A_CLEANER_THAT_STAYS = """
import subprocess, sys, time
command = "from multiprocessing.resource_tracker import main;main(0)"  # reads from stdin
stays = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE)
holder = subprocess.Popen(
    [sys.executable, "-c", "import time; time.sleep(600)"],
    pass_fds=[stays.stdin.fileno()], start_new_session=True,
)
print("left", stays.pid, holder.pid, "", flush=True)
time.sleep(60)
"""
ASKS_HYDRA = """
import os, time

def ask(question):
    os.write(int(os.environ["PMI_FD"]), question.encode())
    return os.read(int(os.environ["PMI_FD"]), 4096).decode()

world = ask("cmd=get_my_kvsname\\n").partition("kvsname=")[2].split()[0]
print("hydra:", ask(f"cmd=get kvsname={world} key=PMI_hwloc_xmlfile\\n"), flush=True)
time.sleep(60)
"""
KNOWS_ITS_MEMORY = """
import os, time
from paceline.transport.mpi.process_manager import shared_memory_name
name = shared_memory_name(os.environ)
import mpi4py
mpi4py.rc.initialize = mpi4py.rc.finalize = False
from mpi4py import MPI
os.environ |= {"MPIR_CVAR_CH4_NETMOD": "ofi", "FI_PROVIDER": "tcp", "FI_TCP_IFACE": "lo"}
MPI.Init_thread(MPI.THREAD_MULTIPLE)
mapped = {line.split()[-1] for line in open("/proc/self/maps") if "/dev/shm/" in line}
for path in mapped:
    os.unlink(path)
print("memory:", [f"/dev/shm/{name}"] == sorted(mapped), name, mapped, flush=True)
os._exit(0)
"""


@pytest.fixture
def tmpdir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set a TMPDIR with a short path for the agents."""
    with tempfile.TemporaryDirectory(prefix="t-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def exists(path: Path) -> bool:
    return path.exists()


def owned(folder: Path) -> list[Path]:
    return list(folder.glob(f"{PREFIX}*"))


def below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.name != "owner"]


@pytest.mark.parametrize("backend", ["gloo", "mpi"])
def test_an_agent_removes_what_a_killed_rank_leaves(
    tmp_path: Path, tmpdir: Path, backend: str
) -> None:
    async def scenario() -> None:
        async with pod(tmp_path, LEAVES, backend=backend) as (agent, coordinator):
            rank = await started(coordinator)
            await agent.printed("left ")
            match = re.search(rb"left (\S+) (\S+)", agent.out)
            assert match is not None
            temporary, memory = Path(match[1].decode()), Path("/dev/shm", match[2].decode())
            assert temporary.is_relative_to(tmpdir)
            assert exists(temporary / "user")
            os.kill(rank.pid, signal.SIGKILL)
            await dead(coordinator)
            await until(lambda: not temporary.parent.exists(), "the end of the rank's folder")
            assert not exists(memory)
            agent.signal(signal.SIGTERM)
            await agent.ended()
        assert below(tmpdir) == []

    asyncio.run(scenario())


def test_shared_memory_files_of_torch_are_removed_with_the_rank_and_its_workers(
    tmp_path: Path, tmpdir: Path
) -> None:
    async def scenario() -> None:
        async with pod(tmp_path, LEAVES_NAMES_OF_TORCH) as (agent, coordinator):
            rank = await started(coordinator)
            await until(lambda: agent.out.count(b"left ") == 2, "both processes")
            pids = [int(pid) for pid in re.findall(rb"left (\d+)", agent.out)]
            left = [Path("/dev/shm", f"torch_{pid}_1_0") for pid in pids]
            assert all(map(exists, left))
            os.kill(rank.pid, signal.SIGKILL)
            await dead(coordinator)
            assert not exists(Path("/dev/shm", f"torch_{rank.pid}_1_0"))
            agent.signal(signal.SIGTERM)
            await agent.ended()
        for pid in pids:
            await gone(pid)
        assert not any(map(exists, left))

    asyncio.run(scenario())


def shown(out: bytes) -> list[str]:
    """Return the words that the script printed after "left"."""
    match = re.search(rb"left ([^\n]*)\n", out)
    assert match is not None, out
    return match[1].decode().split()


@pytest.mark.parametrize("backend", exhaustive_except(["mpi"], ["gloo", "mpi"]))
@pytest.mark.parametrize("detached", [False, True])
def test_shared_memory_of_multiprocessing_is_removed_after_a_rank_is_killed(
    tmp_path: Path, tmpdir: Path, backend: str, *, detached: bool
) -> None:
    """Check that the memory is removed after the rank, or after its agent at the latest.

    The latter is the case of a worker that uses the memory and has left the rank's process group.
    """
    script = USES_MULTIPROCESSING.replace("{detached}", str(detached))

    async def scenario() -> None:
        async with pod(tmp_path, script, backend=backend) as (agent, coordinator):
            rank = await started(coordinator)
            await agent.printed("left ")
            await until(lambda: b"\n" in agent.out.partition(b"left ")[2], "a whole line")
            left = [Path("/dev/shm", name) for name in shown(agent.out)]
            assert len(left) == 2
            assert all(map(exists, left))
            os.kill(rank.pid, signal.SIGKILL)
            await dead(coordinator)
            if not detached:
                await until(lambda: not any(map(exists, left)), "the end of its memory")
            agent.signal(signal.SIGTERM)
            await agent.ended()
            assert not any(map(exists, left))

    asyncio.run(scenario())


@pytest.mark.exhaustive
def test_files_of_torchs_file_system_sharing_are_removed_after_a_rank_is_killed(
    tmp_path: Path, tmpdir: Path
) -> None:
    async def scenario() -> None:
        async with pod(tmp_path, SHARES_FILES_OF_TORCH) as (agent, coordinator):
            rank = await started(coordinator)
            await agent.printed("left ")
            await until(lambda: b"\n" in agent.out.partition(b"left ")[2], "a whole line")
            left = [Path("/dev/shm", name) for name in shown(agent.out)]
            assert left
            assert all(map(exists, left))
            os.kill(rank.pid, signal.SIGKILL)
            await dead(coordinator)
            agent.signal(signal.SIGTERM)
            await agent.ended()
            assert not any(map(exists, left))

    asyncio.run(scenario())


def test_a_rank_is_reported_dead_while_its_memory_is_still_being_removed(
    tmp_path: Path, tmpdir: Path
) -> None:
    """Keep the process that removes the memory waiting: it ends with the agent at the latest."""

    async def scenario() -> None:
        async with pod(tmp_path, LEAVES_A_CLEANER_THAT_STAYS) as (agent, coordinator):
            rank = await started(coordinator)
            await agent.printed("left ")
            await until(lambda: b"\n" in agent.out.partition(b"left ")[2], "a whole line")
            stays, holder = map(int, shown(agent.out))
            os.kill(rank.pid, signal.SIGKILL)
            await dead(coordinator)
            assert lives(stays)
            assert lives(holder)
            agent.signal(signal.SIGTERM)
            await agent.ended()
            await gone(stays, holder)

    asyncio.run(scenario())


def test_the_next_agent_removes_what_a_killed_one_leaves(tmp_path: Path, tmpdir: Path) -> None:
    """Start a second agent, as in a pod whose container is restarted."""

    async def scenario() -> None:
        async with pod(tmp_path, LEAVES) as (agent, coordinator):
            rank = await started(coordinator)
            await agent.printed("left ")
            agent.signal(signal.SIGKILL)
            await agent.ended()
            await gone(rank.pid)
        assert below(tmpdir)
        [memory] = re.findall(rb"left \S+ (\S+)", agent.out)
        async with pod(tmp_path, ["sleep", "60"]) as (agent, coordinator):
            await started(coordinator)
            assert len(owned(tmpdir)) == 1
            assert not exists(Path("/dev/shm", memory.decode()))
            agent.signal(signal.SIGTERM)
            await agent.ended()
        assert below(tmpdir) == []

    asyncio.run(scenario())


def test_a_job_can_have_its_own_tmpdir(tmp_path: Path, tmpdir: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()

    async def scenario() -> None:
        env = (("TMPDIR", str(own)),)
        async with pod(tmp_path, LEAVES, env=env) as (agent, coordinator):
            rank = await started(coordinator)
            await agent.printed(f"left {own} ")
            os.kill(rank.pid, signal.SIGKILL)
            await dead(coordinator)
            agent.signal(signal.SIGTERM)
            await agent.ended()
        assert [path.name for path in own.iterdir()] == ["user"], "it is the user's"
        assert below(tmpdir) == []

    asyncio.run(scenario())


def test_hydra_writes_nothing_outside_the_ranks_folder(tmp_path: Path, tmpdir: Path) -> None:
    """Check the path of hydra's topology file.

    By default hydra creates /tmp/hydra_hwloc_xmlfile_... when MPI starts, and leaves it there if it
    is killed.
    """

    async def scenario() -> None:
        async with pod(tmp_path, ASKS_HYDRA, backend="mpi") as (agent, _):
            await agent.printed("hydra:")
            await until(lambda: agent.out.count(b"\n") >= 2, "a whole line")
            answer = agent.out.decode()
            files = re.findall(r"/\S*xml\S*", answer)
            assert all(Path(path).is_relative_to(tmpdir) for path in files), answer
            assert "cmd=get_result" in answer

    asyncio.run(scenario())


def test_the_name_of_mpis_shared_memory_is_known_before_mpi_starts(
    tmp_path: Path, tmpdir: Path
) -> None:
    assert tmpdir.exists()

    async def scenario() -> None:
        async with pod(tmp_path, KNOWS_ITS_MEMORY, backend="mpi") as (agent, _):
            await agent.printed("memory:")
            await until(lambda: b"}" in agent.out, "a whole line")
            assert b"memory: True" in agent.out, agent.out

    asyncio.run(scenario())
