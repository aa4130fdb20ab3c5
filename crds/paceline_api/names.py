"""Names that a job's parts share: labels, environment variables, ports, names of child objects.

Worker and coordinator pods count attempts in their names, so that a repeated create conflicts
instead of doubling a pod, and a replacement need not wait until the old pod has gone (C3).
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

JOB_NAME_MAX: Final = 45
"""Leaves room for `-coordinator-` and a five-digit attempt in the 63 characters of a DNS label."""
JOB_NAME_PATTERN: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

PREFIX: Final = "paceline.dev/"
LABEL_JOB: Final = "paceline.dev/job-name"
LABEL_ROLE: Final = "paceline.dev/role"
LABEL_SLOT: Final = "paceline.dev/slot"
LABEL_ATTEMPT: Final = "paceline.dev/attempt"
LABEL_MANAGER: Final = "paceline.dev/managed-by"
"""On a job's pods, so that the API server shows each operator its own only."""
LABEL_VALUE: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
NOTE_FABRIC: Final = "paceline.dev/fabric"
"""Annotation of a worker's pod: the fabric profile that it was made with."""
NOTE_KEY: Final = "paceline.dev/key-id"
"""Annotation of a job's pod: the operator's key with which its secrets were made."""
NOTE_WATCHED: Final = "paceline.dev/watched-until"
"""Annotation of a job: somebody looks at its figures until then, so they are written more often."""
ROLE_WORKER: Final = "worker"
ROLE_COORDINATOR: Final = "coordinator"

DEFAULT_MANAGER: Final = "paceline.dev/operator"
COORDINATOR_SERVICE: Final = "paceline-jobs"
"""The one headless Service of a namespace, shared by the coordinators of all its jobs (C10)."""
COORDINATOR_PORT: Final = 7070
POD_RUN_DIR: Final = "/run/paceline"
"""What PACELINE_RUN_DIR is in a worker's pod."""

ENV_JOB: Final = "PACELINE_JOB"
ENV_NAMESPACE: Final = "PACELINE_NAMESPACE"
ENV_SLOT: Final = "PACELINE_SLOT"
ENV_LOCAL: Final = "PACELINE_LOCAL"
ENV_ATTEMPT: Final = "PACELINE_ATTEMPT"
ENV_COORDINATOR: Final = "PACELINE_COORDINATOR"
ENV_TOKEN: Final = "PACELINE_TOKEN"
ENV_OPERATOR_TOKEN: Final = "PACELINE_OPERATOR_TOKEN"
"""Of the coordinator's process alone: no rank may speak as the operator does."""
ENV_SETTINGS: Final = "PACELINE_SETTINGS"
ENV_RUN_DIR: Final = "PACELINE_RUN_DIR"
ENV_PROCS: Final = "PACELINE_PROCS"
ENV_SPEC: Final = "PACELINE_SPEC"
ENV_DRAIN_GRACE: Final = "PACELINE_DRAIN_GRACE_SECONDS"
ENV_DRAINED_EXIT: Final = "PACELINE_DRAINED_EXIT_CODE"
ENV_HOST: Final = "PACELINE_HOST"
ENV_METRICS_PORT: Final = "PACELINE_METRICS_PORT"
ENV_UID: Final = "PACELINE_UID"
ENV_TLS_CERT: Final = "PACELINE_TLS_CERT"
ENV_TLS_KEY: Final = "PACELINE_TLS_KEY"
ENV_TOKENS_FILE: Final = "PACELINE_TOKENS_FILE"
"""Replaces PACELINE_TOKEN towards the coordinator while it exists: one token a line, the first one
is shown, all are accepted."""
ENV_TLS_CALLERS: Final = "PACELINE_TLS_CALLERS"
"""Of a coordinator: certificate of the authority whose certificates its callers must show."""
ENV_TLS_OWN_CERT: Final = "PACELINE_TLS_OWN_CERT"
ENV_TLS_OWN_KEY: Final = "PACELINE_TLS_OWN_KEY"
"""Of an agent: what it shows to its coordinator."""
CALLER_AGENT: Final = "paceline-agent"
CALLER_OPERATOR: Final = "paceline-operator"
"""Common names in the certificates of a coordinator's callers."""
SECRET_FORMAT: Final = 2
"""Grows with the fields of a job's Secret, which is made once and never changed. A later operator
makes a further one for pods that need the new fields."""
ENV_LINGER: Final = "PACELINE_LINGER_SECONDS"
ENV_OPERATOR_NAMESPACE: Final = "PACELINE_OPERATOR_NAMESPACE"
ENV_OPERATOR_IDENTITY: Final = "PACELINE_OPERATOR_IDENTITY"
ENV_VERSION: Final = "PACELINE_ENV_VERSION"
"""Version of this set of variables, written into every pod; there has been one so far (C14)."""

RESERVED_ENV: Final = (
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
)
TORCHELASTIC: Final = "TORCHELASTIC_"
"""Begins the variables that torchrun sets in the processes that it starts."""
RESERVED_ENV_PREFIXES: Final = ("OMPI_COMM_WORLD_", "PACELINE_", "PMIX_", "PMI_", TORCHELASTIC)


def is_reserved_env(name: str) -> bool:
    """Whether Paceline sets the variable itself, because it differs from rank to rank."""
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def worker_name(job: str, slot: int, attempt: int) -> str:
    return f"{job}-{slot}-{attempt}"


def coordinator_name(job: str, attempt: int) -> str:
    return f"{job}-coordinator-{attempt}"


def coordinator_host(job: str, namespace: str) -> str:
    """Name under which agents find the coordinator; it stays the same when its pod is replaced."""
    return f"{job}-coordinator.{COORDINATOR_SERVICE}.{namespace}"


def secret_name(job: str, uid: str, key_id: str) -> str:
    """One per job, uid and key of the operator: whoever has the same name has the same content, and
    a job made anew under the same name gets a new one (C2)."""
    return f"{job}-{uid[:8]}-{key_id}-{SECRET_FORMAT}"


def tokens_secret_name(job: str, uid: str) -> str:
    """Return the name of the Secret with which a user replaces the token of a job's agents. It need
    not exist, and Paceline neither makes nor reads it by itself (C2)."""
    return f"{job}-{uid[:8]}-tokens"


def group_name(job: str, uid: str) -> str:
    """Of the job's PodGroup and PodDisruptionBudget."""
    return f"{job}-{uid[:8]}"


def manager_label(manager: str) -> str:
    """A `spec.managedBy`, which may hold what a label must not, such as a slash."""
    if re.fullmatch(LABEL_VALUE, manager):
        return manager
    readable = re.sub(r"[^A-Za-z0-9]+", "-", manager)[:40].strip("-")
    digest = hashlib.sha256(manager.encode()).hexdigest()[:8]
    return f"{readable}-{digest}".lstrip("-")


def worker_selector(job: str) -> str:
    """Label selector of a job's worker pods, as shown in `status.selector`."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}"
