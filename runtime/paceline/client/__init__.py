"""The Python SDK: manages jobs from a notebook or a program, in a cluster or on this machine.

    from paceline.client import JobClient

    client = JobClient.local()          # or JobClient.from_kubeconfig()
    job = client.train(train, arguments={"epochs": 30}, replicas=4)
    job.wait()

`AsyncJobClient` has the same methods as coroutines.
"""

from paceline_api.types.job import Metadata, RuntimeRef, TrainingJob, TrainingJobSpec
from paceline_api.types.template import PodTemplate

from paceline.client.aio import AsyncJob, AsyncJobClient
from paceline.client.client import JobClient
from paceline.client.errors import EndUnknownError, JobFailedError
from paceline.client.job import Job

__all__ = [
    "AsyncJob",
    "AsyncJobClient",
    "EndUnknownError",
    "Job",
    "JobClient",
    "JobFailedError",
    "Metadata",
    "PodTemplate",
    "RuntimeRef",
    "TrainingJob",
    "TrainingJobSpec",
]
