"""Login from a kubeconfig, or from a pod's service account: all that a request needs.

`kubernetes.config` reads the files. It ignores some things without an error, and requests would
then be made as another user. This module handles them: exec plugins that fail, users that do not
exist, impersonation, and a token file that is rewritten.
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
"""Upper bound on the size of a kubeconfig in bytes; a larger file is something else, and parsing it
would take minutes."""
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
    """Address and credentials for requests to one API server."""

    server: str
    namespace: str = "default"
    source: str = "this program"
    """Origin of the login as text for a message."""
    tls: ssl.SSLContext | None = None
    """TLS context with the certificates; None if the server speaks plain HTTP."""
    server_name: str | None = None
    """Name in the server's certificate if it differs from that of the address."""
    proxy: str | None = None
    authorization: str = ""
    token_file: Path | None = None
    """File of the token, read for each request because it is rewritten by others. It has precedence
    over `authorization`."""
    impersonation: tuple[tuple[str, str], ...] = ()
    expires_s: float | None = None
    """Unix time in seconds at which the login expires; None if unknown."""

    def headers(self) -> list[tuple[str, str]]:
        """Return the headers of a request; a name may occur several times.

        An OSError is raised if the token file cannot be read.

        Returns:
            Pairs of name and value.
        """
        token = self.authorization
        if self.token_file is not None:
            token = f"Bearer {self.token_file.read_text().strip()}"
        return [("Authorization", token)] * bool(token) + list(self.impersonation)


def log_in(kubeconfig: Path | None = None, context: str | None = None) -> Login:
    """Return a login from a kubeconfig or a service account.

    An exec plugin of the kubeconfig may be run. Every failure raises an AccessError.

    Args:
        kubeconfig: Path of the kubeconfig; None takes the files of $KUBECONFIG, else
            ~/.kube/config, else the service account of this pod.
        context: Context in the kubeconfig; None takes the current one.

    Returns:
        The login.

    Raises:
        KubeconfigError: There is neither a kubeconfig nor a service account.
    """
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
    """Return the names of the contexts that `log_in` accepts; may raise KubeconfigError."""
    if not (files := _files(kubeconfig)):
        return []
    with _errors_named(", ".join(files), "correct it"):
        merged = KubeConfigMerger(os.pathsep.join(files))
        return [str(item["name"]) for item in merged.config["contexts"].value]


def _files(kubeconfig: Path | None) -> list[str]:
    if kubeconfig is not None:
        return [str(kubeconfig)]
    named = [file for file in os.environ.get("KUBECONFIG", "").split(os.pathsep) if file]
    files = named or ["~/.kube/config"]
    # Some of several files may be missing, like with kubectl. A single one must exist.
    there = [file for file in files if Path(file).expanduser().exists()]
    return there or (named if len(named) == 1 else [])


def _from_account() -> Login:
    configuration = Configuration()
    token, authority = ACCOUNT / "token", ACCOUNT / "ca.crt"
    with _errors_named(
        "the pod's service account", "see that the pod mounts it, or name a kubeconfig"
    ):
        InClusterConfigLoader(str(token), str(authority)).load_and_set(configuration)
        namespace = (ACCOUNT / "namespace").read_text().strip()
    source = "the pod's service account"
    return Login(
        server=configuration.host,
        namespace=namespace,
        source=source,
        tls=_tls(configuration, source),
        proxy=_proxy(configuration),
        token_file=token,
    )


def _from_files(files: list[str], context: str | None) -> Login:
    text = ", ".join(files)
    hint = "correct it; `kubectl config view` shows what is in it"
    for file in files:
        with _errors_named(file, hint), Path(file).expanduser().open("rb") as stream:
            read_at_most(stream, FILE_BYTES_MAX)
    with _errors_named(text, hint):
        merged = KubeConfigMerger(os.pathsep.join(files))
        known = [item["name"] for item in merged.config["contexts"].value]
        # The first file with a current-context decides, like with kubectl.
        currents = (config.get("current-context") for config in merged.config_files.values())
        name = context or next(filter(None, currents), "")
    if name not in known:
        raise ContextError(
            f"{text}: there is no context {name!r}" if name else f"{text}: no context is current",
            hint=f"use one of: {', '.join(map(str, known))}" if known else "add a context to it",
        )
    with _errors_named(text, hint):
        chosen = merged.config["contexts"].get_with_name(name)["context"]
        cluster = _named(merged, "clusters", chosen.safe_get("cluster"), text, name)["cluster"]
        wanted = chosen.safe_get("user")
        user = _named(merged, "users", wanted, text, name)["user"] if wanted else None
    source = f"context {name!r} of {text}"
    with _errors_named(source, hint), tempfile.TemporaryDirectory() as passing:
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
        # Change it in place, since a node is a view. Else the loader would run the plugin again.
        user.value.clear()
        user.value.update(_answered(says, answer))
    configuration = Configuration()
    loader = KubeConfigLoader(
        merged.config, name, config_base_path=None, temp_file_path=str(passing)
    )
    loader.load_and_set(configuration)
    if not str(cluster.safe_get("server") or "").startswith(("http://", "https://")):
        raise ValueError("its cluster has no server that begins with https://")
    return Login(
        server=configuration.host,
        namespace=str(loader.current_context["context"].get("namespace") or "default"),
        source=source,
        tls=_tls(configuration, source) if configuration.host.startswith("https") else None,
        server_name=configuration.tls_server_name,
        proxy=_proxy(configuration, given=cluster.safe_get("proxy-url")),
        authorization=configuration.api_key.get("BearerToken", ""),
        token_file=token_file,
        impersonation=tuple(_impersonation(says)),
        expires_s=answer.expires_s,
    )


def _answered(says: Mapping[str, Any], answer: plugin.Answer) -> dict[str, Any]:
    """Return a user with the plugin's answer in place of the plugin, and without a token file.

    Args:
        says: The user in the kubeconfig.
        answer: The answer of the exec plugin; empty if there is none.

    Returns:
        The user with plain credentials.

    Raises:
        CertificateError: The user has a client certificate without a key, or a key without a
            certificate.
    """
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
    """Return an item that a context names.

    `kubernetes` would ignore a missing user and send requests as nobody.

    Args:
        merged: The kubeconfig files.
        kind: `clusters` or `users`.
        name: Name of the item.
        text: The files as text for a message.
        context: Name of the context.

    Returns:
        The item.

    Raises:
        ContextError: There is no such item.
    """
    items: ConfigNode = merged.config[kind]
    node: ConfigNode | None = items.get_with_name(name, safe=True) if name else None
    if node is None:
        raise ContextError(
            f"{text}: context {context!r} names {name!r}, which is not among its {kind}",
            hint=f"add it to the {kind}, or choose another context",
        )
    return node


def _impersonation(user: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, header in (("as", "Impersonate-User"), ("as-uid", "Impersonate-Uid")):
        if user.get(key):
            yield header, str(user[key])
    for group in user.get("as-groups") or ():
        yield "Impersonate-Group", str(group)
    for key, values in (user.get("as-user-extra") or {}).items():
        for value in values:
            yield f"Impersonate-Extra-{key}", str(value)


def _proxy(configuration: Configuration, given: str | None = None) -> str | None:
    """Return the proxy for requests: that of the cluster, else that of the environment.

    NO_PROXY applies to the proxy of the environment only.

    Args:
        configuration: Configuration with the proxy of the environment.
        given: The `proxy-url` of the cluster.

    Returns:
        The URL of the proxy; None for none.

    Raises:
        KubeconfigError: The proxy speaks SOCKS.
    """
    proxy = given or configuration.proxy
    if not proxy or (
        not given and should_bypass_proxies(configuration.host, configuration.no_proxy or "")
    ):
        return None
    if is_socks_proxy_url(proxy):
        raise KubeconfigError(
            f"the proxy {proxy} to the API server is a SOCKS proxy, which is not supported",
            hint="use one that begins with http:// or https://",
        )
    return str(proxy)


def _tls(configuration: Configuration, source: str) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=configuration.ssl_ca_cert)
    except (OSError, ssl.SSLError):
        raise CertificateError(
            f"{source}: certificate-authority is not a certificate in PEM",
            hint="take the cluster's own, as `kubectl config view --raw` or its provider shows it",
        ) from None
    if not configuration.verify_ssl:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if configuration.cert_file:
        try:
            context.load_cert_chain(configuration.cert_file, configuration.key_file)
        except (OSError, ssl.SSLError):
            raise CertificateError(
                f"{source}: client-certificate and client-key are not a pair in PEM",
                hint="ask for a new certificate, or log in again with the tool that wrote it",
            ) from None
    return context


@contextmanager
def _errors_named(where: str, hint: str) -> Iterator[None]:
    """Turn an error while reading a file into a KubeconfigError.

    Args:
        where: The file as text for the message.
        hint: What the user can do.

    Yields:
        None.

    Raises:
        KubeconfigError: The block has raised one of `_UNUSABLE`.
    """
    try:
        yield
    except _UNUSABLE as error:
        why = getattr(error, "strerror", None) or " ".join(str(error).split()) or repr(error)
        raise KubeconfigError(f"{where} is unusable: {why}", hint=hint) from None
