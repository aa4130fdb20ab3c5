"""How the API server is reached: a kubeconfig, or the service account of the operator's pod."""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")


@dataclass(frozen=True, slots=True)
class Credentials:
    server: str
    tls: ssl.SSLContext | None
    token: str = ""
    token_file: Path | None = None
    """Read again for each request: the kubelet renews it."""
    namespace: str = "default"

    def headers(self) -> dict[str, str]:
        token = self.token_file.read_text().strip() if self.token_file else self.token
        return {"Authorization": f"Bearer {token}"} if token else {}


def credentials(kubeconfig: str = "") -> Credentials:
    """`kubeconfig` or $KUBECONFIG if given, else the pod's service account."""
    file = kubeconfig or os.environ.get("KUBECONFIG", "")
    if file:
        return from_kubeconfig(Path(file))
    if (ACCOUNT / "token").exists():
        return _in_cluster()
    raise PacelineError(
        "no way to an API server: there is neither a kubeconfig nor a service account",
        hint="set KUBECONFIG, or run the operator as a pod",
        exit_code=EXIT_BAD_INPUT,
    )


def _in_cluster() -> Credentials:
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default.svc")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    shown = f"[{host}]" if ":" in host else host
    return Credentials(
        server=f"https://{shown}:{port}",
        tls=ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt")),
        token_file=ACCOUNT / "token",
        namespace=(ACCOUNT / "namespace").read_text().strip(),
    )


def from_kubeconfig(file: Path) -> Credentials:
    """Raises PacelineError. Files that it names are looked for beside it."""
    try:
        config = yaml.safe_load(file.read_text())
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config["users"], context["user"])["user"]
        server = str(cluster["server"]).rstrip("/")
        tls = _tls(cluster, user, file.parent) if server.startswith("https") else None
    except (OSError, KeyError, TypeError, ValueError, yaml.YAMLError, StopIteration) as error:
        raise PacelineError(
            f"{file}: is no usable kubeconfig: {error!r}",
            hint="name a file with a current-context, and with the whole of what it names",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    if plugin := {"exec", "auth-provider"} & set(user):
        raise PacelineError(
            f"{file}: asks a program who the user is ({plugin.pop()}), which is not supported",
            hint="use a token, a tokenFile or a client certificate",
            exit_code=EXIT_BAD_INPUT,
        )
    return Credentials(
        server=server,
        tls=tls,
        token=str(user.get("token", "")),
        token_file=file.parent / user["tokenFile"] if "tokenFile" in user else None,
        namespace=str(context.get("namespace", "default")),
    )


def _named(items: list[dict[str, Any]], name: str) -> dict[str, Any]:
    return next(item for item in items if item["name"] == name)


def _tls(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context()
    if "certificate-authority-data" in cluster:
        pem = base64.b64decode(cluster["certificate-authority-data"]).decode()
        context.load_verify_locations(cadata=pem)
    elif "certificate-authority" in cluster:
        context.load_verify_locations(cafile=folder / cluster["certificate-authority"])
    if cluster.get("insecure-skip-tls-verify"):
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if "client-certificate-data" in user:
        # The ssl module takes files only; they are gone again after this call.
        with tempfile.TemporaryDirectory() as passing:
            certificate, key = Path(passing) / "crt", Path(passing) / "key"
            certificate.write_bytes(base64.b64decode(user["client-certificate-data"]))
            key.touch(mode=0o600)
            key.write_bytes(base64.b64decode(user["client-key-data"]))
            context.load_cert_chain(certificate, key)
    elif "client-certificate" in user:
        context.load_cert_chain(folder / user["client-certificate"], folder / user["client-key"])
    return context
