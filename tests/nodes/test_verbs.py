"""From an empty namespace with the command line alone, as an ordinary user: whoever is bound to the
built-in role `edit`. The script of tests/cli/test_verbs_here.py for real pods."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import yaml
from nodes.jobs import CHANGE_S, START_S, Job, NewJob, on_these_nodes
from nodes.platform import Platform

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]

PACELINE = Path(sys.executable).parent / "paceline"
LIMIT_S = 300.0
BINDINGS = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/rolebindings"
SCRIPT = """\
import os
import time
import paceline as pl
import torch

torch.set_num_threads(1)
pl.init()
model = torch.nn.Linear(2, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
loader = pl.DataLoader(torch.utils.data.TensorDataset(torch.randn(2048, 2)), batch_size=4)
steps = 0
for epoch in loader.epochs(8):
    for (x,) in loader:
        time.sleep(0.3 if os.path.exists("brake") else 0.0)
        model(x).square().mean().backward()
        optimizer.step()
        steps += 1
        if steps % 5 == 0:
            print(f"step {steps}", flush=True)
"""


class User:
    """Somebody with a role in the job's namespace, at a terminal."""

    def __init__(self, platform: Platform, job: Job, name: str, role: str) -> None:
        self.folder, self.namespace = job.folder, job.namespace
        group = "rbac.authorization.k8s.io"
        platform.api.create(
            BINDINGS.format(job.namespace),
            {
                "metadata": {"name": name},
                "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": role},
                "subjects": [{"apiGroup": group, "kind": "User", "name": name}],
            },
        )
        self.env = os.environ | {"XDG_RUNTIME_DIR": str(job.folder), "HOME": str(job.folder)}
        own = platform.cluster.control_plane.kubeconfig_of(name)
        config = yaml.safe_load(own.read_text())
        config["contexts"][0]["context"]["namespace"] = job.namespace
        self.kubeconfig = job.folder / f"{name}.kubeconfig"
        self.kubeconfig.write_text(yaml.safe_dump(config))
        self.env["KUBECONFIG"] = str(self.kubeconfig)

    def start(self, *words: str) -> Followed:
        return Followed([str(PACELINE), *words], self)

    def call(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [PACELINE, *words], cwd=self.folder, env=self.env, text=True, timeout=LIMIT_S,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
        )  # fmt: skip
        assert done.returncode == code, (words, done)
        assert "Traceback" not in done.stdout
        return done.stdout


class Followed:
    """A command that goes on, read while it does."""

    def __init__(self, command: list[str], user: User) -> None:
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command, cwd=user.folder, env=user.env, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as said:
            self.lines.extend(line.rstrip("\n") for line in said)

    def of(self, rank: int) -> list[str]:
        return [line for line in list(self.lines) if f"rank {rank} |" in line]

    def end(self) -> int:
        code = self.process.wait(LIMIT_S)
        self._thread.join(LIMIT_S)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.end()


@pytest.fixture
def started() -> Iterator[Callable[..., Followed]]:
    """Starts commands that end with the test."""
    found: list[Followed] = []

    def start(user: User, *words: str) -> Followed:
        found.append(user.start(*words))
        return found[-1]

    yield start
    for one in found:
        one.close()


def test_from_an_empty_namespace(
    platform: Platform, new_job: NewJob, started: Callable[..., Followed]
) -> None:
    job = new_job("verbs")
    user = User(platform, job, "dev", "edit")
    (job.folder / "train.py").write_text(SCRIPT)
    job.brake.touch()
    container = {"name": "trainer", "command": ["python", "train.py"]}
    container["workingDir"] = str(job.folder)
    manifest = {
        "apiVersion": "paceline.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"name": "verbs"},
        "spec": {
            "replicas": 2,
            "collective": {"mode": "Full"},
            "elasticity": {"nodeLostSeconds": 10, "settleSeconds": 60},
            "template": {"spec": {"containers": [container]}},
        },
    }
    text = yaml.safe_dump(on_these_nodes(manifest, job.folder))
    (job.folder / "job.yaml").write_text(text)

    said = user.call("submit", "job.yaml")
    assert said.startswith(f"job verbs is submitted to namespace {job.namespace} of https://")
    assert "already a job verbs" in user.call("submit", "job.yaml", code=2)
    watched = started(user, "status", "verbs", "--watch")
    timeout = f"{START_S:g}s"
    assert "Training" in user.call("wait", "verbs", "--for", "training", "--timeout", timeout)
    assert "active" in user.call("status", "verbs")
    assert "nothing holds it up" in user.call("explain", "verbs")

    followed = started(user, "logs", "verbs", "-f", "--timestamps")
    job.until(lambda: followed.of(0) and followed.of(1), CHANGE_S, "lines of both ranks")
    heard = len(followed.of(1))
    job.kubectl("delete", "pod", "verbs-1-1", "--grace-period=0", "--force")
    user.call("wait", "verbs", "--for", "training", "--timeout", timeout)
    job.until(lambda: len(followed.of(1)) > heard + 2, CHANGE_S, "the replacement is heard")

    assert "2 -> 3 replicas" in user.call("scale", "verbs", "--replicas", "3")
    job.until(lambda: followed.of(2), START_S, "the new rank is heard")
    user.call("wait", "verbs", "--for", "training", "--timeout", timeout)
    wide = user.call("status", "verbs", "-o", "wide")
    assert "node1" in wide or "node2" in wide
    assert json.loads(user.call("status", "verbs", "-o", "json"))["ready"] == 3

    assert "is being suspended" in user.call("suspend", "verbs")
    user.call("wait", "verbs", "--for", "suspended", "--timeout", timeout)
    assert "resume" in user.call("explain", "verbs")
    assert "is resumed" in user.call("resume", "verbs")
    user.call("wait", "verbs", "--for", "training", "--timeout", timeout)

    job.brake.unlink()
    assert "Complete" in user.call("wait", "verbs", "--timeout", timeout)
    assert followed.end() == 0, "logs -f ends with the job"
    assert watched.end() == 0, "status --watch too"
    assert watched.lines[-1].startswith("Complete")
    ranks = [line for line in followed.lines if " rank " in line]
    times = [line.partition(" ")[0] for line in ranks]
    late = sum(a > b for a, b in pairwise(times))
    # The two nodes have one clock; what is later than the hold of half a second is rare.
    assert late <= len(times) // 50, f"{late} of {len(times)} lines are out of order"

    listed = user.call("logs", "verbs").splitlines()
    assert {line.partition(" |")[0] for line in listed} >= {"rank 0", "rank 1", "rank 2"}
    events = user.call("events", "verbs", "-o", "wide")
    assert "RingFormed" in events
    assert "JobFinished" in events
    assert "It is complete" in user.call("explain", "verbs")

    said = user.call("delete", "verbs")
    assert f"job verbs of namespace {job.namespace} of https://" in said
    assert not [pod for pod in job.pods() if pod["metadata"]["ownerReferences"]]
    assert "there is no job verbs" in user.call("status", "verbs", code=2)


def test_who_may_only_look(platform: Platform, new_job: NewJob) -> None:
    """`view` sees jobs and logs, and changes nothing."""
    job = new_job()
    job.apply(1)
    user = User(platform, job, "guest", "view")
    job.wait_trains(1)
    assert "job" in user.call("status", "job")
    assert "JOB" in user.call("status", "-n", job.namespace)
    user.call("logs", "job", "--tail", "1")
    user.call("events", "job")
    for words in (["scale", "job", "--replicas", "2"], ["suspend", "job"], ["delete", "job"]):
        said = user.call(*words, code=2)
        assert 'User "guest" cannot' in said
        assert "role `edit`" in said
    job.finish()
