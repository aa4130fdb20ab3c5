"""kubeconfig files: the server, the authority that signed it, and the identity of the user."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from testing.cluster.certificates import KeyPair


def write(
    path: Path, server: str, authority: Path, identity: KeyPair | str, namespace: str = "default"
) -> Path:
    """Write a kubeconfig for a user with a certificate or for a service account with a token."""
    user: dict[str, Any] = (
        {"token": identity}
        if isinstance(identity, str)
        else {
            "client-certificate": str(identity.certificate),
            "client-key": str(identity.key),
        }
    )
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [
            {
                "name": "paceline",
                "cluster": {"server": server, "certificate-authority": str(authority)},
            }
        ],
        "users": [{"name": path.stem, "user": user}],
        "contexts": [
            {
                "name": "paceline",
                "context": {"cluster": "paceline", "user": path.stem, "namespace": namespace},
            }
        ],
        "current-context": "paceline",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    return path
