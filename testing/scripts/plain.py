"""Run a training script on several ranks as torchrun runs it, without executing torchrun.

torchrun executes one Python per rank, and each imports torch: five seconds of CPU time. Here the
ranks are forked by the fork server, with the environment, the store and the end that torchrun gives
them. `tests/scripts/test_plain.py` compares both.
"""

from __future__ import annotations

import os
import signal
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Final

from torch._C._distributed_c10d import TCPStore

from testing.processes.forked_call import ForkedCall
from testing.scripts.imports import prepare_for

LIMIT_S: Final = 120.0
POLL_S: Final = 0.01
STORE_S: Final = 30.0
ENDS_S: Final = 5.0
"""Time that the other ranks have to end after SIGTERM, before they are killed."""
HOST: Final = "localhost"
"""Address of the store, as `torchrun --standalone` gives it."""
ENVIRONMENT: Final = (
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
    *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    *("TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_SIGNALS_TO_HANDLE"),
    *("TORCHELASTIC_ERROR_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING"),
)
"""Environment variables that torchrun sets for its ranks."""


@dataclass(frozen=True)
class Rank:
    """Result of one rank: its exit code, negative for a signal, and what it printed."""

    code: int
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Result:
    """Result of one run of a script."""

    ranks: tuple[Rank, ...]
    """Results by rank."""
    out: Path
    """Folder into which the script wrote its files."""

    @property
    def codes(self) -> tuple[int, ...]:
        """Exit codes by rank."""
        return tuple(rank.code for rank in self.ranks)

    @property
    def story(self) -> str:
        """Everything that the ranks printed, for the message of a failed test."""
        return "\n".join(
            f"--- rank {number}: exit code {rank.code}\n{rank.stdout}{rank.stderr}"
            for number, rank in enumerate(self.ranks)
        )


class NotOverError(AssertionError):
    """Raised when a run has not ended in time; it names the ranks that still ran."""


def environment(rank: int, ranks: int, port: int, run_id: str, errors: Path) -> dict[str, str]:
    """Return the environment variables that torchrun sets for one rank of one machine."""
    size = str(ranks)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "ROLE_NAME": "default",
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": size,
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": size,
        "MASTER_ADDR": HOST,
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
        "TORCHELASTIC_ERROR_FILE": str(errors / str(rank) / "error.json"),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }


def run_plain(
    script: Path,
    ranks: int,
    args: Sequence[str],
    out: Path,
    *,
    env: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> Result:
    """Run `script ARGS --out OUT` on `ranks` ranks as torchrun does, and return the result.

    When a rank fails, the others get SIGTERM and then SIGKILL. No process of the run is left when
    this returns or raises.

    Args:
        script: path of the script.
        ranks: number of processes.
        args: arguments of the script.
        out: folder for the files of the script; a second run may continue from those of the first.
        env: environment of the ranks without the variables of torchrun; by default, this process's.
        limit_s: deadline of the whole run in seconds.

    Returns:
        The result of each rank, and the folder.

    Raises:
        NotOverError: the run was not over at the deadline.
    """
    prepare_for(script)
    out.mkdir(parents=True, exist_ok=True)
    logs = out.with_name(f"{out.name}.logs")
    logs.mkdir(exist_ok=True)
    inherited = os.environ if env is None else env
    inherited = {name: value for name, value in inherited.items() if name not in ENVIRONMENT}
    run_id, words = uuid.uuid4().hex, [str(script), *args, "--out", str(out)]
    # torchrun's agent serves the store, so no rank waits for the server of rank 0.
    store = TCPStore(
        HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=STORE_S)
    )
    with ExitStack() as stack:
        calls = []
        for rank in range(ranks):
            own = environment(rank, ranks, store.port, run_id, logs)
            with (
                (logs / f"{rank}.stdout").open("wb") as stdout,
                (logs / f"{rank}.stderr").open("wb") as stderr,
            ):
                calls.append(
                    ForkedCall(
                        words,
                        Path.cwd(),
                        {**inherited, **own},
                        "python",
                        (stdout.fileno(), stderr.fileno()),
                    )
                )
            stack.callback(calls[-1].close)
        over = _wait(calls, limit_s)
        for call in calls:
            call.kill()
        codes = [call.wait(ENDS_S) for call in calls]
    result = Result(
        tuple(
            Rank(code, *((logs / f"{rank}.{name}").read_text() for name in ("stdout", "stderr")))
            for rank, code in enumerate(codes)
        ),
        out,
    )
    if not over:
        raise NotOverError(f"{script.name}: not over after {limit_s:g} s\n{result.story}")
    return result


def _wait(calls: Sequence[ForkedCall], limit_s: float) -> bool:
    """Wait until all calls have ended or one has failed; return False at the deadline."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        codes = [call.poll() for call in calls]
        if any(codes):  # a code other than 0 and None
            _terminate(calls)
            return True
        if None not in codes:
            return True
        time.sleep(POLL_S)
    return False


def _terminate(calls: Sequence[ForkedCall]) -> None:
    """Send SIGTERM to the calls that run, and wait a little for their ends."""
    for call in calls:
        call.send_signal(signal.SIGTERM)
    until = time.monotonic() + ENDS_S
    while time.monotonic() < until and any(call.poll() is None for call in calls):
        time.sleep(POLL_S)
