"""Logging in to an API server from a kubeconfig or a pod, and the errors for invalid ones."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline_api.access import login as module
from paceline_api.access import plugin as exec_plugin
from paceline_api.access.errors import (
    AccessError,
    CertificateError,
    ContextError,
    KubeconfigError,
    PluginError,
)
from paceline_api.access.login import log_in
from paceline_api.errors import EXIT_BAD_INPUT
from paceline_operator.cluster.tls import Pair, pair_of
from paceline_operator.core.keys import job_keys

from testing.access_plugin import Plugin


@pytest.fixture(autouse=True)
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Isolate the test from the user's kubeconfig and proxies and from a service account."""
    for name in ("KUBECONFIG", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "ACCOUNT", tmp_path / "no-account")


@pytest.fixture(scope="module")
def pair() -> Pair:
    return pair_of(job_keys(b"k" * 32, "uid"))


def config(
    folder: Path, *, cluster: object = None, user: object = None, name: str = "here", **more: Any
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "config"
    content = {
        "current-context": name,
        "contexts": [
            {"name": "broken", "context": {"cluster": "none", "user": "none"}},
            {"name": f"nobody-{name}", "context": {"cluster": name, "user": "none"}},
            {"name": name, "context": {"cluster": name, "user": name, "namespace": "team"}},
        ],
        "clusters": [{"name": name, "cluster": cluster or {"server": "http://127.0.0.1:1/"}}],
        "users": [{"name": name, "user": user or {"token": "abc"}}],
    }
    file.write_text(yaml.safe_dump(content | more))
    return file


def coded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def headers_of(file: Path, **more: Any) -> list[tuple[str, str]]:
    return log_in(file, **more).headers()


def test_the_current_context_of_the_kubeconfig_is_used(tmp_path: Path) -> None:
    login = log_in(config(tmp_path))
    assert (login.server, login.namespace, login.tls) == ("http://127.0.0.1:1", "team", None)
    assert login.headers() == [("Authorization", "Bearer abc")]


def test_contexts_of_all_files_in_kubeconfig_can_be_selected_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [
        config(tmp_path / name, name=name, user={"token": name}) for name in ("one", "two", "three")
    ]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join([str(tmp_path / "away"), *map(str, files)]))
    assert log_in().headers() == [("Authorization", "Bearer one")], "the first decides"
    assert log_in(context="three").headers() == [("Authorization", "Bearer three")]


def test_an_explicit_kubeconfig_overrides_the_environment_and_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config(tmp_path / "home/.kube", user={"token": "home"})
    assert log_in().headers() == [("Authorization", "Bearer home")]
    named = config(tmp_path / "named", user={"token": "named"})
    monkeypatch.setenv("KUBECONFIG", str(named))
    assert log_in().headers() == [("Authorization", "Bearer named")]
    assert headers_of(config(tmp_path / "given", user={"token": "given"})) == [
        ("Authorization", "Bearer given")
    ]


@pytest.mark.parametrize("data", [True, False], ids=["data", "files"])
def test_a_client_certificate_needs_no_token(tmp_path: Path, pair: Pair, data: bool) -> None:
    (tmp_path / "crt").write_text(pair.certificate)
    (tmp_path / "key").write_text(pair.private_key)
    cluster: dict[str, Any] = {"server": "https://x", "tls-server-name": "kubernetes"}
    if data:
        cluster["certificate-authority-data"] = coded(pair.certificate)
        user = {
            "client-certificate-data": coded(pair.certificate),
            "client-key-data": coded(pair.private_key),
        }
    else:
        cluster["certificate-authority"] = "crt"
        user = {"client-certificate": "crt", "client-key": "key"}
    login = log_in(config(tmp_path, cluster=cluster, user=user))
    assert login.headers() == []
    assert login.server_name == "kubernetes"
    assert login.tls is not None
    assert login.tls.check_hostname
    assert len(login.tls.get_ca_certs(binary_form=True)) == 1


def test_a_token_file_is_read_for_each_request(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("first\n")
    login = log_in(config(tmp_path, user={"tokenFile": "token", "token": "old"}))
    assert login.headers() == [("Authorization", "Bearer first")]
    (tmp_path / "token").write_text("second\n")
    assert login.headers() == [("Authorization", "Bearer second")]


def test_a_user_name_and_a_password_are_sent_as_basic_authentication(tmp_path: Path) -> None:
    user = {"username": "jane", "password": "secret"}
    assert headers_of(config(tmp_path, user=user)) == [
        ("Authorization", f"Basic {coded('jane:secret')}"),
    ]


def test_all_impersonation_headers_are_sent(tmp_path: Path) -> None:
    """The `kubernetes` package ignores these fields and would act as the user itself."""
    user = {
        "token": "abc",
        "as": "jane",
        "as-uid": "7",
        "as-groups": ["a", "b"],
        "as-user-extra": {"scope": ["x"]},
    }
    assert headers_of(config(tmp_path, user=user))[1:] == [
        ("Impersonate-User", "jane"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
        ("Impersonate-Extra-scope", "x"),
    ]


def test_the_proxy_of_the_kubeconfig_overrides_that_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = {"server": "http://api.example.com"}
    assert log_in(config(tmp_path, cluster=server)).proxy is None
    monkeypatch.setenv("http_proxy", "http://env:1")
    assert log_in(config(tmp_path, cluster=server)).proxy == "http://env:1"
    monkeypatch.setenv("no_proxy", ".example.com")
    assert log_in(config(tmp_path, cluster=server)).proxy is None
    own = server | {"proxy-url": "http://own:1"}
    assert log_in(config(tmp_path, cluster=own)).proxy == "http://own:1"


def test_a_pod_uses_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    monkeypatch.setattr(module, "ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("paceline\n")
    (tmp_path / "ca.crt").write_text(pair.certificate)
    login = log_in()
    assert (login.server, login.namespace) == ("https://[fd00::1]:6443", "paceline")
    assert login.headers() == [("Authorization", "Bearer first")]
    (tmp_path / "token").write_text("second\n")
    assert login.headers() == [("Authorization", "Bearer second")]


# ---- exec plugins ---------------------------------------------------------------------------


def test_an_exec_plugin_supplies_the_token_and_receives_the_cluster_info(tmp_path: Path) -> None:
    plugin = Plugin.at(tmp_path / "plugin")
    plugin.hands_out({"token": "short"}, life_s=600)
    cluster = {
        "server": "http://127.0.0.1:1",
        "extensions": [
            {"name": "client.authentication.k8s.io/exec", "extension": {"audience": "me"}}
        ],
    }
    file = config(tmp_path, cluster=cluster, user=plugin.user(provideClusterInfo=True))
    login = log_in(file)
    assert login.headers() == [("Authorization", "Bearer short")]
    assert login.expires_s is not None
    (request,) = plugin.asked
    assert request["spec"]["cluster"] == {
        "server": "http://127.0.0.1:1",
        "config": {"audience": "me"},
    }


def test_an_exec_plugin_may_supply_a_client_certificate(tmp_path: Path, pair: Pair) -> None:
    plugin = Plugin.at(tmp_path / "plugin")
    plugin.hands_out({"clientCertificateData": pair.certificate, "clientKeyData": pair.private_key})
    login = log_in(config(tmp_path, cluster={"server": "https://x"}, user=plugin.user()))
    assert login.tls is not None
    assert login.headers() == []


ANSWERS: dict[str, dict[str, Any]] = {
    "nothing in it": {"status": {}},
    "half a certificate": {"status": {"clientCertificateData": "x"}},
    "no status": {"status": None},
    "failed": {"status": {}, "code": 7, "said": "the session is over"},
}


@pytest.mark.parametrize("what", ANSWERS)
def test_a_failing_exec_plugin_is_reported_by_name(tmp_path: Path, what: str) -> None:
    plugin = Plugin.at(tmp_path / "plugin")
    plugin.hands_out(**ANSWERS[what])
    error = _refused(config(tmp_path, user=plugin.user()), PluginError)
    assert "who-am-i" in error.message
    if what == "failed":
        assert "exit code 7, saying: the session is over" in error.message


def test_a_missing_exec_plugin_is_reported_with_its_install_hint(tmp_path: Path) -> None:
    exec_ = {"apiVersion": "client.authentication.k8s.io/v1", "command": "no-such-cloud"}
    error = _refused(config(tmp_path, user={"exec": exec_}), PluginError)
    assert "no-such-cloud" in error.hint
    error = _refused(
        config(tmp_path, user={"exec": exec_ | {"installHint": "get the cloud"}}), PluginError
    )
    assert error.hint == "get the cloud"


@pytest.mark.long
def test_an_exec_plugin_that_hangs_times_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exec_plugin, "TIMEOUT_S", 0.5)
    plugin = Plugin.at(tmp_path / "plugin")
    plugin.hands_out({"token": "late"}, silent_s=60)
    assert "printed nothing for" in str(_refused(config(tmp_path, user=plugin.user()), PluginError))


def test_an_exec_plugin_with_an_old_api_or_a_prompt_is_refused(tmp_path: Path) -> None:
    user = {"exec": {"apiVersion": "client.authentication.k8s.io/v1alpha1", "command": "aws"}}
    assert "v1alpha1" in str(_refused(config(tmp_path, user=user), PluginError))
    asks = Plugin.at(tmp_path / "plugin").user(interactiveMode="Always")
    assert "no terminal" in str(_refused(config(tmp_path, user=asks), PluginError))


# ---- mistakes -------------------------------------------------------------------------------


def test_a_missing_kubeconfig_is_reported_with_a_hint() -> None:
    with pytest.raises(KubeconfigError, match="no kubeconfig") as caught:
        log_in()
    assert "KUBECONFIG" in caught.value.hint
    assert caught.value.exit_code == EXIT_BAD_INPUT


BAD = {
    "no file": None,
    "empty": "",
    "no mapping": "- 1\n",
    "no YAML": "a: [",
    "no text": b"\xff\xfe\x00",
    "no names": "current-context: x\ncontexts: [{}]\nclusters: []\nusers: []\n",
}


@pytest.mark.parametrize("what", BAD)
def test_a_malformed_kubeconfig_is_refused(tmp_path: Path, what: str) -> None:
    file, content = tmp_path / "config", BAD[what]
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    _refused(file, KubeconfigError)


@pytest.mark.parametrize("context", ["absent", "broken", "nobody-here"])
def test_a_context_that_is_missing_or_incomplete_is_refused(tmp_path: Path, context: str) -> None:
    """A missing user is refused too: the `kubernetes` package would continue as anonymous."""
    _refused(config(tmp_path), ContextError, context)


def test_without_a_current_context_the_hint_lists_the_contexts(tmp_path: Path) -> None:
    error = _refused(config(tmp_path, **{"current-context": ""}), ContextError)
    assert "here" in error.hint


HTTPS = {"server": "https://x"}
PARTS: dict[str, tuple[type[AccessError], dict[str, Any]]] = {
    "no server": (KubeconfigError, {"cluster": {"insecure-skip-tls-verify": True}}),
    "another protocol": (KubeconfigError, {"cluster": {"server": "ftp://x"}}),
    "a SOCKS proxy": (KubeconfigError, {"cluster": HTTPS | {"proxy-url": "socks5://x:1"}}),
    "no base64": (CertificateError, {"cluster": HTTPS | {"certificate-authority-data": "%%%"}}),
    "no such file": (KubeconfigError, {"cluster": HTTPS | {"certificate-authority": "/none"}}),
    "no certificate": (
        CertificateError,
        {"cluster": HTTPS | {"certificate-authority-data": "YWJj"}},
    ),
    "half a client": (CertificateError, {"cluster": HTTPS, "user": {"client-key-data": "YWJj"}}),
    "a client of nothing": (
        CertificateError,
        {
            "cluster": HTTPS,
            "user": {"client-certificate-data": "YWJj", "client-key-data": "YWJj"},
        },
    ),
    "a plugin of old": (KubeconfigError, {"user": {"auth-provider": {"name": "gcp"}}}),
}


@pytest.mark.parametrize("what", PARTS)
def test_an_invalid_field_of_a_kubeconfig_raises_the_matching_error(
    tmp_path: Path, what: str
) -> None:
    kind, parts = PARTS[what]
    _refused(config(tmp_path, **parts), kind)


def _refused(file: Path, kind: type[AccessError], context: str | None = None) -> AccessError:
    with pytest.raises(AccessError) as caught:
        log_in(file, context)
    assert type(caught.value) is kind, caught.value
    assert caught.value.hint
    assert "\n" not in caught.value.render().replace("\nhint: ", "")
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return caught.value
