"""Process of one job's coordinator, started as `python -m paceline.coordinator`.

Exit codes:

    0   the job has ended, and its outcome was acknowledged or the linger time is over; or this
        process was ordered to end
    2   the environment is wrong
    3   retired, since a newer coordinator exists
    4   the address is in use
    70  an event could not be handled; start a new coordinator
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import sys
from typing import Final

from paceline_api.errors import PacelineError
from paceline_api.jobfile import read_resolved_job
from paceline_api.names import ENV_TLS_CALLERS
from paceline_api.settings import ResolvedJob

from paceline.clock import now_ns, wall_s
from paceline.control.front import Front
from paceline.control.tls import CONNECTION_BYTES, spare_buffers
from paceline.control.tokens import Tokens
from paceline.coordinator.config import config_of
from paceline.coordinator.server import BrokenError, CoordinatorServer
from paceline.core.admission import Bounds
from paceline.core.coordinator.machine import Coordinator
from paceline.core.demand import coordinator_files
from paceline.environment import (
    ENV_LISTEN,
    ENV_TLS_CERT,
    ENV_TLS_KEY,
    CoordinatorSettings,
    SettingsError,
)
from paceline.limits import LISTEN_BACKLOG, ensure_callers, ensure_files, ensure_memory
from paceline.logs import log_to_stderr
from paceline.refusals import PROCESS, Entry
from paceline.signals import on_request_to_end

EXIT_RETIRED: Final = 3
"""Exit code after a newer coordinator was detected."""
EXIT_ADDRESS: Final = 4
"""Exit code if the address cannot be used."""
EXIT_BROKEN: Final = 70
"""Exit code after an event that could not be handled."""
OTHER_CONNECTIONS: Final = 64
"""Number of connections that are accepted beside those of the agents: operator or runner, probes, a
user with curl, and strangers."""

log = logging.getLogger("paceline.coordinator")


def main() -> int:
    """Run the coordinator that the environment describes, and return its exit code."""
    log_to_stderr()
    try:
        settings = CoordinatorSettings.from_environment(os.environ)
        job = read_resolved_job(settings.spec_path)
        _make_room(job, encrypted=settings.tls is not None)
        config = config_of(job)
        coordinator = Coordinator(config, uid=settings.uid, now_ns=now_ns(), wall_s=wall_s())
        return asyncio.run(_serve(settings, coordinator, _most_replicas(job)))
    except PacelineError as error:
        sys.stderr.write(f"{error.render()}\n")
        return error.exit_code


def _make_room(job: ResolvedJob, *, encrypted: bool) -> None:
    """Raise the limit on files, and check all limits, for the largest size that the job may have.

    A limit that is too low raises LimitError.

    Args:
        job: The job.
        encrypted: True if the connections use TLS, which takes memory.
    """
    replicas = _most_replicas(job)
    connections = coordinator_files(replicas)
    ensure_files("the coordinator", connections, all_that_is_allowed=True)
    ensure_callers("the coordinator", replicas)
    if encrypted:
        ensure_memory(
            f"the coordinator of {replicas} x {job.procs_per_replica} ranks",
            connections * CONNECTION_BYTES,
            hint="raise limits.memory in spec.coordinator.resources, or run fewer ranks",
        )


def _bounds(replicas: int) -> Bounds:
    """Return the maximum numbers of connections for the coordinator of a job of this size.

    Agents may share an address: those of a laptop all do, and those with hostNetwork do by node.

    Args:
        replicas: The largest size that the job may have now.

    Returns:
        The bounds.
    """
    connections = coordinator_files(replicas) + OTHER_CONNECTIONS
    return Bounds(connections, of_one_address=connections // 2)


def _most_replicas(job: ResolvedJob) -> int:
    return max(job.replicas, job.max_replicas or 0)


async def _serve(settings: CoordinatorSettings, coordinator: Coordinator, replicas: int) -> int:
    server = CoordinatorServer(
        coordinator,
        tokens=Tokens(settings.token, settings.tokens_file),
        operator_token=settings.operator_token,
        linger_s=settings.linger_s,
        refusals=PROCESS,
        certificates=settings.tls_callers is not None,
    )
    on_request_to_end(asyncio.get_running_loop(), lambda _: server.leave())
    # A job without maxReplicas may be scaled beyond the size that it has started with.
    front = Front(
        server.app(),
        Entry.COORDINATOR,
        lambda: _bounds(max(replicas, coordinator.state.replicas)),
        PROCESS,
    )
    try:
        await front.start(_listen(settings), _tls(settings))
        log.info("coordinator %s of job %s listens", settings.uid, settings.job)
        return EXIT_RETIRED if await server.wait() else 0
    except BrokenError:
        return EXIT_BROKEN
    finally:
        await front.stop()


def _listen(settings: CoordinatorSettings) -> socket.socket:
    if settings.listen_fd is not None:
        return socket.socket(fileno=settings.listen_fd)
    family = socket.AF_INET6 if ":" in settings.listen[0] else socket.AF_INET
    try:
        return socket.create_server(settings.listen, family=family, backlog=LISTEN_BACKLOG)
    except OSError as error:
        host, port = settings.listen
        reason = (error.strerror or str(error)).lower()
        raise PacelineError(
            f"{ENV_LISTEN}: cannot listen on {host}:{port}: {reason}",
            hint="another coordinator may still be running; name another port",
            exit_code=EXIT_ADDRESS,
        ) from None


def _tls(settings: CoordinatorSettings) -> ssl.SSLContext | None:
    if settings.tls is None:
        return None
    spare_buffers()
    cert, key = settings.tls
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert, key)
    except OSError as error:  # ssl.SSLError is one too
        raise SettingsError(
            ENV_TLS_CERT, f"and {ENV_TLS_KEY} name no usable pair: {error}"
        ) from None
    if settings.tls_callers is not None:
        context.verify_mode = (
            ssl.CERT_OPTIONAL
        )  # `CoordinatorServer` demands one for all but health checks
        try:
            context.load_verify_locations(settings.tls_callers)
        except OSError as error:
            raise SettingsError(ENV_TLS_CALLERS, f"names no certificate: {error}") from None
    return context


if __name__ == "__main__":
    sys.exit(main())
