"""Names that the parts of a job share: labels, environment variables, ports, child objects.

The names of worker and coordinator pods count attempts. A repeated create therefore conflicts
instead of making a second pod, and a replacement need not wait until the old pod has gone (C3).
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

JOB_NAME_MAX: Final = 45
"""Upper bound on the characters of a job's name. It leaves room for `-coordinator-` and a
five-digit attempt in the 63 characters of a DNS label."""
JOB_NAME_PATTERN: Final = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"

PREFIX: Final = "paceline.dev/"
LABEL_JOB: Final = "paceline.dev/job-name"
LABEL_ROLE: Final = "paceline.dev/role"
LABEL_SLOT: Final = "paceline.dev/slot"
LABEL_ATTEMPT: Final = "paceline.dev/attempt"
LABEL_MANAGER: Final = "paceline.dev/managed-by"
"""Label on a job's pods, by which each operator lists only its own."""
LABEL_VALUE: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
NOTE_FABRIC: Final = "paceline.dev/fabric"
"""Annotation of a worker pod: the fabric profile that it was created with."""
NOTE_KEY: Final = "paceline.dev/key-id"
NOTE_FILE: Final = "paceline.dev/job-file"
"""Annotation of a pod: digest of the job file in the Secret that it mounts."""
NOTE_REVISION: Final = "paceline.dev/revision"
"""Annotation of a pod: `fields.revision` of the spec that it was made from."""
"""Annotation of a pod: id of the operator's key that its secrets are derived from."""
NOTE_WATCHED: Final = "paceline.dev/watched-until"
"""Annotation of a job: the time until which a user watches its figures, so that they are written
more often."""
ROLE_WORKER: Final = "worker"
ROLE_COORDINATOR: Final = "coordinator"

DEFAULT_MANAGER: Final = "paceline.dev/operator"
COORDINATOR_SERVICE: Final = "paceline-jobs"
"""The one headless Service of a namespace, shared by the coordinators of all its jobs (C10)."""
COORDINATOR_PORT: Final = 7070
POD_RUN_DIR: Final = "/run/paceline"
"""Value of PACELINE_RUN_DIR in a worker pod."""

ENV_JOB: Final = "PACELINE_JOB"
ENV_NAMESPACE: Final = "PACELINE_NAMESPACE"
ENV_SLOT: Final = "PACELINE_SLOT"
ENV_LOCAL: Final = "PACELINE_LOCAL"
ENV_ATTEMPT: Final = "PACELINE_ATTEMPT"
ENV_COORDINATOR: Final = "PACELINE_COORDINATOR"
ENV_TOKEN: Final = "PACELINE_TOKEN"
ENV_OPERATOR_TOKEN: Final = "PACELINE_OPERATOR_TOKEN"
"""Token of the operator, given to the coordinator's process only, so that no rank can act as the
operator."""
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
"""File of tokens, one a line, that replaces PACELINE_TOKEN towards the coordinator while it exists.
Agents send the first token; the coordinator accepts all of them."""
ENV_TLS_CALLERS: Final = "PACELINE_TLS_CALLERS"
"""Certificate of the authority that signed the certificates of the coordinator's callers; for a
coordinator."""
ENV_TLS_OWN_CERT: Final = "PACELINE_TLS_OWN_CERT"
"""Certificate that an agent presents to its coordinator."""
ENV_TLS_OWN_KEY: Final = "PACELINE_TLS_OWN_KEY"
"""Key of the certificate that an agent presents to its coordinator."""
CALLER_AGENT: Final = "paceline-agent"
"""Common name in an agent's certificate for the coordinator."""
CALLER_OPERATOR: Final = "paceline-operator"
"""Common name in the operator's certificate for the coordinator."""
SECRET_FORMAT: Final = 2
"""Version of the fields in a job's Secret, which is created once and never changed. A later
operator creates a further Secret for pods that need new fields."""
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
"""Prefix of the variables that torchrun sets in the processes that it starts."""
RESERVED_ENV_PREFIXES: Final = ("OMPI_COMM_WORLD_", "PACELINE_", "PMIX_", "PMI_", TORCHELASTIC)


def is_reserved_env(name: str) -> bool:
    """Return True if Paceline sets the variable itself, differently on each rank."""
    return name in RESERVED_ENV or name.startswith(RESERVED_ENV_PREFIXES)


def worker_name(job: str, slot: int, attempt: int) -> str:
    """Return the name of a worker pod."""
    return f"{job}-{slot}-{attempt}"


def coordinator_name(job: str, attempt: int) -> str:
    """Return the name of a coordinator pod."""
    return f"{job}-coordinator-{attempt}"


def coordinator_host(job: str, namespace: str) -> str:
    """Return the host name of the coordinator, which stays when its pod is replaced."""
    return f"{job}-coordinator.{COORDINATOR_SERVICE}.{namespace}"


def secret_name(job: str, uid: str, key_id: str, file_id: str) -> str:
    """Return the name of a job's Secret: of the job, its uid, the key and the job file in it.

    Two operators that use the same name therefore write the same content. A job that is created
    anew under the same name, or resumed with other settings, gets a new Secret (C2).

    Args:
        job: Name of the job.
        uid: Its uid.
        key_id: Id of the operator's key.
        file_id: Digest of the job file.

    Returns:
        The name.
    """
    return f"{job}-{uid[:8]}-{key_id}-{SECRET_FORMAT}-{file_id}"


def tokens_secret_name(job: str, uid: str) -> str:
    """Return the name of the Secret with which a user replaces the token of a job's agents.

    It need not exist, and Paceline neither creates it nor reads it through the API (C2).

    Args:
        job: Name of the job.
        uid: Its uid.

    Returns:
        The name.
    """
    return f"{job}-{uid[:8]}-tokens"


def group_name(job: str, uid: str) -> str:
    """Return the name of the job's PodGroup and PodDisruptionBudget."""
    return f"{job}-{uid[:8]}"


def manager_label(manager: str) -> str:
    """Return `spec.managedBy` as a label value, which must not contain a slash, for example."""
    if re.fullmatch(LABEL_VALUE, manager):
        return manager
    readable = re.sub(r"[^A-Za-z0-9]+", "-", manager)[:40].strip("-")
    digest = hashlib.sha256(manager.encode()).hexdigest()[:8]
    return f"{readable}-{digest}".lstrip("-")


def worker_selector(job: str) -> str:
    """Return the label selector of a job's worker pods, as in `status.selector`."""
    return f"{LABEL_JOB}={job},{LABEL_ROLE}={ROLE_WORKER}"
