"""`python -m scripts.try_manifests DIR`: what a job makes of the pod templates in manifests.

It reads each YAML file below a folder, with one or several documents, and finds every pod template,
whatever kind holds it: Pod, Job, CronJob, JobSet, MPIJob, PyTorchJob, runtimes of Trainer, RayJob,
LeaderWorkerSet, StatefulSet, Deployment and others. Each becomes `spec.template` of a job, and the
pod that the operator would make of it is compared with it, field by field:

- carried: the job is accepted, and the pod has every field of the template as it is;
- refused: the job is not accepted, with the words that its user would read;
- LOST: the job is accepted, and the pod lacks a field or has another value. That is a defect.

The container that asks for GPUs, or else the first, is renamed to `trainer`; nothing else is
changed. Its command is not in the pod but in the job file, from which the agent starts it once for
each rank; that it is there is checked, too. With `--kubeconfig FILE` an API server also judges each
job and each pod that would be made (a dry run: nothing is created).

The exit code is 1 if a field was lost or a file could not be read.
"""

from __future__ import annotations

import argparse
import copy
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from paceline_api.pods.devices import is_device
from paceline_api.types.fabric import PLAIN
from paceline_api.types.job import API_VERSION, KIND
from paceline_api.types.template import TRAINER
from paceline_operator.core.decide.fabric import fabric_of
from paceline_operator.core.job import read_job
from paceline_operator.core.observed import Observed
from paceline_operator.core.pods import children
from paceline_operator.core.pods.fabric import ChosenFabric
from paceline_operator.core.pods.frozen import job_file
from paceline_operator.fabrics import built_in

FILE_BYTES_MAX: Final = 1 << 20
"""Upper bound on the size of a file; a manifest is far smaller."""
VALUES_MAX: Final = 100_000
"""Upper bound on the values of a document: an alias can stand for a million of them."""
KEYS: Final = ("name", "mountPath", "key", "topologyKey")
"""Fields by which an item of a list is found again in a longer list, the first that it has."""
NAME: Final = "tried"
"""Name of the jobs that are tried."""
KEY: Final = "0a0b0c0d"
COMMAND: Final = ("command", "args")
DRY_RUN_S: Final = 30


@dataclass(frozen=True, slots=True)
class Template:
    """A pod template and where it was found."""

    where: str
    """File, kind, name and path."""
    body: dict[str, Any]
    """A PodTemplateSpec: `metadata` and `spec`."""
    only_labels: bool = False
    """True for the template of a Pod, whose other metadata are those of the one object."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a template."""

    template: Template
    problems: str = ""
    """Why the job is refused, in the words that its user reads; empty if it is accepted."""
    lost: tuple[str, ...] = ()
    """Fields of the template that the pod does not have as they are."""
    notes: tuple[str, ...] = ()

    @property
    def word(self) -> str:
        """The verdict in one word."""
        return "refused" if self.problems else "LOST" if self.lost else "carried"

    def __str__(self) -> str:
        """Return the verdict as lines of text."""
        details = self.problems or "; ".join(self.lost or self.notes)
        return f"{self.template.where}: {self.word}{': ' if details else ''}{details}"


class UnreadableError(Exception):
    """Raised for a file that holds no manifests that can be read."""


# ---- templates in files -------------------------------------------------------------------------


def templates_in(path: Path) -> tuple[list[Template], list[str]]:
    """Return the pod templates of a file.

    Args:
        path: A YAML file with one or several documents.

    Returns:
        The templates, and kind and name of each document without one.

    Raises:
        UnreadableError: The file is too large, or no YAML of mappings.
    """
    if path.stat().st_size > FILE_BYTES_MAX:
        raise UnreadableError(f"is longer than {FILE_BYTES_MAX} bytes")
    try:
        documents = [each for each in yaml.safe_load_all(path.read_text()) if each is not None]
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise UnreadableError(f"is no YAML: {' '.join(str(error).split())}") from None
    templates: list[Template] = []
    without: list[str] = []
    for document in documents:
        if not isinstance(document, dict):
            raise UnreadableError("holds a document that is not a mapping")
        walk = _Walk(path.as_posix())
        walk.into(document, _object_of(document), "")
        templates += walk.found
        without += [] if walk.found else [f"{path.as_posix()} {_object_of(document)}"]
    return templates, without


def _object_of(document: Mapping[str, Any]) -> str:
    metadata = document.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    name = metadata.get("name") or metadata.get("generateName") or ""
    return f"{document.get('kind', 'object')} {name}".strip()


class _Walk:
    """Finds the pod templates of a document: mappings whose `spec` has a list of containers."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Template] = []
        self.values = 0

    def into(self, value: Any, owner: str, path: str) -> None:
        self.values += 1
        if self.values > VALUES_MAX:
            raise UnreadableError(f"has a document of more than {VALUES_MAX} values")
        if isinstance(value, list):
            for index, item in enumerate(value):
                self.into(item, owner, f"{path}[{index}]")
            return
        if not isinstance(value, dict):
            return
        if value.get("apiVersion") and value.get("kind"):
            owner, path = _object_of(value), ""
        spec = value.get("spec")
        if isinstance(spec, dict) and isinstance(spec.get("containers"), list):
            where = f"{self.file} {owner} {path}".strip()
            body = {"spec": spec}
            if isinstance(value.get("metadata"), dict):
                body["metadata"] = value["metadata"]
            self.found.append(Template(where, copy.deepcopy(body), value.get("kind") == "Pod"))
            return
        for key, item in value.items():
            self.into(item, owner, f"{path}.{key}" if path else str(key))


# ---- a job of a template ------------------------------------------------------------------------


def job_of(template: Template) -> tuple[dict[str, Any], str]:
    """Return a TrainingJob with this template, and what was changed in it.

    Args:
        template: The template.

    Returns:
        The manifest, and the container that was renamed; empty if none was.
    """
    body = copy.deepcopy(template.body)
    if template.only_labels:
        kept = body.get("metadata") or {}
        body["metadata"] = {key: kept[key] for key in ("labels", "annotations") if key in kept}
    containers = [each for each in body["spec"]["containers"] if isinstance(each, dict)]
    names = [each.get("name") for each in containers]
    renamed = ""
    if containers and TRAINER not in names:
        main = next((each for each in containers if _has_gpus(each)), containers[0])
        renamed, main["name"] = str(main.get("name")), TRAINER
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": NAME, "namespace": "default"},
        "spec": {"replicas": 2, "template": body},
    }, renamed


def _has_gpus(container: Mapping[str, Any]) -> bool:
    resources = container.get("resources") or {}
    asked = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return any(is_device(name) and name.endswith("/gpu") for name in asked)


def pod_of(job: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str, str]:
    """Return the pod that the operator would make for a job that requires no network.

    Args:
        job: The manifest of a TrainingJob.

    Returns:
        The first worker's pod, with the job's command in place of the agent's and the name of the
        fabric profile; or None and why the job is refused.
    """
    read = read_job(dict(job) | {"metadata": {**job["metadata"], "uid": "00000000-tried"}})
    if read.problems:
        return None, "", read.problems
    network = fabric_of(read, Observed(fabrics=built_in()))
    assert isinstance(network, ChosenFabric), "nothing is required"
    pod = children.worker(read, 0, 1, key_id=KEY, fabric=network)
    trainer = next(each for each in pod["spec"]["containers"] if each["name"] == TRAINER)
    trainer["command"] = json.loads(job_file(read))["command"]
    return pod, network.profile, ""


def tried(template: Template) -> Verdict:
    """Return what becomes of a template.

    Args:
        template: The template.

    Returns:
        The verdict.
    """
    job, renamed = job_of(template)
    pod, profile, problems = pod_of(job)
    if pod is None:
        return Verdict(template, problems=problems)
    wanted = _with_whole_command(job["spec"]["template"])
    notes = [f"container {renamed} as {TRAINER}"] if renamed else []
    notes += [] if profile == PLAIN else [f"the network is the {profile}'s own"]
    return Verdict(template, lost=tuple(lost("", wanted, pod)), notes=tuple(notes))


def _with_whole_command(template: Mapping[str, Any]) -> dict[str, Any]:
    body = copy.deepcopy(dict(template))
    for container in body["spec"]["containers"]:
        if container["name"] == TRAINER:
            parts = [word for field in COMMAND for word in container.pop(field, None) or ()]
            container["command"] = parts
    return body


def lost(path: str, wanted: Any, made: Any) -> Iterator[str]:
    """Yield where `made` does not have what `wanted` says; what it has beside it does not matter.

    Args:
        path: Path of both.
        wanted: A value of the template. None says nothing.
        made: The value of the pod.

    Yields:
        A path and what is there.
    """
    if wanted is None:
        return
    if isinstance(wanted, dict):
        if not isinstance(made, dict):
            yield f"{path} is missing" if made is None else f"{path} is {made!r}"
            return
        for key, value in wanted.items():
            yield from lost(f"{path}.{key}" if path else str(key), value, made.get(key))
    elif isinstance(wanted, list):
        items = made if isinstance(made, list) else []
        for index, item in enumerate(wanted):
            yield from _lost_item(f"{path}[{index}]", item, items)
    elif made != wanted or isinstance(made, bool) is not isinstance(wanted, bool):
        yield f"{path} is missing" if made is None else f"{path} is {made!r}, not {wanted!r}"


def _lost_item(path: str, item: Any, items: Sequence[Any]) -> Iterator[str]:
    if any(not [*lost(path, item, each)] for each in items):
        return
    key = next((key for key in KEYS if isinstance(item, dict) and key in item), None)
    same = [each for each in items if key and isinstance(each, dict) and each[key] == item[key]]
    if same and key:
        yield from lost(f"{path[: path.rindex('[')]}[{item[key]}]", item, same[0])
    else:
        yield f"{path} is missing"


# ---- an API server ------------------------------------------------------------------------------


def judged(kubeconfig: Path, template: Template) -> list[str]:
    """Return what an API server says to the job and to its pod; empty if it accepts both.

    Args:
        kubeconfig: Where the API server is. It must know TrainingJobs.
        template: The template.

    Returns:
        Its words, for the job and for the pod.
    """
    job, _ = job_of(template)
    answers = [_dry_run(kubeconfig, job)]
    pod, _, _ = pod_of(job)
    if pod is not None and not answers[0]:
        # The job that owns the pod does not exist.
        del pod["metadata"]["ownerReferences"]
        answers.append(_dry_run(kubeconfig, pod))
    return [words for words in answers if words]


def _dry_run(kubeconfig: Path, manifest: Mapping[str, Any]) -> str:
    words = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    done = subprocess.run(
        ["kubectl", "--kubeconfig", str(kubeconfig), *words],
        input=json.dumps(manifest),
        capture_output=True,
        text=True,
        timeout=DRY_RUN_S,
        check=False,
    )
    return "" if done.returncode == 0 else f"{manifest['kind']}: {done.stderr.strip()}"


# ---- the command --------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None) -> int:
    """Print what becomes of the templates below a folder.

    Args:
        words: Arguments; None takes those of the process.

    Returns:
        The exit code: 1 if a field was lost or a file could not be read, else 0.
    """
    parser = argparse.ArgumentParser(
        prog="python -m scripts.try_manifests", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("folder", type=Path, help="folder with manifests, or one file")
    parser.add_argument("--kubeconfig", type=Path, help="also ask this cluster, by dry runs")
    asked = parser.parse_args(words)
    folder: Path = asked.folder
    files = (
        sorted({*folder.rglob("*.yaml"), *folder.rglob("*.yml")}) if folder.is_dir() else [folder]
    )
    count: Counter[str] = Counter()
    for file in files:
        try:
            templates, without = templates_in(file)
        except (OSError, UnreadableError) as error:
            count["unread"] += 1
            print(f"{file}: NOT READ: {error}")
            continue
        for name in without:
            count["without"] += 1
            print(f"{name}: no pod template")
        for template in templates:
            verdict = tried(template)
            refusals = judged(asked.kubeconfig, template) if asked.kubeconfig else []
            count[verdict.word] += 1
            count["said"] += bool(refusals and verdict.word == "carried")
            print("\n  ".join([str(verdict), *refusals]))
    total = sum(count[word] for word in ("carried", "refused", "LOST"))
    print(
        f"{total} templates: {count['carried']} carried, {count['refused']} refused, "
        f"{count['LOST']} with fields lost; {count['without']} documents without a template; "
        f"{count['unread']} files not read"
        + (f"; {count['said']} refused by the cluster alone" if asked.kubeconfig else "")
    )
    return 1 if count["LOST"] or count["unread"] or not files else 0


if __name__ == "__main__":
    sys.exit(main())
