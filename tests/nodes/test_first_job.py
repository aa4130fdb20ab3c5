"""The first job on a cluster, from installation to its end, as docs/kubernetes.md describes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.nodes.jobs import START_S, NewJob, on_these_nodes
from tests.nodes.platform import CHECKOUT, SYSTEM, Platform

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes, pytest.mark.timeout(900)]
DIGITS = CHECKOUT / "examples" / "digits"
ACCURACY = 0.96
"""The least accuracy: a synchronous run reaches 0.98, and the order of rounds changes about 0.02.
"""


def test_digits_trains_on_both_nodes(platform: Platform, new_job: NewJob) -> None:
    """The manifest is the file that `paceline run` takes, with another image and location."""
    manifest = yaml.safe_load((DIGITS / "job.yaml").read_text())
    manifest = on_these_nodes(manifest)
    manifest["spec"]["template"]["spec"]["containers"][0]["workingDir"] = str(DIGITS)
    job = new_job("digits")
    job.apply_file(manifest)
    output = job.kubectl(
        "wait", "--for=condition=Complete", "trainingjob/digits", f"--timeout={int(START_S)}s",
        timeout_s=START_S + 10,
    )  # fmt: skip
    assert "condition met" in output
    assert {pod["spec"]["nodeName"] for pod in job.pods()} == {"node1", "node2"}
    logs = [job.kubectl("logs", pod["metadata"]["name"]) for pod in job.pods()]
    (accuracy,) = re.findall(r"final accuracy ([0-9.]+)", "\n".join(logs))
    assert float(accuracy) >= ACCURACY
    assert job.watcher.ledger["epochs_exact"] == 30, job.watcher.last
    assert not job.watcher.ledger["samples_dropped"]
    described = job.kubectl("describe", "tj", "digits")
    assert "RingFormed" in described
    assert "JobFinished" in described
    row = job.kubectl("get", "tj").splitlines()[1].split()
    assert row[0] == "digits"
    assert "Complete" in row


def test_pods_have_no_rights_and_move_data_over_mpi(platform: Platform, new_job: NewJob) -> None:
    """Pods mount no token and do not run as root, and the operator's key is in its own namespace.

    Data moves over TCP between two nodes. With `backend: auto` a measurement would choose instead.
    """
    job = new_job()
    job.apply(2, collective={"mode": "Full", "maxAge": 0, "backend": "mpi"})
    job.wait_trains(2)
    for pod in job.workers():
        page = job.api.text(f"{job.pods_path}/{pod['metadata']['name']}:9464/proxy/metrics")
        lines = [line for line in page.splitlines() if "transport_selected_info{" in line]
        assert lines, page
        assert all('transport="mpi"' in line for line in lines), lines
    coordinator = job.coordinator()
    assert coordinator is not None
    for pod in (job.workers()[0], coordinator):
        name = pod["metadata"]["name"]
        folder = "/var/run/secrets/kubernetes.io"
        who = job.kubectl("exec", name, "--", "sh", "-c", f"id -u; ls {folder} 2>&1 || true")
        assert who.splitlines()[0] == "65532"
        assert "No such file" in who
    secrets = platform.api.items(f"/api/v1/namespaces/{SYSTEM}/secrets")
    assert "paceline-operator-key" in {secret["metadata"]["name"] for secret in secrets}
    job.finish()


def test_the_example_has_a_relative_working_directory() -> None:
    """A user of a cluster changes only the image in the file."""
    manifest = yaml.safe_load((DIGITS / "job.yaml").read_text())
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert not Path(container["workingDir"]).is_absolute()
