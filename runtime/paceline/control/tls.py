"""The control channel in a cluster: TLS to the holder of one certificate and to nobody else (C2).

The operator makes a coordinator's certificate from the job's own key and mounts it into every pod
of the job. There is no authority, and no name to check, because pods are reached by address.
"""

from __future__ import annotations

import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.names import ENV_TLS_CERT

RECORD_BYTES: Final = 16 * 1024
"""The most that TLS brings at once."""
CONNECTION_BYTES: Final = 40 * 1024
"""Memory that an open connection takes, as measured with such buffers (`spare_buffers`)."""


def pinned(certificate: Path | None) -> ssl.SSLContext | None:
    """None, on one machine: addresses of the loopback are plain http. Raises PacelineError."""
    if certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    try:
        context.load_verify_locations(certificate)
    except OSError as error:  # ssl.SSLError is one too
        raise PacelineError(
            f"environment variable {ENV_TLS_CERT} names {certificate}, "
            f"which is no certificate that can be read: {error}",
            hint="the operator mounts it from the job's Secret; delete the pod to have another one",
            exit_code=EXIT_BAD_INPUT,
        ) from None
    return context


def spare_buffers() -> None:
    """asyncio sets a buffer of 256 KiB aside for each TLS connection of the process, for as long as
    it is open; a coordinator has one to every pod of its job."""
    SSLProtocol.max_size = RECORD_BYTES
