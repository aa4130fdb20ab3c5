"""The verbs of the CLI on real pods, for a user with the built-in role `edit`.

The suite is the one for runs on a single machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from paceline.jobs import places

from testing.jobs import conformance
from testing.jobs.terminal import Terminal
from tests.nodes.jobs import Job, NewJob, on_these_nodes
from tests.nodes.platform import Platform

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]

BINDINGS = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings"


def kubeconfig_of(platform: Platform, job: Job, user: str, role: str) -> Path:
    """Return the kubeconfig of a user with a role in the job's namespace."""
    group = "rbac.authorization.k8s.io"
    platform.api.create(
        BINDINGS.format(job.namespace),
        {
            "metadata": {"name": user},
            "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
            "subjects": [{"apiGroup": group, "kind": "User", "name": user}],
        },
    )
    own = platform.cluster.control_plane.kubeconfig_of(user)
    config = yaml.safe_load(own.read_text())
    config["contexts"][0]["context"]["namespace"] = job.namespace
    path = job.folder / f"{user}.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def terminal_of(kubeconfig: Path) -> Terminal:
    folder = kubeconfig.parent
    own = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": "", "HOME": str(folder)}
    return Terminal(folder, os.environ | own | {"KUBECONFIG": str(kubeconfig)})


class OnNodes(conformance.Place):
    start: ClassVar = ("submit",)
    formed: ClassVar = "RingFormed"

    def __init__(self, platform: Platform, job: Job) -> None:
        super().__init__(job.folder)
        self._job = job
        kubeconfig = kubeconfig_of(platform, job, "dev", "edit")
        self.jobs = places.cluster(kubeconfig)
        self.terminal = terminal_of(kubeconfig)

    def manifest(self, **spec: Any) -> dict[str, Any]:
        manifest = super().manifest(**spec)
        (container,) = manifest["spec"]["template"]["spec"]["containers"]
        container["workingDir"] = str(self.folder)
        return on_these_nodes(manifest, self.folder)

    def kill(self, rank: int) -> None:
        pods = [pod["metadata"]["name"] for pod in self._job.workers()]
        victim = next(name for name in pods if name.startswith(f"{conformance.NAME}-{rank}-"))
        self._job.kubectl("delete", "pod", victim, "--grace-period=0", "--force")

    def left(self) -> object:
        return [pod["metadata"]["name"] for pod in self._job.pods() + self._job.pods("coordinator")]


@pytest.fixture
def place(platform: Platform, new_job: NewJob) -> Iterator[OnNodes]:
    made = OnNodes(platform, new_job(conformance.NAME))
    yield made
    made.terminal.close()


@pytest.mark.parametrize("check", conformance.CHECKS, ids=lambda check: check.__name__)
def test_the_verbs_conform_on_real_pods(
    place: OnNodes, check: Callable[[conformance.Place], None]
) -> None:
    check(place)


def test_the_view_role_reads_jobs_and_changes_nothing(platform: Platform, new_job: NewJob) -> None:
    """The role `view` shows jobs and logs, changes nothing and contacts no pod."""
    job = new_job()
    job.apply(1, long=True)
    say = terminal_of(kubeconfig_of(platform, job, "guest", "view"))
    job.wait_trains(1)
    assert "job" in say.call("status", "job")
    assert "JOB" in say.call("status", "-n", job.namespace)
    say.call("logs", "job", "--tail", "1")
    say.call("events", "job")
    changes = (["scale", "job", "--replicas", "2"], ["suspend", "job"], ["delete", "job"])
    for words in (*changes, ["report", "job"]):
        output = say.call(*words, code=2)
        assert 'User "guest" cannot' in output
        assert "role `edit`" in output
    job.finish()
