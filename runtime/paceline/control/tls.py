"""TLS of the control channel in a cluster, with certificates on both ends (C2).

The operator makes all certificates from the job's own keys and mounts them into its pods. An agent
accepts the coordinator's certificate and no other. It checks no host name, because pods are reached
by address. The coordinator accepts callers with a certificate that the job's authority signed. The
kubelet has none, so a caller without a certificate reaches the health check only.
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
"""Maximum size of a TLS record, in bytes."""
CONNECTION_BYTES: Final = 40 * 1024
"""Measured memory of an open connection with such buffers, in bytes (`spare_buffers`)."""


def pinned(certificate: Path | None, own: tuple[Path, Path] | None = None) -> ssl.SSLContext | None:
    """Return the TLS settings of an agent.

    Args:
        certificate: File with the coordinator's certificate. None on one machine, where addresses
            are plain HTTP on the loopback.
        own: Files with the agent's certificate and key. None to show none.

    Returns:
        The settings; None if `certificate` is None.

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
            f"which is not a certificate that can be read: {error}",
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
    """Return the common name in the certificate of a caller, or None without a certificate.

    OpenSSL has checked by then that the job's authority has signed it.

    Args:
        transport: The connection of the caller; None if it is closed.

    Returns:
        The common name, which is the caller's role.
    """
    shown = transport.get_extra_info("peercert") if transport is not None else None
    if not shown:
        return None
    names = dict(pair for part in shown["subject"] for pair in part)
    return names.get("commonName")


def spare_buffers() -> None:
    """Shrink the read buffer of each TLS connection of this process from 256 KiB to one record.

    asyncio keeps the buffer for as long as a connection is open, and a coordinator has one
    connection to each pod of its job.
    """
    SSLProtocol.max_size = RECORD_BYTES
