"""etcd, API server, controller manager and scheduler as plain processes on this machine.

There is one of each, on free ports. Only the connection between API server and etcd, on loopback,
has no TLS. Everything else has certificates, service-account tokens and RBAC as in a production
cluster. Each program is a `Daemon` that a test may stop, pause and start again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from itertools import count
from pathlib import Path

import yaml

from testing.cluster import kubeconfigs, programs
from testing.cluster.api import Api, ApiError
from testing.cluster.certificates import ADMINS, Authority, KeyPair, write_private_key
from testing.cluster.daemons import Daemon
from testing.cluster.fake_nodes import FakeNodes
from testing.cluster.instance import Instance

READY_TIMEOUT_S = 90.0
ETCD = "etcd"
API_SERVER = "kube-apiserver"
CONTROLLER_MANAGER = "kube-controller-manager"
SCHEDULER = "kube-scheduler"
SERVICE_ACCOUNT_ISSUER = "https://kubernetes.default.svc.cluster.local"


@dataclass(frozen=True)
class Limits:
    """Client-side rate limits of the controller manager and of the scheduler, in requests/s."""

    qps: int = 400
    burst: int = 800

    @property
    def flags(self) -> list[str]:
        """Command-line flags that set these limits."""
        return [f"--kube-api-qps={self.qps}", f"--kube-api-burst={self.burst}"]


# The programs' defaults (20 with bursts of 30, and 50 with bursts of 100) slow down many jobs.
RAISED = Limits()


class ControlPlane:
    """One Kubernetes control plane without nodes; usable after `start`."""

    def __init__(
        self,
        instance: Instance,
        *,
        address: str = "127.0.0.1",
        audit: bool = False,
        controllers: str = "*",
        limits: Limits | None = RAISED,
    ) -> None:
        self.instance = instance
        self.folder = instance.folder
        self.audit_log = self.folder / "audit.log" if audit else None
        self._address = address
        self._controllers = controllers
        # None keeps Kubernetes' defaults. Benchmarks print which limits they used.
        self.limits = limits
        self._port = instance.free_port()
        self._etcd_port = instance.free_port()
        self._namespaces = count(1)
        self.authority = Authority(self.folder / "certificates")
        self._account_key = self.folder / "certificates" / "service-accounts.key"
        write_private_key(self._account_key)
        self.kubeconfig = self.kubeconfig_of("admin", ADMINS)
        self.api = Api(self.kubeconfig)
        self.programs = {
            ETCD: self._daemon(ETCD, self._etcd_flags()),
            API_SERVER: self._daemon(API_SERVER, self._api_server_flags()),
            CONTROLLER_MANAGER: self._daemon(CONTROLLER_MANAGER, self._controller_flags()),
            SCHEDULER: self._daemon(SCHEDULER, self._scheduler_flags()),
        }

    @property
    def url(self) -> str:
        """URL of the API server."""
        return f"https://{self._address}:{self._port}"

    def start(self, *, controllers: bool = True) -> None:
        """Start and wait until ready; without `controllers` only etcd and the API server."""
        self.programs[ETCD].start()
        self.programs[API_SERVER].start()
        self.wait_ready()
        if controllers:
            self.programs[CONTROLLER_MANAGER].start()
            self.programs[SCHEDULER].start()
            self.wait_for_accounts("default")

    def stop(self) -> None:
        """Stop all programs in order: the API server outlives its clients, and etcd ends last."""
        for name in (SCHEDULER, CONTROLLER_MANAGER, API_SERVER, ETCD):
            self.programs[name].stop()

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Wait until the API server reports ready, for example after a restart."""
        self.programs[API_SERVER].wait_until(self._answers, "ready", timeout_s)

    def wait_for_accounts(self, namespace: str) -> None:
        """Wait for the default service account of `namespace`, which each pod needs."""
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"

        def there() -> bool:
            try:
                self.api.get(path)
            except ApiError as error:
                if error.status != HTTPStatus.NOT_FOUND:
                    raise
                return False
            return True

        manager = self.programs[CONTROLLER_MANAGER]
        manager.wait_until(there, f"making service accounts in {namespace}", READY_TIMEOUT_S)

    def kubeconfig_of(self, user: str, *groups: str) -> Path:
        """Write a kubeconfig for any user and groups; RBAC decides what they may do."""
        path = self.folder / "kubeconfigs" / f"{user.replace(':', '-')}.yaml"
        pair = self.authority.client(user, *groups)
        return kubeconfigs.write(path, self.url, self.authority.certificate, pair)

    def kubeconfig_of_account(self, namespace: str, account: str) -> Path:
        """Write a kubeconfig with a token of a service account, as its pods would have."""
        body = {"spec": {"expirationSeconds": 24 * 3600}}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        token = self.api.create(path, body)["status"]["token"]
        target = self.folder / "kubeconfigs" / f"{namespace}-{account}.yaml"
        return kubeconfigs.write(target, self.url, self.authority.certificate, token, namespace)

    @contextmanager
    def namespace(self, prefix: str = "test") -> Iterator[str]:
        """Yield a new namespace with its default service account; delete it afterwards."""
        name = f"{prefix}-{next(self._namespaces)}"
        self.api.create("/api/v1/namespaces", {"metadata": {"name": name}})
        try:
            self.wait_for_accounts(name)
            yield name
        finally:
            self.api.delete(f"/api/v1/namespaces/{name}")

    @contextmanager
    def fake_nodes(self, nodes: int, *, pods_per_node: int = 1100) -> Iterator[FakeNodes]:
        """Run nodes without machines, on which bound pods become ready (see fake_kubelet.py)."""
        identity = self.kubeconfig_of("fake-kubelet", ADMINS)
        log = self.folder / "logs" / "fake-kubelet.log"
        fake = FakeNodes(
            self.api,
            identity,
            log,
            nodes=nodes,
            pods_per_node=pods_per_node,
            pod_range=self.instance.fake_pod_range,
            device=f"{self.instance.name}f",
        )
        try:
            fake.start()
            yield fake
        finally:
            fake.stop()

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU time that each running program has used since its start."""
        return {name: one.cpu_seconds() for name, one in self.programs.items() if one.alive}

    def _answers(self) -> bool:
        try:
            return self.api.text("/readyz") == "ok"
        except (ApiError, OSError):
            return False

    def _daemon(self, name: str, flags: Sequence[str]) -> Daemon:
        return Daemon(name, [programs.require(name), *flags], self.folder / "logs" / f"{name}.log")

    def _etcd_flags(self) -> list[str]:
        client = f"http://127.0.0.1:{self._etcd_port}"
        peer = f"http://127.0.0.1:{self.instance.free_port()}"
        return [
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            # The data need not outlive the machine; how slowly a disk syncs is not tested.
            "--unsafe-no-fsync",
            f"--quota-backend-bytes={4 << 30}",
            "--log-level=warn",
        ]

    def _api_server_flags(self) -> list[str]:
        hosts = ("127.0.0.1", "localhost", self._address, self.instance.address("128.1"))
        names = ("kubernetes", "kubernetes.default", "kubernetes.default.svc")
        pair = self.authority.server("kube-apiserver", (*dict.fromkeys(hosts), *names))
        to_kubelets = self.authority.client("kube-apiserver-kubelet-client", ADMINS)
        loopback = self._address == "127.0.0.1"
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--bind-address={self._address}",
            f"--secure-port={self._port}",
            # Without nodes nothing uses the endpoints, and loopback is refused as their address.
            *(["--endpoint-reconciler-type=none"] if loopback else []),
            *([] if loopback else [f"--advertise-address={self._address}"]),
            f"--service-cluster-ip-range={self.instance.service_range}",
            *_tls_flags(pair),
            f"--client-ca-file={self.authority.certificate}",
            f"--kubelet-certificate-authority={self.authority.certificate}",
            f"--kubelet-client-certificate={to_kubelets.certificate}",
            f"--kubelet-client-key={to_kubelets.key}",
            # The host's resolver does not know the names of nodes.
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-issuer={SERVICE_ACCOUNT_ISSUER}",
            f"--service-account-key-file={self._account_key}",
            f"--service-account-signing-key-file={self._account_key}",
            "--authorization-mode=Node,RBAC",
            "--allow-privileged=true",
            "--max-requests-inflight=800",
            "--max-mutating-requests-inflight=400",
            "--profiling=false",
            *self._audit_flags(),
        ]

    def _audit_flags(self) -> list[str]:
        if self.audit_log is None:
            return []
        policy = self.folder / "audit-policy.yaml"
        rules = {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived"],
            "rules": [{"level": "Metadata"}],
        }
        policy.write_text(yaml.safe_dump(rules))
        # A reader would lose its offset if the server rotated the file at its default of 100 MB.
        size = "--audit-log-maxsize=10000"
        return [f"--audit-policy-file={policy}", f"--audit-log-path={self.audit_log}", size]

    def _controller_flags(self) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig_of(f'system:{CONTROLLER_MANAGER}')}",
            "--leader-elect=false",
            "--secure-port=0",
            f"--controllers={self._controllers}",
            f"--service-account-private-key-file={self._account_key}",
            f"--root-ca-file={self.authority.certificate}",
            # Each controller has its own user, which also shows in the audit log.
            "--use-service-account-credentials=true",
            "--node-monitor-period=2s",
            "--node-monitor-grace-period=20s",
            "--horizontal-pod-autoscaler-sync-period=2s",
            *(self.limits.flags if self.limits else ()),
        ]

    def _scheduler_flags(self) -> list[str]:
        return [
            f"--kubeconfig={self.kubeconfig_of(f'system:{SCHEDULER}')}",
            "--leader-elect=false",
            "--secure-port=0",
            *(self.limits.flags if self.limits else ()),
        ]


def _tls_flags(pair: KeyPair) -> list[str]:
    return [f"--tls-cert-file={pair.certificate}", f"--tls-private-key-file={pair.key}"]
