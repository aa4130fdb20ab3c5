"""The kubectl recipes of docs/kubernetes.md work as written, and owner references are right."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from testing.cluster import programs
from testing.cluster.commands import kubectl
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import ROOT, Running, holds, job, submit, until
from testing.fake_cluster.kstatus import Standing, kstatus
from testing.fake_cluster.stub import Fleet

pytestmark = pytest.mark.processes

DOCS = (ROOT / "docs/kubernetes.md").read_text()
SECTION = DOCS[DOCS.index("## Recipes for kubectl") :].split("\n## ", 1)[0]
RECIPES = [
    line.strip()
    for line in SECTION.splitlines()
    if line.startswith("    ") and not line.strip().startswith("#")
]
END = [line for line in RECIPES if "completionTime" in line or line.startswith("test ")]
MEANWHILE = [line for line in RECIPES if line not in END]
WAIT_S = 120.0


class Shell:
    """A user's shell with kubectl in its PATH and the job's namespace as its default."""

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path) -> None:
        config = folder / "kubeconfig"
        config.write_text(plane.kubeconfig.read_text())
        kubectl(config, "config", "set-context", "--current", f"--namespace={namespace}")
        path = f"{programs.require('kubectl').parent}{os.pathsep}{os.environ['PATH']}"
        self._env = os.environ | {"KUBECONFIG": str(config), "PATH": path, "HOME": str(folder)}

    def starts(self, line: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", line], env=self._env, stdout=subprocess.PIPE, text=True
        )

    def types(self, line: str) -> tuple[int, str]:
        process = self.starts(line)
        output, _ = process.communicate(timeout=WAIT_S)
        return process.returncode, output


@pytest.fixture
def shell(plane: ControlPlane, namespace: str, tmp_path: Path) -> Shell:
    return Shell(plane, namespace, tmp_path)


def test_the_documentation_has_recipes() -> None:
    assert len(END) == 2
    assert len(MEANWHILE) == 5


def test_each_recipe_works_as_documented(
    plane: ControlPlane, namespace: str, running: Running, shell: Shell
) -> None:
    with plane.fake_nodes(2), Fleet(plane, namespace) as fleet:
        submit(plane, namespace, replicas=4, elasticity={"disruptionBudget": True})
        outputs = {}
        for line in MEANWHILE:
            code, outputs[line] = shell.types(line)
            assert code == 0, line
        of = {key: outputs[line] for key in ("-o wide", "range") for line in outputs if key in line}
        assert "STALLED" in of["-o wide"]
        assert "4 ranks in membership" in of["-o wide"]
        assert "Ready: 4 ranks in membership" in of["range"]
        everything = outputs[MEANWHILE[-1]]
        for name in ("pod/digits-0-1", "pod/digits-coordinator-1", "secret/digits-", "disruption"):
            assert name in everything
        waits = shell.starts(END[0])
        assert waits.poll() is None
        fleet.finish()
        waits.communicate(timeout=WAIT_S)
        assert waits.returncode == 0
        assert shell.types(END[1])[0] == 0


@pytest.mark.exhaustive
def test_a_failed_job_ends_the_wait_too(
    plane: ControlPlane, namespace: str, running: Running, shell: Shell
) -> None:
    with plane.fake_nodes(1), Fleet(plane, namespace):
        submit(plane, namespace, activeDeadlineSeconds=1)
        assert shell.types(END[0])[0] == 0
        assert shell.types(END[1])[0] == 1
        assert kstatus(job(plane, namespace)) is Standing.FAILED


def test_a_job_is_in_progress_until_the_operator_has_observed_it(
    plane: ControlPlane, namespace: str
) -> None:
    made = submit(plane, namespace)
    assert made["status"] == {"observedGeneration": -1}
    assert kstatus(job(plane, namespace)) is Standing.IN_PROGRESS


OWNED = (
    *("/api/v1/namespaces/{}/pods", "/api/v1/namespaces/{}/secrets"),
    "/apis/policy/v1/namespaces/{}/poddisruptionbudgets",
)
SHARED = ("/api/v1/namespaces/{}/services", "/api/v1/namespaces/{}/configmaps")


@pytest.mark.exhaustive
def test_owner_references_cover_everything_of_a_job(
    plane: ControlPlane, namespace: str, running: Running
) -> None:
    """The command `kubectl tree` finds objects by these references."""
    with plane.fake_nodes(1), Fleet(plane, namespace):
        submit(plane, namespace, elasticity={"disruptionBudget": True})
        until(lambda: holds(job(plane, namespace), "Ready"), "Ready")
        uid = job(plane, namespace)["metadata"]["uid"]
        by_path = {path: plane.api.items(path.format(namespace)) for path in (*OWNED, *SHARED)}
        owned = {path: [o for o in objects if owner(o) == uid] for path, objects in by_path.items()}
        assert [len(owned[path]) for path in OWNED] == [3, 1, 1]
        assert [len(owned[path]) for path in SHARED] == [0, 0]
        pods, secrets, budgets = (by_path[path] for path in OWNED)
        assert len(pods) == 3
        assert [o["metadata"]["name"] for o in secrets if owner(o) != uid] == [
            "paceline-operator-key"
        ]
        assert len(budgets) == 1
        names = {o["metadata"]["name"] for path in SHARED for o in by_path[path]}
        assert names == {"paceline-jobs", "kube-root-ca.crt"}


def owner(body: dict[str, Any]) -> str:
    """Return the uid of the controlling owner, or an empty string."""
    references = body["metadata"].get("ownerReferences", [])
    return next((r["uid"] for r in references if r.get("controller")), "")
