"""Environment variables of Paceline's processes, read once, at the edge, into frozen dataclasses.

No other module reads `PACELINE_*`, with two exceptions: the shim (`agent.shim`), which imports the
standard library only, and `train.context`, which reads two variables by the names below. The
operator, or the runner on a laptop, sets the variables of `AgentSettings`. The agent sets those of
`RankSettings` for the ranks. Names that the operator shares with the runtime are in
`paceline_api.names`.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.ids import MemberId, parse_member
from paceline_api.names import (
    COORDINATOR_PORT,
    ENV_ATTEMPT,
    ENV_COORDINATOR,
    ENV_JOB,
    ENV_LOCAL,
    ENV_OPERATOR_TOKEN,
    ENV_RUN_DIR,
    ENV_SLOT,
    ENV_TLS_CALLERS,
    ENV_TLS_OWN_CERT,
    ENV_TLS_OWN_KEY,
    ENV_TOKEN,
    ENV_TOKENS_FILE,
)

ENV_PROCS: Final = "PACELINE_PROCS"
ENV_SPEC: Final = "PACELINE_SPEC"
ENV_FAULTS: Final = "PACELINE_FAULTS"
ENV_REPLAY: Final = "PACELINE_REPLAY"
"""Variable with a run folder. `paceline replay` sets it for the script."""
ENV_DRAIN_GRACE: Final = "PACELINE_DRAIN_GRACE_SECONDS"
ENV_DRAINED_EXIT: Final = "PACELINE_DRAINED_EXIT_CODE"
ENV_HOST: Final = "PACELINE_HOST"
ENV_METRICS_PORT: Final = "PACELINE_METRICS_PORT"
ENV_MEMBER: Final = "PACELINE_MEMBER"
ENV_AGENT_FD: Final = "PACELINE_AGENT_FD"
ENV_RECORD_FD: Final = "PACELINE_RECORD_FD"
ENV_LINE_FD: Final = "PACELINE_LINE_FD"
ENV_SCRATCH: Final = "PACELINE_SCRATCH"
ENV_SHARD: Final = "PACELINE_SHARD"
ENV_GROUP_FDS: Final = "PACELINE_GROUP_FDS"
ENV_LISTEN: Final = "PACELINE_LISTEN"
ENV_LISTEN_FD: Final = "PACELINE_LISTEN_FD"
ENV_UID: Final = "PACELINE_UID"
ENV_TLS_CERT: Final = "PACELINE_TLS_CERT"
ENV_TLS_KEY: Final = "PACELINE_TLS_KEY"
ENV_LINGER: Final = "PACELINE_LINGER_SECONDS"
ENV_UMASK: Final = "PACELINE_UMASK"

PREFIX: Final = "PACELINE_"
METRICS_PORT: Final = 9464
DRAIN_GRACE_S: Final = 30.0
LINGER_S: Final = 24 * 3600.0
LISTEN: Final = f"0.0.0.0:{COORDINATOR_PORT}"

T = TypeVar("T")
U = TypeVar("U")


class SettingsError(PacelineError):
    """Raised for a variable that is missing or wrong, set by hand or by another version."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"environment variable {name} {problem}",
            hint="start jobs with `paceline run job.yaml`, which sets it",
            exit_code=EXIT_BAD_INPUT,
        )


@dataclass(frozen=True, slots=True)
class AgentSettings:
    """Settings of the agent of one pod."""

    job: str
    slot: int
    attempt: int
    """Number of the pod in its slot, from 0."""
    procs: int
    """Number of members of the pod: ranks, or groups of ranks."""
    coordinators: tuple[str, ...]
    """Base URLs of the coordinator, tried in turn."""
    token: str
    """Shared secret of the job's ranks and agents."""
    run_dir: Path
    """Run folder. Logs of the ranks are kept in `logs` below it."""
    spec_path: Path
    local: bool
    """True on a laptop: listen on loopback only."""
    faults: str
    """Faults to inject, passed to the ranks unchanged."""
    drain_grace_s: float
    """Seconds from a drain request to SIGKILL."""
    host: str
    """Address under which others reach this pod."""
    metrics_port: int
    """Port for metrics. 0: any free one. On a laptop the next free port is taken."""
    tls_cert: Path | None = None
    """Certificate of the coordinator. None: plain HTTP."""
    tls_own: tuple[Path, Path] | None = None
    """Certificate and key of this agent, which the coordinator requires. None: it requires none."""
    tokens_file: Path | None = None
    """File whose token replaces `token` towards the coordinator while the file exists."""
    drained_exit_code: int = 0
    """Exit code of an agent that left in order because of a signal. With 0, a queue may count the
    pod as completed and admit none in its place."""
    umask: int | None = None
    """Umask of the ranks, whose files are the user's. None: that of this process."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> AgentSettings:
        """Read the settings. Raise SettingsError if a variable is missing or wrong."""
        local = env.get(ENV_LOCAL, "") == "1"
        return cls(
            job=_need(env, ENV_JOB, str),
            slot=_need(env, ENV_SLOT, _count),
            attempt=_need(env, ENV_ATTEMPT, _count),
            procs=_need(env, ENV_PROCS, _positive),
            coordinators=_need(env, ENV_COORDINATOR, _urls),
            token=_need(env, ENV_TOKEN, str),
            run_dir=_need(env, ENV_RUN_DIR, Path),
            spec_path=_need(env, ENV_SPEC, Path),
            local=local,
            faults=env.get(ENV_FAULTS, ""),
            drain_grace_s=_take(env, ENV_DRAIN_GRACE, _seconds, DRAIN_GRACE_S),
            host=env.get(ENV_HOST) or ("127.0.0.1" if local else socket.gethostname()),
            metrics_port=_take(env, ENV_METRICS_PORT, _count, METRICS_PORT),
            tls_cert=_take(env, ENV_TLS_CERT, Path, None),
            tls_own=_tls_pair(env, ENV_TLS_OWN_CERT, ENV_TLS_OWN_KEY),
            tokens_file=_take(env, ENV_TOKENS_FILE, Path, None),
            drained_exit_code=_take(env, ENV_DRAINED_EXIT, _count, 0),
            umask=_take(env, ENV_UMASK, _mask, None),
        )


@dataclass(frozen=True, slots=True)
class RankSettings:
    """Settings of one rank."""

    job: str
    member: MemberId
    token: str
    """Token of the ranks' sockets to each other. They have no socket to the coordinator (R43)."""
    run_dir: Path
    spec_path: Path
    local: bool
    faults: str
    host: str
    agent_fd: int
    """Socket to the agent, for `worker.agent_pipe.AgentPipe`."""
    record_fd: int
    """Memory of the rank's metrics, for `telemetry.records.RankRecord.open`."""
    line_fd: int
    """Line to the coordinator, for `worker.coordinator_line.CoordinatorLine`."""
    scratch: Path
    """Folder for sockets and for `scratch.note_shared_memory`. The agent removes it."""
    shard: int = 0
    """Index of the model's shard that this rank holds, which is its index in its group (R50)."""
    group_fds: tuple[int, ...] = ()
    """Sockets within the group. The lead, shard 0, has one to each other rank, in their order. The
    others have one to the lead. Empty if each rank holds the whole model."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> RankSettings | None:
        """Read the settings of a rank.

        It raises SettingsError if a variable is missing or wrong.

        Args:
            env: Environment of the process.

        Returns:
            The settings, or None outside of a job, where the script works alone.
        """
        if ENV_MEMBER not in env:
            return None
        return cls(
            job=_need(env, ENV_JOB, str),
            member=_need(env, ENV_MEMBER, parse_member),
            token=_need(env, ENV_TOKEN, str),
            run_dir=_need(env, ENV_RUN_DIR, Path),
            spec_path=_need(env, ENV_SPEC, Path),
            local=env.get(ENV_LOCAL, "") == "1",
            faults=env.get(ENV_FAULTS, ""),
            host=_need(env, ENV_HOST, str),
            agent_fd=_need(env, ENV_AGENT_FD, _count),
            record_fd=_need(env, ENV_RECORD_FD, _count),
            line_fd=_need(env, ENV_LINE_FD, _count),
            scratch=_need(env, ENV_SCRATCH, Path),
            shard=_take(env, ENV_SHARD, _count, 0),
            group_fds=_take(env, ENV_GROUP_FDS, _counts, ()),
        )


def rank_environment(
    settings: AgentSettings, member: MemberId, shard: int = 0, *, scratch: Path
) -> dict[str, str]:
    """Return the variables that `RankSettings` reads. The shim adds those of the descriptors.

    Args:
        settings: Settings of the agent.
        member: Member id of the rank.
        shard: Shard of the model that it holds.
        scratch: The rank's own folder.

    Returns:
        Environment variables.
    """
    return {
        ENV_SCRATCH: str(scratch),
        ENV_JOB: settings.job,
        ENV_MEMBER: str(member),
        ENV_TOKEN: settings.token,
        ENV_RUN_DIR: str(settings.run_dir),
        ENV_SPEC: str(settings.spec_path),
        ENV_LOCAL: "1" if settings.local else "0",
        ENV_FAULTS: settings.faults,
        ENV_HOST: settings.host,
        ENV_SHARD: str(shard),
    }


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """Settings of the coordinator of one job."""

    job: str
    token: str
    """Token of ranks and agents."""
    tokens_file: Path | None
    """File whose tokens replace `token` while the file exists."""
    operator_token: str
    """Token of the operator, or of the runner on a laptop."""
    spec_path: Path
    uid: str
    """Id that differs between two coordinators of one job (R1): that of the pod, or a random one.
    """
    listen: tuple[str, int]
    listen_fd: int | None
    """A listening socket that was handed down. It has precedence over `listen`."""
    tls: tuple[Path, Path] | None
    """Certificate and key. None: plain HTTP."""
    tls_callers: Path | None
    """Certificate authority of the callers. None: callers need a token only."""
    linger_s: float
    """How long to wait, in seconds, for an acknowledgment that the job has ended (C1)."""

    @classmethod
    def from_environment(cls, env: Mapping[str, str]) -> CoordinatorSettings:
        """Read the settings of a coordinator.

        Args:
            env: Environment of the process.

        Returns:
            The settings.

        Raises:
            SettingsError: A variable is missing or wrong.
        """
        tls = _tls_pair(env, ENV_TLS_CERT, ENV_TLS_KEY)
        tls_callers = _take(env, ENV_TLS_CALLERS, Path, None)
        if tls_callers is not None and tls is None:
            raise SettingsError(ENV_TLS_CERT, f"is not set, and {ENV_TLS_CALLERS} needs it")
        return cls(
            job=_need(env, ENV_JOB, str),
            token=_need(env, ENV_TOKEN, str),
            tokens_file=_take(env, ENV_TOKENS_FILE, Path, None),
            operator_token=_need(env, ENV_OPERATOR_TOKEN, str),
            spec_path=_need(env, ENV_SPEC, Path),
            uid=env.get(ENV_UID) or secrets.token_hex(8),
            listen=_take(env, ENV_LISTEN, _address, _address(LISTEN)),
            listen_fd=_count(env[ENV_LISTEN_FD]) if env.get(ENV_LISTEN_FD) else None,
            tls=tls,
            tls_callers=tls_callers,
            linger_s=_take(env, ENV_LINGER, _seconds, LINGER_S),
        )


def _need(env: Mapping[str, str], name: str, read: Callable[[str], T]) -> T:
    text = env.get(name, "")
    if not text:
        raise SettingsError(name, "is not set")
    return _read(name, text, read)


def _take(env: Mapping[str, str], name: str, read: Callable[[str], T], default: U) -> T | U:
    text = env.get(name, "")
    return _read(name, text, read) if text else default


def _tls_pair(env: Mapping[str, str], cert: str, key: str) -> tuple[Path, Path] | None:
    certificate, own = env.get(cert, ""), env.get(key, "")
    if bool(certificate) is not bool(own):
        raise SettingsError(key if certificate else cert, "is not set")
    return (Path(certificate), Path(own)) if certificate else None


def _read(name: str, text: str, read: Callable[[str], T]) -> T:
    try:
        return read(text)
    except ValueError as error:
        raise SettingsError(name, f'is "{text}": {error}') from None


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise ValueError("must not be negative")
    return number


def _mask(text: str) -> int:
    mask = int(text, 8)
    if not 0 <= mask <= 0o777:
        raise ValueError("must be 000 to 777")
    return mask


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part) for part in text.split(","))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("must be 1 or more")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds < float("inf"):
        raise ValueError("must be a number of seconds")
    return seconds


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdecimal() or int(port) > 65_535:
        raise ValueError("must be HOST:PORT")
    return host.strip("[]"), int(port)


def _urls(text: str) -> tuple[str, ...]:
    urls = tuple(part.strip().rstrip("/") for part in text.split(",") if part.strip())
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError("each address must begin with http:// or https://")
    if not urls:
        raise ValueError("holds no address")
    return urls
