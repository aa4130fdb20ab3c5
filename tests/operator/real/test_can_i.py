"""Permissions of operator, worker and tenant: `kubectl auth can-i --list` in golden files.

Permissions that everybody has in that cluster are left out, and so are those of a tenant before
Paceline is installed: both depend on the release of Kubernetes.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from testing.cluster.commands import CommandError, helm, kubectl
from testing.cluster.control_plane import ControlPlane
from testing.fake_cluster.beside import ROOT, until
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

GOLDEN = Path(__file__).parent.parent / "golden" / "can-i"
CHART = ROOT / "charts/paceline"
TENANT = "a-tenant"


@pytest.fixture
def elsewhere(plane: ControlPlane) -> Iterator[str]:
    with plane.namespace("elsewhere") as name:
        yield name


@pytest.fixture(params=exhaustive_except([True], [True, False]), ids=["cluster-wide", "namespaced"])
def wide(plane: ControlPlane, namespace: str, request: pytest.FixtureRequest) -> Iterator[bool]:
    """Install the chart in `namespace`, where the tenant has the role `edit`."""
    words = ["create", "rolebinding", "tenant", "--clusterrole=edit", f"--user={TENANT}"]
    kubectl(plane.kubeconfig, *words, "-n", namespace)
    clusterwide = str(request.param).lower()
    words = ["install", "paceline", str(CHART), f"--set=scope.clusterWide={clusterwide}"]
    helm(plane.kubeconfig, *words, "-n", namespace)
    try:
        yield bool(request.param)
    finally:
        helm(plane.kubeconfig, "uninstall", "paceline", "-n", namespace)


def rights(plane: ControlPlane, where: str, user: str, *groups: str) -> set[str]:
    """Return the rows of the table, each with single spaces."""
    words = ["auth", "can-i", "--list", "--no-headers", "-n", where, f"--as={user}"]
    words += [f"--as-group={group}" for group in (*groups, "system:authenticated")]
    text = kubectl(plane.kubeconfig, *words)
    return {" ".join(line.split()) for line in text.splitlines() if line.strip()}


def own(plane: ControlPlane, where: str, user: str, *groups: str) -> set[str]:
    """Return the rows without the permissions that every user has."""
    return rights(plane, where, user, *groups) - rights(plane, where, "nobody-in-particular")


def account(plane: ControlPlane, where: str, namespace: str, name: str) -> set[str]:
    user = f"system:serviceaccount:{namespace}:{name}"
    groups = ("system:serviceaccounts", f"system:serviceaccounts:{namespace}")
    return own(plane, where, user, *groups)


def compared(name: str, rows: set[str]) -> None:
    """Compare with the golden file; to accept a change, delete it, run again and read the diff."""
    file = GOLDEN / f"{name}.txt"
    text = "\n".join(sorted(rows) or ["(nothing)"]) + "\n"
    if not file.exists():
        GOLDEN.mkdir(exist_ok=True)
        file.write_text(text)
        pytest.fail(f"{file.name} was missing and has been written; read it and run again")
    assert text == file.read_text()


@pytest.mark.parametrize("place", ["own", "other"])
def test_operator_permissions_match_the_golden_file(
    plane: ControlPlane, namespace: str, elsewhere: str, *, wide: bool, place: str
) -> None:
    where = namespace if place == "own" else elsewhere
    until(lambda: account(plane, namespace, namespace, "paceline-operator"), "its roles", 30)
    rows = account(plane, where, namespace, "paceline-operator")
    install = "cluster-wide" if wide else "namespaced"
    compared(f"operator-{install}-{place}-namespace", rows)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("wide")
def test_worker_permissions_match_the_golden_file(plane: ControlPlane, namespace: str) -> None:
    """A worker's pod has the namespace's default account, and not even its token."""
    compared("worker", account(plane, namespace, namespace, "default"))


def test_tenant_permissions_match_the_golden_file(
    plane: ControlPlane, namespace: str, *, wide: bool
) -> None:
    def may_create() -> bool:
        words = ["auth", "can-i", "create", "trainingjobs.paceline.dev", "-n", namespace]
        try:
            kubectl(plane.kubeconfig, *words, f"--as={TENANT}")
        except CommandError:
            return False
        return True

    if wide:
        until(may_create, "the role edit is extended", 60)
    # The cluster's own rows of `edit` name no kind of Paceline.
    rows = {row for row in own(plane, namespace, TENANT) if "paceline.dev" in row}
    compared(f"tenant-{'cluster-wide' if wide else 'namespaced'}", rows)
