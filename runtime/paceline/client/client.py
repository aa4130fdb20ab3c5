"""`JobClient`, the entry point of the SDK.

Methods that Kubeflow's TrainerClient has, too, have the same names and parameters here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from paceline_api.reading.load import job_from_mapping
from paceline_api.types.job import RuntimeRef, TrainingJob

from paceline.client.job import Job
from paceline.client.making import SUFFIX_CHARS, function_job
from paceline.function.pack import pack
from paceline.jobs import places
from paceline.jobs.core import rendering
from paceline.jobs.core.script_job import job_name
from paceline.jobs.interface import JobEvent, Jobs, JobStatus, Selection, Until


class JobClient:
    """Client for the jobs of one place: a namespace of a cluster, or this machine.

    All methods block. Errors are those of `paceline.jobs.errors` and `paceline.client.errors`.
    Threads may share a client.
    """

    def __init__(self, jobs: Jobs) -> None:
        """Create a client; `from_kubeconfig` and `local` are the usual ways.

        Args:
            jobs: The back end.
        """
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
        """Return a client for a cluster; no request is sent yet.

        An unusable kubeconfig raises AccessError. A missing package `kubernetes` raises
        MissingExtraError.

        Args:
            kubeconfig: Path of the kubeconfig. None takes $KUBECONFIG, else ~/.kube/config, else
                the service account of this pod, as kubectl does.
            context: Context in the kubeconfig; None takes the current one.
            namespace: Namespace of the jobs; None takes that of the context.

        Returns:
            The client.
        """
        path = None if kubeconfig is None else Path(kubeconfig)
        return cls(places.cluster(path, context, namespace))

    @classmethod
    def local(cls, folder: Path | str = ".") -> Self:
        """Return a client for this machine, where each replica is a process.

        Args:
            folder: Folder below whose `runs/` each run gets a folder.

        Returns:
            The client.
        """
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
        runtime: RuntimeRef | str | None = None,
        **spec: Any,
    ) -> Job:
        """Start a job in which each rank calls `function(**arguments)`.

        The function is sent as source, together with the imports, functions, classes and plain
        values of its notebook or file that it uses. `image`, `env` and `resources` apply to the
        container `trainer`.

        A function or an argument that cannot be sent raises FunctionError or ArgumentError, an
        invalid field InvalidJobError, and a template whose trainer has a command SpecError. The
        back end raises NameTakenError or RejectedError, and on a cluster NotAllowedError, AwayError
        or RefusedError.

        Args:
            function: The function that each rank calls.
            arguments: Keyword arguments of the function; values that JSON can represent.
            name: Name of the job; None takes the function's name with a dash and five characters
                more.
            replicas: Number of workers.
            packages: Requirements that each pod installs at its start, as for `pip install`.
            image: Container image; None takes that of the template or runtime, or
                paceline/worker of this version if there is neither.
            env: Environment variables.
            resources: Resource limits, such as {"nvidia.com/gpu": 1}.
            template: Everything else about the pods: a PodTemplate, a
                kubernetes.client.V1PodTemplateSpec, or a mapping as in YAML.
            runtime: Name of a ClusterTrainingRuntime that the job is merged with, or a RuntimeRef;
                not on this machine.
            **spec: Further fields of a TrainingJobSpec, such as collective={"mode": "Quorum"} or
                min_replicas=2.

        Returns:
            The new job.
        """
        files = pack(function, arguments, packages=packages)
        job = function_job(
            name or job_name(function.__name__, secrets.token_hex(SUFFIX_CHARS)[:SUFFIX_CHARS]),
            replicas=replicas,
            template=template,
            image=image,
            env=env or {},
            resources=resources or {},
            runtime=runtime,
            spec=spec,
        )
        return Job(self._jobs, self._jobs.submit(job, folder=Path(), function=files))

    def submit(self, job: TrainingJob, *, folder: Path | str = ".") -> Job:
        """Start a job that is described by a TrainingJob.

        An invalid job raises InvalidJobError. The back end raises NameTakenError or RejectedError,
        and on a cluster NotAllowedError, AwayError or RefusedError.

        Args:
            job: The job.
            folder: On this machine, the folder to which relative paths in the job refer.

        Returns:
            The new job.
        """
        checked = job_from_mapping(job.to_mapping())
        return Job(self._jobs, self._jobs.submit(checked, folder=Path(folder)))

    def list_jobs(self) -> list[JobStatus]:
        """Return all jobs of the namespace, or the running jobs on this machine, by name."""
        return self._jobs.all()

    def get_job(self, name: str) -> Job:
        """Return a job; an unknown name raises NoSuchJobError.

        Args:
            name: Name of the job; on this machine it may be a run folder.

        Returns:
            The job.
        """
        return Job(self._jobs, self._jobs.status(name))

    def get_job_logs(
        self, name: str, *, rank: int | None = None, follow: bool = False
    ) -> Generator[str]:
        """Yield the log lines of a job as text, `rank 3 | ...`; `Job.logs` yields data.

        Args:
            name: Name of the job.
            rank: Rank whose lines are returned; None for all ranks and the agents.
            follow: Continue with new lines until the job has ended.

        Yields:
            One line without its line end.
        """
        for line in self._jobs.logs(name, Selection(rank=rank), follow=follow):
            yield rendering.log_line(line, colour=False, times=False)

    def get_job_events(self, name: str) -> list[JobEvent]:
        """Return the history of a job, the oldest event first."""
        return self.get_job(name).events()

    def wait_for_job_status(
        self, name: str, until: Until | str = Until.ENDED, *, timeout_s: float = 600.0
    ) -> JobStatus:
        """Block until a job meets a condition or has ended; see `Job.wait`.

        Args:
            name: Name of the job.
            until: The condition: `ended`, `training` or `suspended`.
            timeout_s: Upper bound on the wait in seconds.

        Returns:
            The status that ended the wait.
        """
        return self.get_job(name).wait(until, timeout_s=timeout_s)

    def delete_job(self, name: str) -> None:
        """End a job and remove it with its logs; do not wait until it is gone."""
        self.get_job(name).delete()
