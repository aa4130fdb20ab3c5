"""The secrets of one job, derived from the operator's key and the job's uid (C2).

The operator can derive them again at any time, so it never has to read a Secret in a user's
namespace. A recreated job has a new uid, and therefore other secrets, even under the same name.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from typing import Final

OPERATOR_KEY_BYTES: Final = 32
_HASH: Final = hashlib.sha256


@dataclass(frozen=True, slots=True)
class JobKeys:
    """All secrets of one job."""

    key_id: str
    """Id of the operator's key from which the secrets are derived."""
    token: str
    """Bearer token with which ranks and agents authenticate at the coordinator."""
    operator_token: str
    """Bearer token of the operator; the coordinator's pod is the only one that has it."""
    server_seed: bytes
    """Private Ed25519 key of the coordinator; agents and operator pin its public half."""
    callers_seed: bytes
    """Private Ed25519 key of the job's authority, which signs the certificates of the coordinator's
    callers. No pod has it."""
    agent_seed: bytes
    """Private Ed25519 key of the job's agents."""
    operator_seed: bytes
    """Private Ed25519 key with which the operator calls this job's coordinator. No pod has it."""


def hkdf(key: bytes, info: bytes, length: int, salt: bytes = b"") -> bytes:
    """Return `length` bytes of key material by HKDF with SHA-256 (RFC 5869)."""
    size = _HASH().digest_size
    pseudo = hmac.new(salt or bytes(size), key, _HASH).digest()
    block, out = b"", b""
    for number in range(1, -(-length // size) + 1):
        block = hmac.new(pseudo, block + info + bytes([number]), _HASH).digest()
        out += block
    return out[:length]


def job_keys(operator_key: bytes, uid: str) -> JobKeys:
    """Derive all secrets of a job; the same arguments always give the same secrets.

    Args:
        operator_key: One of the operator's keys, of at least 32 bytes.
        uid: Uid of the job.

    Returns:
        The secrets.

    Raises:
        ValueError: The operator's key is too short.
    """
    if len(operator_key) < OPERATOR_KEY_BYTES:
        raise ValueError(f"the operator's key has {len(operator_key)} bytes, 32 are needed")

    def derived(purpose: bytes) -> bytes:
        return hkdf(operator_key, b"paceline " + purpose + b" v1 " + uid.encode(), 32)

    return JobKeys(
        key_id=key_id(operator_key),
        token=derived(b"token").hex(),
        operator_token=derived(b"operator token").hex(),
        server_seed=derived(b"server"),
        callers_seed=derived(b"callers"),
        agent_seed=derived(b"agent"),
        operator_seed=derived(b"operator"),
    )


def key_id(operator_key: bytes) -> str:
    """Return a short id that names a key and does not reveal it."""
    return hkdf(operator_key, b"paceline key id v1", 4).hex()
