"""The control channel's certificate: the same bytes each time, and nobody else's is accepted."""

from __future__ import annotations

import ssl

import pytest
from paceline_operator.cluster.tls import pair_of, pinned
from paceline_operator.core.keys import job_keys

from testing.fake_cluster.beside import server_context


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> None:
    """A whole handshake in memory. Raises ssl.SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = server.wrap_bio(to_server, to_client, server_side=True)
    two = client.wrap_bio(to_client, to_server, server_hostname=None)
    for _ in range(10):
        ends = []
        for side in (two, one):
            try:
                side.do_handshake()
                ends.append(True)
            except ssl.SSLWantReadError:
                ends.append(False)
        if all(ends):
            return
    raise AssertionError("the handshake does not end")


def server_of(uid: str) -> ssl.SSLContext:
    return server_context(job_keys(bytes(32), uid))


def test_the_same_job_gives_the_same_certificate() -> None:
    assert pair_of(job_keys(bytes(32), "a")) == pair_of(job_keys(bytes(32), "a"))


def test_a_job_accepts_its_own_coordinator_only() -> None:
    mine = pinned(pair_of(job_keys(bytes(32), "a")).certificate)
    shake(server_of("a"), mine)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake(server_of("b"), mine)


def test_it_also_passes_the_strict_check_of_newer_pythons() -> None:
    mine = pinned(pair_of(job_keys(bytes(32), "a")).certificate)
    mine.verify_flags |= ssl.VERIFY_X509_STRICT
    shake(server_of("a"), mine)
