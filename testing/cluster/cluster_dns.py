"""Install CoreDNS on every node under the usual Service name, for names inside the cluster."""

from __future__ import annotations

from testing.cluster.api import Json
from testing.cluster.control_plane import ControlPlane
from testing.cluster.images import COREDNS
from testing.cluster.node_config import DNS_DOMAIN

NAMESPACE = "kube-system"
READY_TIMEOUT_S = 60.0
_LABELS = {"k8s-app": "kube-dns"}
# With the default TTL of 5 s, clients would keep a replaced coordinator's old address that long.
_COREFILE = f""".:53 {{
    errors
    ready
    kubernetes {DNS_DOMAIN} in-addr.arpa {{
        pods insecure
        ttl 1
    }}
}}
"""


def install(plane: ControlPlane) -> None:
    """Create CoreDNS's objects without waiting for its pods; see `wait_ready`."""
    api, core = plane.api, f"/api/v1/namespaces/{NAMESPACE}"
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    name: Json = {"metadata": {"name": "coredns"}}
    reads = ["list", "watch"]
    rules = [
        {"apiGroups": [""], "resources": ["services", "pods", "namespaces"], "verbs": reads},
        {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": reads},
    ]
    plane.wait_for_accounts(NAMESPACE)
    api.create(f"{core}/serviceaccounts", name)
    api.create(f"{rbac}/clusterroles", name | {"rules": rules})
    subject = {"kind": "ServiceAccount", "name": "coredns", "namespace": NAMESPACE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "coredns"}
    api.create(f"{rbac}/clusterrolebindings", name | {"roleRef": role, "subjects": [subject]})
    api.create(f"{core}/configmaps", name | {"data": {"Corefile": _COREFILE}})
    ports = [
        {"name": "dns", "port": 53, "protocol": "UDP"},
        {"name": "dns-tcp", "port": 53, "protocol": "TCP"},
    ]
    service = {"clusterIP": plane.instance.dns_address, "selector": _LABELS, "ports": ports}
    api.create(f"{core}/services", {"metadata": {"name": "kube-dns"}, "spec": service})
    api.create(f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets", name | {"spec": _daemon_set()})


def wait_ready(plane: ControlPlane, nodes: int) -> None:
    """Wait until CoreDNS is ready on at least `nodes` nodes."""
    path = f"/apis/apps/v1/namespaces/{NAMESPACE}/daemonsets/coredns"
    plane.api.wait(
        path, lambda body: body["status"].get("numberReady", 0) >= nodes, READY_TIMEOUT_S
    )


def _daemon_set() -> Json:
    container = {
        "name": "coredns",
        "image": COREDNS,
        "imagePullPolicy": "Never",
        "args": ["-conf", "/etc/coredns/Corefile"],
        "volumeMounts": [{"name": "config", "mountPath": "/etc/coredns", "readOnly": True}],
        "readinessProbe": {"httpGet": {"path": "/ready", "port": 8181}, "periodSeconds": 1},
    }
    spec = {
        "serviceAccountName": "coredns",
        "priorityClassName": "system-node-critical",
        "tolerations": [{"operator": "Exists"}],
        "dnsPolicy": "Default",
        "terminationGracePeriodSeconds": 1,
        "containers": [container],
        "volumes": [{"name": "config", "configMap": {"name": "coredns"}}],
    }
    template = {"metadata": {"labels": _LABELS}, "spec": spec}
    return {"selector": {"matchLabels": _LABELS}, "template": template}
