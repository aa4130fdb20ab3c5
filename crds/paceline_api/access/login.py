"""From a kubeconfig, or a pod's service account, to all that a request needs.

What is in the files is read by `kubernetes.config`. Beside it stands what that leaves out without a
word, and so would act as somebody else: exec plugins that fail, users that are not there,
impersonation, a token file that is written anew.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from kubernetes.client import Configuration
from kubernetes.client.rest import is_socks_proxy_url, should_bypass_proxies
from kubernetes.config import ConfigException
from kubernetes.config.incluster_config import InClusterConfigLoader
from kubernetes.config.kube_config import ConfigNode, KubeConfigLoader, KubeConfigMerger

from paceline_api.access import plugin
from paceline_api.access.errors import CertificateError, ContextError, KubeconfigError
from paceline_api.bounded import read_at_most

FILE_BYTES_MAX: Final = 4_000_000
"""Of a kubeconfig: what is larger is something else, and would be read for minutes."""
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_UNUSABLE: Final = (
    AttributeError,
    ConfigException,
    LookupError,
    OSError,
    RecursionError,
    TypeError,
    ValueError,
    yaml.YAMLError,
)


@dataclass(frozen=True, slots=True)
class Login:
    server: str
    namespace: str = "default"
    source: str = "this program"
    """Where it comes from, in words for a message."""
    tls: ssl.SSLContext | None = None
    """None: the server speaks plain HTTP."""
    server_name: str | None = None
    """The name in the server's certificate, where it is not that of its address."""
    proxy: str | None = None
    authorization: str = ""
    token_file: Path | None = None
    """Read for each request: somebody writes it anew. It goes before `authorization`."""
    impersonation: tuple[tuple[str, str], ...] = ()
    expires_s: float | None = None
    """Unix time; None: not known."""

    def headers(self) -> list[tuple[str, str]]:
        """A name may come several times. Raises OSError while the token's file is away."""
        token = self.authorization
        if self.token_file is not None:
            token = f"Bearer {self.token_file.read_text().strip()}"
        return [("Authorization", token)] * bool(token) + list(self.impersonation)


def log_in(kubeconfig: Path | None = None, context: str | None = None) -> Login:
    """`kubeconfig`, else the files of $KUBECONFIG, else ~/.kube/config, else the service account of
    the pod. `context`: None for the current one. May run an exec plugin. Raises AccessError."""
    if files := _files(kubeconfig):
        return _from_files(files, context)
    if context is None and (ACCOUNT / "token").exists():
        return _from_account()
    where = os.environ.get("KUBECONFIG") or "~/.kube/config"
    raise KubeconfigError(
        f"no way to an API server: there is no kubeconfig ({where}) and no service account",
        hint="name one with --kubeconfig or KUBECONFIG, or run inside of a pod",
    )


def contexts(kubeconfig: Path | None = None) -> list[str]:
    """Names of those that `log_in` knows. Raises KubeconfigError."""
    if not (files := _files(kubeconfig)):
        return []
    with _told(", ".join(files), "correct it"):
        merged = KubeConfigMerger(os.pathsep.join(files))
        return [str(item["name"]) for item in merged.config["contexts"].value]


def _files(kubeconfig: Path | None) -> list[str]:
    if kubeconfig is not None:
        return [str(kubeconfig)]
    named = [file for file in os.environ.get("KUBECONFIG", "").split(os.pathsep) if file]
    files = named or ["~/.kube/config"]
    # Of several some may be away, as for kubectl; one that alone is named shall be told of.
    there = [file for file in files if Path(file).expanduser().exists()]
    return there or (named if len(named) == 1 else [])


def _from_account() -> Login:
    found = Configuration()
    token, authority = ACCOUNT / "token", ACCOUNT / "ca.crt"
    with _told("the pod's service account", "see that the pod mounts it, or name a kubeconfig"):
        InClusterConfigLoader(str(token), str(authority)).load_and_set(found)
        namespace = (ACCOUNT / "namespace").read_text().strip()
    source = "the pod's service account"
    return Login(
        server=found.host,
        namespace=namespace,
        source=source,
        tls=_tls(found, source),
        proxy=_proxy(found),
        token_file=token,
    )


def _from_files(files: list[str], context: str | None) -> Login:
    text = ", ".join(files)
    hint = "correct it; `kubectl config view` shows what is in it"
    for file in files:
        with _told(file, hint), Path(file).expanduser().open("rb") as stream:
            read_at_most(stream, FILE_BYTES_MAX)
    with _told(text, hint):
        merged = KubeConfigMerger(os.pathsep.join(files))
        known = [item["name"] for item in merged.config["contexts"].value]
        # The first that names one decides, as for kubectl.
        currents = (config.get("current-context") for config in merged.config_files.values())
        name = context or next(filter(None, currents), "")
    if name not in known:
        raise ContextError(
            f"{text}: there is no context {name!r}" if name else f"{text}: no context is current",
            hint=f"use one of: {', '.join(map(str, known))}" if known else "add a context to it",
        )
    with _told(text, hint):
        chosen = merged.config["contexts"].get_with_name(name)["context"]
        cluster = _named(merged, "clusters", chosen.safe_get("cluster"), text, name)["cluster"]
        wanted = chosen.safe_get("user")
        user = _named(merged, "users", wanted, text, name)["user"] if wanted else None
    source = f"context {name!r} of {text}"
    with _told(source, hint), tempfile.TemporaryDirectory() as passing:
        return _login(merged, name, cluster, user, Path(passing), source)


def _login(
    merged: KubeConfigMerger,
    name: str,
    cluster: ConfigNode,
    user: ConfigNode | None,
    passing: Path,
    source: str,
) -> Login:
    says = dict(user.value) if user is not None else {}
    folder = Path(user.path).resolve().parent if user is not None else passing
    if "auth-provider" in says:
        raise KubeconfigError(
            f"{source} asks an auth-provider who the user is, which Kubernetes has given up",
            hint="use an exec plugin, such as kubelogin, gke-gcloud-auth-plugin or aws",
        )
    answer = plugin.Answer()
    token_file = folder / says["tokenFile"] if says.get("tokenFile") else None
    if says.get("exec") and not (token_file or says.get("token")):
        answer = plugin.ask(says["exec"], folder, cluster.value)
    if user is not None:
        # In place, since a node is a view; else the loader would ask the plugin once more.
        user.value.clear()
        user.value.update(_answered(says, answer))
    found = Configuration()
    loader = KubeConfigLoader(
        merged.config, name, config_base_path=None, temp_file_path=str(passing)
    )
    loader.load_and_set(found)
    if not str(cluster.safe_get("server") or "").startswith(("http://", "https://")):
        raise ValueError("its cluster has no server that begins with https://")
    return Login(
        server=found.host,
        namespace=str(loader.current_context["context"].get("namespace") or "default"),
        source=source,
        tls=_tls(found, source) if found.host.startswith("https") else None,
        server_name=found.tls_server_name,
        proxy=_proxy(found, given=cluster.safe_get("proxy-url")),
        authorization=found.api_key.get("BearerToken", ""),
        token_file=token_file,
        impersonation=tuple(_impersonation(says)),
        expires_s=answer.expires_s,
    )


def _answered(says: Mapping[str, Any], answer: plugin.Answer) -> dict[str, Any]:
    """The user as one without a plugin, and without a file that is read again and again."""
    user = {key: value for key, value in says.items() if key not in ("exec", "tokenFile")}
    if answer.token:
        user["token"] = answer.token
    if answer.certificate:
        user["client-certificate-data"] = base64.b64encode(answer.certificate.encode()).decode()
        user["client-key-data"] = base64.b64encode(answer.key.encode()).decode()
    if bool({"client-certificate", "client-certificate-data"} & set(user)) != bool(
        {"client-key", "client-key-data"} & set(user)
    ):
        raise CertificateError(
            "the kubeconfig's client certificate comes without its key, or the key without it",
            hint="give both client-certificate and client-key, or both with -data",
        )
    return user


def _named(
    merged: KubeConfigMerger, kind: str, name: str | None, text: str, context: str
) -> ConfigNode:
    """An item that a context names; `kubernetes` goes on as nobody where a user is missing."""
    items: ConfigNode = merged.config[kind]
    found: ConfigNode | None = items.get_with_name(name, safe=True) if name else None
    if found is None:
        raise ContextError(
            f"{text}: context {context!r} names {name!r}, which is not among its {kind}",
            hint=f"add it to the {kind}, or choose another context",
        )
    return found


def _impersonation(user: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, header in (("as", "Impersonate-User"), ("as-uid", "Impersonate-Uid")):
        if user.get(key):
            yield header, str(user[key])
    for group in user.get("as-groups") or ():
        yield "Impersonate-Group", str(group)
    for key, values in (user.get("as-user-extra") or {}).items():
        for value in values:
            yield f"Impersonate-Extra-{key}", str(value)


def _proxy(found: Configuration, given: str | None = None) -> str | None:
    """A cluster's own goes before that of the environment, to which NO_PROXY belongs."""
    proxy = given or found.proxy
    if not proxy or (not given and should_bypass_proxies(found.host, found.no_proxy or "")):
        return None
    if is_socks_proxy_url(proxy):
        raise KubeconfigError(
            f"the proxy {proxy} to the API server speaks SOCKS, which is not supported",
            hint="use one that begins with http:// or https://",
        )
    return str(proxy)


def _tls(found: Configuration, source: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=found.ssl_ca_cert)
    except (OSError, ssl.SSLError):
        raise CertificateError(
            f"{source}: certificate-authority is no certificate in PEM",
            hint="take the cluster's own, as `kubectl config view --raw` or its provider shows it",
        ) from None
    if not found.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if found.cert_file:
        try:
            context.load_cert_chain(found.cert_file, found.key_file)
        except (OSError, ssl.SSLError):
            raise CertificateError(
                f"{source}: client-certificate and client-key are no pair in PEM",
                hint="ask for a new certificate, or log in again with the tool that wrote it",
            ) from None
    return context


@contextmanager
def _told(where: str, hint: str) -> Iterator[None]:
    """Whatever a file holds, it ends as one sentence."""
    try:
        yield
    except _UNUSABLE as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split()) or repr(error)
        raise KubeconfigError(f"{where} is unusable: {why}", hint=hint) from None
