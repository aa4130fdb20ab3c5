"""The operator's command line. Every option has its key in the chart's values."""

from __future__ import annotations

import argparse
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from paceline_api.names import DEFAULT_MANAGER, ENV_OPERATOR_IDENTITY, ENV_OPERATOR_NAMESPACE

from paceline_operator.core.shares import Rate


@dataclass(frozen=True, slots=True)
class Options:
    """Options of one operator process."""

    kubeconfig: str
    scope: str
    """Namespace of the jobs; empty for all."""
    own_namespace: str
    """Namespace of the Lease and the operator's key; empty: that of the pod."""
    identity: str
    manager: str
    watch_nodes: bool
    lease: bool
    lease_duration_s: float
    host: str
    port: int
    metrics_at: tuple[str, int] | None
    """Host and port of /metrics by TLS and token; None: plain HTTP, at `port`."""
    metrics_certificate: Path | None
    """Folder with tls.crt and tls.key for `metrics_at`; None: a certificate made at the start."""
    api_rate: Rate | None
    """Limit of the requests to the API server; None: no limit."""
    log_format: str
    log_level: str


def parse(arguments: list[str] | None = None) -> Options:
    """Parse the command line; wrong options end the process with exit code 2.

    Args:
        arguments: The arguments; None for those of the process.

    Returns:
        The options.
    """
    parser = argparse.ArgumentParser(
        prog="python -m paceline_operator", description="The operator of Paceline's TrainingJobs."
    )
    add = parser.add_argument
    add(
        "--kubeconfig",
        default="",
        help="default: $KUBECONFIG, ~/.kube/config, or the pod's service account",
    )
    add("--namespace", default="", help="look after the jobs of this namespace only")
    add(
        "--own-namespace",
        default=os.environ.get(ENV_OPERATOR_NAMESPACE, ""),
        help="where the Lease and the operator's key are; default: that of the pod",
    )
    add(
        "--identity",
        default=os.environ.get(ENV_OPERATOR_IDENTITY) or socket.gethostname(),
        help="name in the Lease, the same after a restart in place",
    )
    add("--manager", default=DEFAULT_MANAGER, help="only jobs with this spec.managedBy")
    add(
        "--no-nodes",
        action="store_true",
        help="do not watch nodes: lost ones are noticed only when their pods are deleted",
    )
    add("--no-lease", action="store_true", help="act without a Lease, for tests by hand")
    add("--lease-duration", type=float, default=10.0, metavar="SECONDS")
    add("--listen", default="0.0.0.0:8080", metavar="HOST:PORT", help="/metrics and /healthz")
    add(
        "--secure-metrics",
        metavar="HOST:PORT",
        help="/metrics here instead, by TLS, for those whom the API server lets get /metrics",
    )
    add(
        "--metrics-certificate",
        type=Path,
        metavar="FOLDER",
        help="its tls.crt and tls.key are for --secure-metrics; read again when they change",
    )
    add(
        "--api-qps",
        type=float,
        default=0.0,
        metavar="N",
        help="requests per second to the API server, without watches and the Lease; 0: no limit",
    )
    add(
        "--api-burst",
        type=int,
        default=0,
        metavar="N",
        help="requests that may be sent at once; default: twice --api-qps",
    )
    add("--log-format", choices=["json", "text"], default="json")
    add("--log-level", choices=["debug", "info", "warning"], default="info")
    given = parser.parse_args(arguments)
    host, port = _address(parser, "--listen", given.listen)
    secure = given.secure_metrics
    if given.lease_duration < 2:
        parser.error("--lease-duration: use 2 seconds or more")
    if given.metrics_certificate is not None and not secure:
        parser.error("--metrics-certificate is for --secure-metrics; add that option")
    if not 0 <= given.api_qps < float("inf"):
        parser.error("--api-qps: use a number of requests per second, or 0 for no limit")
    if given.api_burst < 0 or (given.api_burst and not given.api_qps):
        parser.error("--api-burst: use a positive number, together with --api-qps")
    burst = float(given.api_burst or max(1.0, 2 * given.api_qps))
    return Options(
        kubeconfig=given.kubeconfig,
        scope=given.namespace,
        own_namespace=given.own_namespace,
        identity=given.identity,
        manager=given.manager,
        watch_nodes=not given.no_nodes,
        lease=not given.no_lease,
        lease_duration_s=given.lease_duration,
        host=host,
        port=port,
        metrics_at=_address(parser, "--secure-metrics", secure) if secure else None,
        metrics_certificate=given.metrics_certificate,
        api_rate=Rate(given.api_qps, burst) if given.api_qps else None,
        log_format=given.log_format,
        log_level=given.log_level,
    )


def _address(parser: argparse.ArgumentParser, option: str, given: str) -> tuple[str, int]:
    host, _, port = given.rpartition(":")
    if not port.isdecimal():
        parser.error(f"{option}: write HOST:PORT, such as 0.0.0.0:8080")
    return host.strip("[]"), int(port)
