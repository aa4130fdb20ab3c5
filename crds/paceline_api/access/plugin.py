"""Exec plugins: programs of EKS, GKE, AKS and others that return short-lived credentials.

They are run here and not by `kubernetes.config`. That package logs a failure and continues without
credentials, waits for a plugin without a bound, and forgets when a certificate expires.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from paceline_api.access.errors import PluginError

APIS: Final = ("client.authentication.k8s.io/v1", "client.authentication.k8s.io/v1beta1")
TIMEOUT_S: Final = 60.0
TYPED_S: Final = 600.0
"""Timeout in seconds of a plugin that may ask the user something."""
_SAID_CHARS_MAX: Final = 300


@dataclass(frozen=True, slots=True)
class Answer:
    """Credentials that a plugin returned."""

    token: str = ""
    certificate: str = ""
    """Client certificate in PEM, together with `key`; empty if there is a token."""
    key: str = ""
    expires_s: float | None = None
    """Unix time in seconds at which the credentials expire; None if the plugin names no time."""


def ask(exec_: Mapping[str, Any], folder: Path, cluster: Mapping[str, Any]) -> Answer:
    """Run the exec plugin of a user and return its credentials.

    Args:
        exec_: The `exec` section of the user.
        folder: Folder of the kubeconfig, to which a relative command refers.
        cluster: The cluster; passed to the plugin if `provideClusterInfo` is set.

    Returns:
        A token, or a certificate with its key.

    Raises:
        PluginError: The plugin is missing, fails, times out, or returns something unusable.
    """
    api, name = str(exec_.get("apiVersion")), str(exec_.get("command") or "")
    if api not in APIS or not name:
        raise PluginError(
            f"the kubeconfig's exec plugin {name or 'without a command'} uses {api}",
            hint=f"write {APIS[0]} as its apiVersion, or use a newer release of the plugin",
        )
    mode = str(exec_.get("interactiveMode") or "IfAvailable")
    typed = mode != "Never" and sys.stdin is not None and sys.stdin.isatty()
    if mode == "Always" and not typed:
        raise PluginError(
            f"the exec plugin {name} wants to ask a person, and there is no terminal",
            hint="log in with it from a terminal first, or use credentials without a question",
        )
    output = _run(_found(name, folder, exec_), exec_, _info(api, exec_, cluster, typed), typed)
    return _read(output, name, api)


def _found(name: str, folder: Path, exec_: Mapping[str, Any]) -> str:
    """Return the path of the plugin's program.

    Args:
        name: Its command: a name in PATH, or a path, which may be relative to `folder`.
        folder: Folder of the kubeconfig.
        exec_: The `exec` section of the user.

    Returns:
        The path.

    Raises:
        PluginError: There is no such program on this machine.
    """
    file = shutil.which(str(folder / name) if os.sep in name else name)
    if file is None:
        hint = str(exec_.get("installHint") or "").strip()
        raise PluginError(
            f"the kubeconfig's exec plugin {name} is not on this machine",
            hint=hint or f"install {name}, or put its folder into PATH",
        )
    return file


def _info(api: str, exec_: Mapping[str, Any], cluster: Mapping[str, Any], typed: bool) -> str:
    spec: dict[str, Any] = {"interactive": typed}
    if exec_.get("provideClusterInfo"):
        described = {key: value for key, value in cluster.items() if key != "extensions"}
        for extension in cluster.get("extensions") or ():
            if extension["name"] == "client.authentication.k8s.io/exec":
                described["config"] = extension["extension"]
        spec["cluster"] = described
    return json.dumps({"apiVersion": api, "kind": "ExecCredential", "spec": spec})


def _run(file: str, exec_: Mapping[str, Any], info: str, typed: bool) -> str:
    surroundings = {str(item["name"]): str(item["value"]) for item in exec_.get("env") or ()}
    name, limit_s = exec_["command"], TYPED_S if typed else TIMEOUT_S
    try:
        done = subprocess.run(
            [file, *map(str, exec_.get("args") or ())],
            stdin=None if typed else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if typed else subprocess.PIPE,
            env=os.environ | surroundings | {"KUBERNETES_EXEC_INFO": info},
            text=True,
            errors="replace",
            timeout=limit_s,
            check=False,
        )
    except OSError as error:
        raise PluginError(
            f"the exec plugin {name} cannot be started: {error.strerror}",
            hint=f"see that {file} is a program that runs on this machine",
        ) from None
    except subprocess.TimeoutExpired:
        raise PluginError(
            f"the exec plugin {name} has printed nothing for {limit_s:.0f} s",
            hint=f"run it by hand to see what it waits for: {name}",
        ) from None
    if done.returncode:
        stderr = (done.stderr or "").strip()[-_SAID_CHARS_MAX:] or "nothing"
        raise PluginError(
            f"the exec plugin {name} has failed with exit code {done.returncode}, saying: {stderr}",
            hint="log in again with the tool that it belongs to, and see that it runs by hand",
        )
    return done.stdout


def _read(output: str, name: str, api: str) -> Answer:
    """Parse the output of a plugin; no error quotes it, because it is secret."""
    try:
        credential = json.loads(output)
        status = credential["status"]
        if credential["apiVersion"] != api:
            raise ValueError(f"it answers in {credential['apiVersion']} and not {api}")
        expiry = status.get("expirationTimestamp")
        answer = Answer(
            token=str(status.get("token") or ""),
            certificate=str(status.get("clientCertificateData") or ""),
            key=str(status.get("clientKeyData") or ""),
            expires_s=datetime.fromisoformat(expiry).timestamp() if expiry else None,
        )
        if bool(answer.certificate) != bool(answer.key):
            raise ValueError("a certificate and its key come together")
        if not (answer.token or answer.certificate):
            raise ValueError("neither a token nor a certificate is in it")
    except json.JSONDecodeError:
        why = "it is no JSON"
    except (AttributeError, KeyError, RecursionError, TypeError):
        why = "it is no ExecCredential with a status"
    except ValueError as error:
        why = str(error)
    else:
        return answer
    raise PluginError(
        f"the answer of the exec plugin {name} is unusable: {why}",
        hint="run it by hand and look at what it prints; a newer release of it may help",
    )
