"""The operator with an exec plugin on a real API server: tokens expire, and jobs continue."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import yaml

from testing.access_plugin import Plugin
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import Running, change, holds, job, living, submit, until
from testing.fake_cluster.stub import Fleet

pytestmark = pytest.mark.processes


class Desk:
    """Issues tokens of a service account, each of which can be revoked."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane, self.namespace, self._names = plane, namespace, count(1)
        self.account = f"/api/v1/namespaces/{namespace}/serviceaccounts/default"
        plane.api.create(
            "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
            {
                "metadata": {"name": f"login-{namespace}"},
                "roleRef": {
                    "apiGroup": "rbac.authorization.k8s.io",
                    "kind": "ClusterRole",
                    "name": "cluster-admin",
                },
                "subjects": [{"kind": "ServiceAccount", "name": "default", "namespace": namespace}],
            },
        )

    def token(self) -> tuple[str, str]:
        """Return a new token, and the path of the Secret that it is bound to."""
        secrets = f"/api/v1/namespaces/{self.namespace}/secrets"
        name = f"bound-{next(self._names)}"
        secret = self.plane.api.create(secrets, {"metadata": {"name": name}})
        bound = {"apiVersion": "v1", "kind": "Secret", "name": name}
        bound["uid"] = secret["metadata"]["uid"]
        answer = self.plane.api.create(f"{self.account}/token", {"spec": {"boundObjectRef": bound}})
        return answer["status"]["token"], f"{secrets}/{name}"

    def close(self) -> None:
        bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
        self.plane.api.delete(f"{bindings}/login-{self.namespace}")


@pytest.fixture
def desk(plane: ControlPlane, namespace: str) -> Iterator[Desk]:
    desk = Desk(plane, namespace)
    yield desk
    desk.close()


@pytest.fixture
def operator(plane: ControlPlane, namespace: str, tmp_path: Path) -> Iterator[Running]:
    running = Running(plane, namespace, tmp_path / "operator.log")
    yield running
    running.end()


def kubeconfig(plane: ControlPlane, plugin: Plugin, folder: Path) -> Path:
    config = yaml.safe_load(plane.kubeconfig_of("anybody").read_text())
    config["users"][0]["user"] = plugin.user(interactiveMode="Never")
    file = folder / "kubeconfig"
    file.write_text(yaml.safe_dump(config))
    return file


def ready(plane: ControlPlane, namespace: str) -> str:
    return str(job(plane, namespace).get("status", {}).get("ready", ""))


@pytest.mark.exhaustive
def test_expiring_tokens_do_not_disturb_a_job(
    plane: ControlPlane, namespace: str, desk: Desk, operator: Running, tmp_path: Path
) -> None:
    plugin = Plugin.at(tmp_path / "plugin")
    first, first_secret = desk.token()
    plugin.hands_out({"token": first}, life_s=20)
    with plane.fake_nodes(3), Fleet(plane, namespace) as fleet:
        operator.started("--lease-duration=60", kubeconfig=kubeconfig(plane, plugin, tmp_path))
        submit(plane, namespace, replicas=2)
        until(lambda: ready(plane, namespace) == "2/2", "2/2")
        before = living(plane, namespace)

        # A token with an expiry is renewed before it expires.
        second, second_secret = desk.token()
        plugin.hands_out({"token": second})
        given = len(plugin.asked)
        until(lambda: len(plugin.asked) > given, "a renewal before the end", 40)
        plane.api.delete(first_secret)
        change(plane, namespace, replicas=3)
        until(lambda: ready(plane, namespace) == "3/3", "3/3")

        # A token that is revoked without notice is renewed after a 401, once for all requests.
        third, _ = desk.token()
        plugin.hands_out({"token": third})
        plane.api.delete(second_secret)
        until(lambda: len(plugin.asked) > given + 1, "a renewal after a 401", 60)
        change(plane, namespace, replicas=4)
        until(lambda: ready(plane, namespace) == "4/4", "4/4")
        assert set(before) <= set(living(plane, namespace)), "a pod was replaced"
        fleet.finish()
        until(lambda: holds(job(plane, namespace), "Complete"), "Complete")
        assert fleet.wrong == []
    assert len(plugin.asked) == given + 2, "each token was asked for once"
    assert operator.process is not None
    assert operator.process.poll() is None, "the operator has ended"
    assert operator.log.read_text().count("acting for") == 1
    for token in (first, second, third):
        assert token not in operator.log.read_text()


@pytest.mark.exhaustive
def test_a_wrong_token_gives_one_error_and_one_hint(
    plane: ControlPlane, operator: Running, tmp_path: Path
) -> None:
    plugin = Plugin.at(tmp_path / "plugin")
    plugin.hands_out({"token": "nobody"})
    operator.start(kubeconfig=kubeconfig(plane, plugin, tmp_path))
    assert operator.process is not None
    assert operator.process.wait(30) == 2
    log = operator.log.read_text()
    error, hint = log.splitlines()
    assert error.startswith(f"error: the API server {plane.url} does not accept the login of")
    assert hint.startswith("hint: log in again")
    assert "nobody" not in log
    assert len(plugin.asked) <= 2


def test_a_failing_plugin_is_quoted_in_the_error(
    plane: ControlPlane, operator: Running, tmp_path: Path
) -> None:
    plugin = Plugin.at(tmp_path / "plugin")
    plugin.hands_out({}, code=3, said="your session is over: run `cloud login`")
    operator.start(kubeconfig=kubeconfig(plane, plugin, tmp_path))
    assert operator.process is not None
    assert operator.process.wait(30) == 2
    error, hint = operator.log.read_text().splitlines()
    assert "failed with exit code 3, saying: your session is over: run `cloud login`" in error
    assert hint.startswith("hint: log in again")
