"""How the operator reaches the API server, and what it says when it cannot."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest
import yaml
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_operator.cluster import credentials as module
from paceline_operator.cluster.credentials import Credentials, credentials, from_kubeconfig
from paceline_operator.cluster.tls import Pair, pair_of
from paceline_operator.core.keys import job_keys


@pytest.fixture
def pair() -> Pair:
    return pair_of(job_keys(b"k" * 32, "uid"))


def config(folder: Path, *, cluster: object = None, user: object = None, **more: object) -> Path:
    file = folder / "kubeconfig"
    content = {
        "current-context": "here",
        "contexts": [
            {"name": "there", "context": {"cluster": "none", "user": "none"}},
            {"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "team"}},
        ],
        "clusters": [{"name": "c", "cluster": cluster or {"server": "http://127.0.0.1:1/"}}],
        "users": [{"name": "u", "user": user or {"token": "abc"}}],
    }
    file.write_text(yaml.safe_dump(content | more))
    return file


def pod(folder: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair) -> None:
    """As the kubelet mounts it into the operator's pod."""
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(module, "ACCOUNT", folder)
    (folder / "token").write_text("first\n")
    (folder / "namespace").write_text("paceline\n")
    (folder / "ca.crt").write_text(pair.certificate)


def test_a_kubeconfig_is_read_by_its_current_context(tmp_path: Path) -> None:
    found = credentials(str(config(tmp_path)))
    assert found == Credentials("http://127.0.0.1:1", None, token="abc", namespace="team")
    assert found.headers() == {"Authorization": "Bearer abc"}


def test_the_environment_names_a_kubeconfig(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(config(tmp_path)))
    assert credentials().namespace == "team"


def test_a_client_certificate_needs_no_token(tmp_path: Path, pair: Pair) -> None:
    def coded(text: str) -> str:
        return base64.b64encode(text.encode()).decode()

    cluster = {"server": "https://x", "certificate-authority-data": coded(pair.certificate)}
    user = {
        "client-certificate-data": coded(pair.certificate),
        "client-key-data": coded(pair.private_key),
    }
    found = from_kubeconfig(config(tmp_path, cluster=cluster, user=user))
    assert found.headers() == {}
    assert found.tls is not None
    assert found.tls.check_hostname
    assert list(tmp_path.iterdir()) == [tmp_path / "kubeconfig"], "no key is left on the disk"


def test_a_pod_uses_its_service_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    pod(tmp_path, monkeypatch, pair)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    found = credentials()
    assert found.server == "https://[fd00::1]:6443"
    assert found.namespace == "paceline"
    assert found.headers() == {"Authorization": "Bearer first"}


def test_a_renewed_token_is_used_from_the_next_request_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pair: Pair
) -> None:
    pod(tmp_path, monkeypatch, pair)
    found = credentials()
    (tmp_path / "token").write_text("second\n")
    assert found.headers() == {"Authorization": "Bearer second"}


def test_a_kubeconfig_may_name_files_beside_it(tmp_path: Path, pair: Pair) -> None:
    (tmp_path / "ca.crt").write_text(pair.certificate)
    (tmp_path / "token").write_text("first")
    cluster = {"server": "https://x", "certificate-authority": "ca.crt"}
    found = from_kubeconfig(config(tmp_path, cluster=cluster, user={"tokenFile": "token"}))
    (tmp_path / "token").write_text("second")
    assert found.headers() == {"Authorization": "Bearer second"}


def test_nothing_at_all_is_told_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setattr(module, "ACCOUNT", tmp_path)
    with pytest.raises(PacelineError, match="neither a kubeconfig nor a service account") as told:
        credentials()
    assert "KUBECONFIG" in told.value.hint
    assert told.value.exit_code == EXIT_BAD_INPUT


BAD = {
    "no file": None,
    "empty": "",
    "no mapping": "- 1\n",
    "no YAML": "a: [",
    "no text": b"\xff\xfe\x00",
    "no current context": "contexts: []\nclusters: []\nusers: []\n",
    "unknown context": "current-context: x\ncontexts: []\nclusters: []\nusers: []\n",
}


@pytest.mark.parametrize("what", BAD)
def test_a_wrong_kubeconfig_is_named(tmp_path: Path, what: str) -> None:
    file, content = tmp_path / "kubeconfig", BAD[what]
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    _refused(file)


PARTS = {
    "no server": {"cluster": {"insecure-skip-tls-verify": True}},
    "no base64": {"cluster": {"server": "https://x", "certificate-authority-data": "%%%"}},
    "no certificate": {"cluster": {"server": "https://x", "certificate-authority-data": "YWJj"}},
    "no such file": {"cluster": {"server": "https://x", "certificate-authority": "/none"}},
    "half a client": {
        "cluster": {"server": "https://x"},
        "user": {"client-certificate-data": "YWJj"},
    },
    "a client of nothing": {
        "cluster": {"server": "https://x"},
        "user": {"client-certificate-data": "YWJj", "client-key-data": "YWJj"},
    },
}


@pytest.mark.parametrize("what", PARTS)
def test_wrong_parts_of_a_kubeconfig_are_told_as_such(tmp_path: Path, what: str) -> None:
    _refused(config(tmp_path, **PARTS[what]))


def test_an_exec_plugin_is_refused_by_name(tmp_path: Path) -> None:
    """It would be asked for nothing, and every request refused with 401."""
    told = _refused(config(tmp_path, user={"exec": {"command": "aws"}}))
    assert "exec" in str(told)


def _refused(file: Path) -> PacelineError:
    with pytest.raises(PacelineError, match=str(file)) as told:
        credentials(str(file))
    assert told.value.hint
    assert told.value.exit_code == EXIT_BAD_INPUT
    return told.value
