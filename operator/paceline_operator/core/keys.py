"""The secrets of one job, derived from the operator's key and the job's uid (C2).

The operator can make them again at any time, so it never has to read a Secret of a user's
namespace. Another job, or the same name made anew, has another uid and so other secrets.
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
    key_id: str
    """Of the operator's key that they are derived from."""
    token: str
    """Bearer token of ranks and agents at the coordinator."""
    operator_token: str
    """The operator's own; no pod but the coordinator's has it."""
    server_seed: bytes
    """Private Ed25519 key of the coordinator; its public half is pinned by agents and operator."""
    callers_seed: bytes
    """Private Ed25519 key of the job's authority, which signs the certificates of those who call
    the coordinator. No pod has it."""
    agent_seed: bytes
    """Private Ed25519 key of the job's agents."""
    operator_seed: bytes
    """Private Ed25519 key with which the operator calls this job's coordinator. No pod has it."""


def hkdf(key: bytes, info: bytes, length: int, salt: bytes = b"") -> bytes:
    """HKDF with SHA-256 (RFC 5869)."""
    size = _HASH().digest_size
    pseudo = hmac.new(salt or bytes(size), key, _HASH).digest()
    block, out = b"", b""
    for number in range(1, -(-length // size) + 1):
        block = hmac.new(pseudo, block + info + bytes([number]), _HASH).digest()
        out += block
    return out[:length]


def job_keys(operator_key: bytes, uid: str) -> JobKeys:
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
    """Names a key without telling it."""
    return hkdf(operator_key, b"paceline key id v1", 4).hex()
