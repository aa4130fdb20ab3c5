"""The door of the SDK. Methods that Kubeflow's TrainerClient has too are called as there."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from paceline_api.reading.load import job_from_mapping
from paceline_api.types.job import TrainingJob

from paceline.client.job import Job
from paceline.client.making import SUFFIX_CHARS, function_job, job_name
from paceline.function.pack import pack
from paceline.jobs import places
from paceline.jobs.core import rendering
from paceline.jobs.interface import JobEvent, Jobs, JobStatus, Selection, Until


class JobClient:
    """Jobs of one place: a namespace of a cluster, or this machine."""

    def __init__(self, jobs: Jobs) -> None:
        """`jobs`: the back end; `from_kubeconfig` and `local` choose it."""
        self._jobs = jobs

    def __repr__(self) -> str:
        return f"<JobClient of {self._jobs.where}>"

    @classmethod
    def from_kubeconfig(
        cls,
        kubeconfig: Path | str | None = None,
        *,
        context: str | None = None,
        namespace: str | None = None,
    ) -> Self:
        """A cluster, found as kubectl finds it: `kubeconfig`, else $KUBECONFIG, else
        ~/.kube/config, else the service account of this pod. Asks it nothing yet. Raises
        AccessError, MissingExtraError."""
        path = None if kubeconfig is None else Path(kubeconfig)
        return cls(places.cluster(path, context, namespace))

    @classmethod
    def local(cls, folder: Path | str = ".") -> Self:
        """This machine: each replica a process, each run a folder below `folder`/runs."""
        return cls(places.local(Path(folder)))

    def train(
        self,
        function: Callable[..., Any],
        /,
        *,
        arguments: Mapping[str, Any] | None = None,
        name: str | None = None,
        replicas: int = 1,
        packages: Sequence[str] = (),
        image: str | None = None,
        env: Mapping[str, str] | None = None,
        resources: Mapping[str, str | int] | None = None,
        template: object = None,
        **spec: Any,
    ) -> Job:
        """Start a job in which each rank calls `function(**arguments)`.

        The function travels as source, with the imports, functions, classes and plain values of its
        notebook or file that it uses. `arguments`: of what JSON knows. `name`: of the job; without
        it the function's with five characters more. `packages`: installed at the start of each pod,
        as `pip install` takes them. `image`: else paceline/worker of this version. `env`,
        `resources` (limits, such as {"nvidia.com/gpu": 1}) and `image` are for the container
        `trainer`; everything else about pods is in `template`: a PodTemplate, a
        kubernetes.client.V1PodTemplateSpec, or a mapping as in YAML. `spec`: further fields of a
        TrainingJobSpec, such as collective={"mode": "Quorum"} or min_replicas=2.

        Raises FunctionError and ArgumentError for what cannot be sent, InvalidJobError for a field,
        NameTakenError, RejectedError, and on a cluster NotAllowedError, AwayError, RefusedError.
        """
        files = pack(function, arguments, packages=packages)
        job = function_job(
            name or job_name(function.__name__, secrets.token_hex(SUFFIX_CHARS)[:SUFFIX_CHARS]),
            replicas=replicas,
            template=template,
            image=image,
            env=env or {},
            resources=resources or {},
            spec=spec,
        )
        return Job(self._jobs, self._jobs.submit(job, folder=Path(), function=files))

    def submit(self, job: TrainingJob, *, folder: Path | str = ".") -> Job:
        """Start a job as it is. `folder`: where its relative paths begin, on this machine. Raises
        InvalidJobError, NameTakenError, RejectedError, and on a cluster NotAllowedError, AwayError,
        RefusedError."""
        checked = job_from_mapping(job.to_mapping())
        return Job(self._jobs, self._jobs.submit(checked, folder=Path(folder)))

    def list_jobs(self) -> list[JobStatus]:
        """All jobs of the namespace, or those that are running on this machine, by name."""
        return self._jobs.all()

    def get_job(self, name: str) -> Job:
        """A job by its name, or on this machine by its run folder. Raises NoSuchJobError."""
        return Job(self._jobs, self._jobs.status(name))

    def get_job_logs(
        self, name: str, *, rank: int | None = None, follow: bool = False
    ) -> Generator[str]:
        """Its lines as text, `rank 3 | ...`; `Job.logs` has them as data."""
        for line in self._jobs.logs(name, Selection(rank=rank), follow=follow):
            yield rendering.log_line(line, colour=False, times=False)

    def get_job_events(self, name: str) -> list[JobEvent]:
        return self.get_job(name).events()

    def wait_for_job_status(
        self, name: str, until: Until | str = Until.ENDED, *, timeout_s: float = 600.0
    ) -> JobStatus:
        """As `Job.wait`, with a time limit."""
        return self.get_job(name).wait(until, timeout_s=timeout_s)

    def delete_job(self, name: str) -> None:
        self.get_job(name).delete()
