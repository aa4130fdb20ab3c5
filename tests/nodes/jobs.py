"""A TrainingJob of a test: its manifest, its state in Kubernetes, and the check of its end.

The script is the one of the single-machine histories (testing/processes/history_script.py). Every
sample leaves a trace in the weights, so a sample that is applied twice or not at all shows at the
end. Ranks run slowly while the file `brake` exists, so that a test is never too late with its
disturbance.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from testing.cluster.api import ApiError, Json
from testing.cluster.host_python import CHECKOUT, PYTHON, mounted_folders
from tests.nodes.platform import WORKER_IMAGE, Platform
from tests.nodes.watching import Watcher

KIND = "/apis/paceline.dev/v1alpha1"
SCRIPT = CHECKOUT / "testing" / "processes" / "history_script.py"
START_S = 180.0
END_S = 120.0
CHANGE_S = 90.0
LEAVE_S = 180.0
"""How long ranks may take to leave; less than drainGraceSeconds plus the operator's margin."""
PROGRESS_S = 60.0
SAMPLES, BATCH = 240, 4
EPOCHS, STEP_MS = 12, 150.0
"""With the brake on, two ranks keep this pace for a minute; in the last epoch they are slower."""
LONG_EPOCHS, LONG_MS = 20, 400.0
"""The values for `long=True`, with which a job runs for four and a half minutes."""
NewJob = Callable[..., "Job"]
"""The type of the fixture that creates the handle of a job in the test's namespace."""


class Job:
    def __init__(self, platform: Platform, namespace: str, name: str, folder: Path) -> None:
        self.platform, self.api = platform, platform.api
        self.namespace, self.name, self.folder = namespace, name, folder
        self.epochs = EPOCHS
        self.path = f"{KIND}/namespaces/{namespace}/trainingjobs/{name}"
        self.pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self.brake = folder / "brake"
        self.watcher = Watcher(self)

    # ---- user actions ---------------------------------------------------------------------------

    def apply(
        self,
        replicas: int,
        *,
        epochs: int = EPOCHS,
        long: bool = False,
        slow_ms: Mapping[str, float] | None = None,
        change: Callable[[Json], object] = lambda _: None,
        **spec: Any,
    ) -> None:
        """Create the job; `change` edits the spec of its pods first."""
        self.epochs = LONG_EPOCHS if long else epochs
        self.brake.touch()
        config: Json = {"seed": 1, "samples": SAMPLES, "batch": BATCH, "accumulate": 1}
        config |= {
            "epochs": self.epochs,
            "ballast": 1000,
            "pieces": 1,
            "step_ms": LONG_MS if long else STEP_MS,
            "slow_ms": dict(slow_ms or {}),
        }
        config |= {
            "dies": {},
            "hangs": {},
            "linger_ms": 0,
            "rounds": SAMPLES // BATCH // replicas,
            "writes_bytes": 0,
            "two_levels": False,
        }
        container = {
            "name": "trainer",
            "command": ["python", str(SCRIPT)],
            "workingDir": str(self.folder),
            "env": [
                {"name": "HISTORY", "value": json.dumps(config)},
                {"name": "PYTHONPATH", "value": str(CHECKOUT)},
            ],
        }
        manifest: Json = {
            "apiVersion": "paceline.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": self.name},
            "spec": {
                "replicas": replicas,
                "minReplicas": 1,
                "maxReplicas": 6,
                "collective": {"mode": "Full", "maxAge": 0},
                "elasticity": {"nodeLostSeconds": 10, "settleSeconds": 60},
                "template": {"spec": {"containers": [container]}},
                **spec,
            },
        }
        manifest = on_these_nodes(manifest, self.folder)
        change(manifest["spec"]["template"]["spec"])
        self.apply_file(manifest)

    def apply_file(self, manifest: Json) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))
        self.watcher.start()

    def kubectl(self, *words: str, stdin: str = "", timeout_s: float = 120.0) -> str:
        return self.platform.kubectl("-n", self.namespace, *words, stdin=stdin, timeout_s=timeout_s)

    def patch(self, spec: Json) -> None:
        self.api.patch(self.path, {"spec": spec})

    # ---- state in Kubernetes --------------------------------------------------------------------

    def get(self) -> Json:
        return self.api.get(self.path)

    def pods(self, role: str = "worker") -> list[Json]:
        """Return all pods by slot and attempt, including ended and terminating ones."""
        labels = f"paceline.dev/job-name={self.name},paceline.dev/role={role}"
        pods = self.api.items(self.pods_path, labels=labels)
        return sorted(pods, key=lambda pod: place_of(pod))

    def workers(self) -> list[Json]:
        """Return the worker pods that are neither ended nor terminating."""
        return [pod for pod in self.pods() if is_active(pod)]

    def coordinator(self) -> Json | None:
        """Return the newest active coordinator pod, if there is one."""
        pods = [pod for pod in self.pods("coordinator") if is_active(pod)]
        return pods[-1] if pods else None

    def events(self) -> list[tuple[str, str]]:
        """Return (reason, message) of each Event of the job, the oldest first."""
        events = [
            event
            for event in self.api.items(f"/api/v1/namespaces/{self.namespace}/events")
            if event["involvedObject"].get("uid") == self.uid
        ]
        events.sort(key=lambda event: str(event["metadata"]["creationTimestamp"]))
        return [(event["reason"], event["message"]) for event in events]

    @property
    def uid(self) -> str:
        return str(self.get()["metadata"]["uid"])

    def condition(self, kind: str) -> Json:
        conditions = self.get().get("status", {}).get("conditions", ())
        return next((c for c in conditions if c["type"] == kind), {})

    def log(self, pod: str) -> str:
        return self.api.text(f"{self.pods_path}/{pod}/log")

    # ---- waiting --------------------------------------------------------------------------------

    def wait(self, ready: Callable[[Json], bool], timeout_s: float, what: str) -> Json:
        return self.api.wait(self.path, ready, timeout_s, what)

    def wait_trains(self, ranks: int, *, timeout_s: float = START_S) -> None:
        """Wait until exactly `ranks` replicas train, and five more rounds are committed."""
        self.wait(
            lambda job: (
                job.get("status", {}).get("readyReplicas") == ranks
                and job["status"].get("replicas") == ranks
            ),
            timeout_s,
            f"training with {ranks}",
        )
        self.wait_rounds(5)

    def wait_rounds(self, more: int, *, timeout_s: float = PROGRESS_S) -> None:
        first = self.watcher.version
        self.until(lambda: self.watcher.version >= first + more, timeout_s, f"{more} more rounds")

    def wait_condition(self, kind: str, timeout_s: float, reason: str = "") -> Json:
        def holds(job: Json) -> bool:
            return any(
                c["type"] == kind and c["status"] == "True" and reason in ("", c["reason"])
                for c in job.get("status", {}).get("conditions", ())
            )

        self.wait(holds, timeout_s, f"{kind} {reason}")
        return self.condition(kind)

    def wait_event(self, reason: str, timeout_s: float = CHANGE_S) -> str:
        def exists() -> bool:
            return any(one == reason for one, _ in self.events())

        self.until(exists, timeout_s, f"told of {reason}")
        return next(message for one, message in self.events() if one == reason)

    def until(self, true: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            assert time.monotonic() < deadline, f"{self.name}: not {what} within {timeout_s} s"
            time.sleep(0.1)

    # ---- the end --------------------------------------------------------------------------------

    def finish(self, *, publisher_stays: bool = True, nodes_in_touch: bool = True) -> None:
        """Let the job run to its end, and check that every sample counts exactly once per epoch.

        Args:
            publisher_stays: False if the pod that prints the count of each sample may be gone.
            nodes_in_touch: False if a node may report late that a pod has ended.
        """
        self.brake.unlink(missing_ok=True)
        self.wait_condition("Complete", END_S)
        if nodes_in_touch:
            # Ranks must leave on their own: the operator deletes the others, with their logs.
            self.until(lambda: not self.workers(), LEAVE_S, "left by its ranks")
        else:
            # The job is Complete before its scripts have printed their results.
            count = len(self.pods())
            self.until(lambda: len(self.results()) == count, LEAVE_S, f"{count} results")
        self.check_weights(publisher_stays=publisher_stays)

    def check_weights(self, *, publisher_stays: bool = True) -> None:
        """Check the printed results and the ledger of samples.

        Args:
            publisher_stays: False if the pod that prints the count of each sample may be gone.
        """
        results = self.results()
        assert results, "no pod has printed a result"
        assert len({result["hash"] for result in results}) == 1, f"the ranks differ: {results}"
        assert all(r["ballast"] == [SAMPLES * self.epochs] * 2 for r in results), results
        counts = [result["seen"] for result in results if result["seen"] is not None]
        assert len(counts) == 1 or not publisher_stays, results
        for samples in counts:
            assert set(samples) == {self.epochs}, f"samples lost or doubled: {Counter(samples)}"
        ledger = self.watcher.ledger
        assert ledger["epochs_exact"] == self.epochs, ledger
        assert not ledger["samples_dropped"], ledger

    def results(self) -> list[Json]:
        """Return what the ranks that reached the end have printed."""
        started = [pod for pod in self.pods() if pod["status"]["phase"] != "Pending"]
        logs = []
        for pod in started:
            try:
                logs.append(self.log(pod["metadata"]["name"]))
            except ApiError:
                # A pod that was lost with its node may have no log.
                assert "deletionTimestamp" in pod["metadata"], pod
        lines = [line for log in logs for line in log.splitlines() if "RESULT " in line]
        return [json.loads(line.partition("RESULT ")[2]) for line in lines]

    def story(self) -> str:
        """Return everything that helps to understand a failure."""
        parts = [f"==== {self.namespace}/{self.name}"]
        with suppress(ApiError, OSError):
            job = self.get()
            parts.append(json.dumps(job.get("status"), indent=1))
            parts += [f"event {reason}: {text}" for reason, text in self.events()]
            # Show who evicted, killed or deleted a pod, and which node was out of touch.
            for event in self.api.items(f"/api/v1/namespaces/{self.namespace}/events"):
                if event["involvedObject"]["kind"] == "Pod":
                    about, when = event["involvedObject"]["name"], event.get("lastTimestamp")
                    parts.append(f"{when} pod {about}: {event['reason']}: {event['message']}")
            for node in self.api.items("/api/v1/nodes"):
                ready = [c for c in node["status"]["conditions"] if c["type"] == "Ready"]
                taints = node["spec"].get("taints", [])
                parts.append(f"node {node['metadata']['name']}: {ready}, taints {taints}")
            for pod in [*self.pods("coordinator"), *self.pods()]:
                name, status = pod["metadata"]["name"], pod["status"]
                node = pod["spec"].get("nodeName", "nowhere")
                parts.append(f"---- {name} on {node}: {status['phase']} {status.get('reason', '')}")
                with suppress(ApiError):
                    parts.append(self.log(name)[-3000:])
        parts += ["---- last heard of its coordinator", json.dumps(self.watcher.last)[:3000]]
        return "\n".join(parts)


def on_these_nodes(manifest: Json, folder: Path | None = None) -> Json:
    """Return the manifest with the image, mounts and search path of the test run's Python."""
    manifest = json.loads(json.dumps(manifest))
    pod = manifest["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container |= {"image": WORKER_IMAGE, "imagePullPolicy": "Never"}
    path = f"{Path(PYTHON).parent}:/usr/bin:/bin"
    container["env"] = [{"name": "PATH", "value": path}, *container.get("env", ())]
    # Reserve a share of the CPU that other processes of this machine cannot take.
    container["resources"] = {"requests": {"cpu": "300m"}}
    folders = [*mounted_folders(), *([folder] if folder else [])]
    pod["volumes"] = [
        {"name": f"host-{number}", "hostPath": {"path": str(path), "type": "Directory"}}
        for number, path in enumerate(folders)
    ]
    container["volumeMounts"] = [
        {"name": f"host-{number}", "mountPath": str(path), "readOnly": True}
        for number, path in enumerate(folders)
    ]
    return manifest


def place_of(pod: Json) -> tuple[int, int]:
    labels: Json = pod["metadata"]["labels"]
    return int(labels.get("paceline.dev/slot", 0)), int(labels["paceline.dev/attempt"])


def is_active(pod: Json) -> bool:
    ended = pod["status"]["phase"] in ("Succeeded", "Failed")
    return not ended and "deletionTimestamp" not in pod["metadata"]


def containers(pods: list[Json]) -> dict[str, tuple[str, int]]:
    """Return (container, restarts) by pod; equal results mean that nothing was restarted."""
    states = {}
    for pod in pods:
        (status,) = pod["status"]["containerStatuses"]
        states[pod["metadata"]["name"]] = (
            str(status.get("containerID")),
            int(status.get("restartCount", 0)),
        )
    return states
