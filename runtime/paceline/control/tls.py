"""The control channel in a cluster: TLS with certificates on both ends (C2).

The operator makes all certificates from the job's own keys and mounts them into its pods. An agent
talks to the holder of the coordinator's certificate and to nobody else; there is no name to check,
because pods are reached by address. The coordinator hears those who show a certificate of the job's
authority. The kubelet has none, so a connection without one gets as far as the health check.
"""

from __future__ import annotations

import asyncio
import ssl
from asyncio.sslproto import SSLProtocol
from pathlib import Path
from typing import Final

from paceline_api.errors import EXIT_BAD_INPUT, PacelineError
from paceline_api.names import ENV_TLS_CERT, ENV_TLS_OWN_CERT, ENV_TLS_OWN_KEY

RECORD_BYTES: Final = 16 * 1024
"""The most that TLS brings at once."""
CONNECTION_BYTES: Final = 40 * 1024
"""Memory that an open connection takes, as measured with such buffers (`spare_buffers`)."""


def pinned(certificate: Path | None, own: tuple[Path, Path] | None = None) -> ssl.SSLContext | None:
    """Return the TLS settings of an agent.

    Args:
        certificate: The coordinator's.
        own: Certificate and key to show to it.

    Returns:
        None on one machine, where addresses are plain HTTP on the loopback.

    Raises:
        PacelineError: A file cannot be read, or holds something else.
    """
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
    if own is not None:
        try:
            context.load_cert_chain(*own)
        except OSError as error:
            raise PacelineError(
                f"environment variables {ENV_TLS_OWN_CERT} and {ENV_TLS_OWN_KEY} name no usable "
                f"pair: {error}",
                hint="the operator mounts it from the job's Secret; delete the pod to have another "
                "one",
                exit_code=EXIT_BAD_INPUT,
            ) from None
    return context


def caller_role(transport: asyncio.BaseTransport | None) -> str | None:
    """Return the common name in the certificate that a caller has shown, None without one.

    OpenSSL has checked by then that the job's authority has signed it.
    """
    shown = transport.get_extra_info("peercert") if transport is not None else None
    if not shown:
        return None
    names = dict(pair for part in shown["subject"] for pair in part)
    return names.get("commonName")


def spare_buffers() -> None:
    """asyncio sets a buffer of 256 KiB aside for each TLS connection of the process, for as long as
    it is open; a coordinator has one to every pod of its job."""
    SSLProtocol.max_size = RECORD_BYTES
