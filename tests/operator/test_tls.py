"""Certificates of a job's control channel are deterministic, and both ends refuse all others."""

from __future__ import annotations

import ssl
import tempfile
from pathlib import Path

import pytest
from cryptography import x509
from paceline.control.tls import pinned
from paceline_operator.cluster.tls import Pair, certificates_of, operator_context, pair_of
from paceline_operator.core.keys import JobKeys, job_keys

from testing.fake_cluster.beside import server_context


def keys_of(uid: str) -> JobKeys:
    return job_keys(bytes(32), uid)


def shake(server: ssl.SSLContext, client: ssl.SSLContext) -> ssl.SSLObject:
    """Do a whole handshake in memory and return the server's end, or raise ssl.SSLError."""
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
            return one
    raise AssertionError("the handshake does not end")


def agent_of(uid: str, own: Pair | None) -> ssl.SSLContext:
    """Return the TLS context with which an agent calls the coordinator of the job `uid`."""
    with tempfile.TemporaryDirectory() as folder:
        names = [Path(folder) / name for name in ("tls.crt", "own.crt", "own.key")]
        names[0].write_text(pair_of(keys_of(uid)).certificate)
        if own is not None:
            names[1].write_text(own.certificate)
            names[2].write_text(own.private_key)
        context = pinned(names[0], (names[1], names[2]) if own is not None else None)
    assert context is not None
    return context


def name_of(end: ssl.SSLObject) -> str:
    shown = end.getpeercert(binary_form=True)
    assert shown is not None
    (attribute,) = x509.load_der_x509_certificate(shown).subject
    return str(attribute.value)


def test_the_same_job_gives_the_same_certificates() -> None:
    assert certificates_of(keys_of("a")) == certificates_of(keys_of("a"))
    assert pair_of(keys_of("a")) == certificates_of(keys_of("a")).server


def test_the_operator_accepts_only_the_coordinator_of_the_job() -> None:
    mine = operator_context(keys_of("a"))
    shake(server_context(keys_of("a")), mine)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake(server_context(keys_of("b")), mine)


def test_a_coordinator_distinguishes_agents_from_the_operator() -> None:
    server = server_context(keys_of("a"))
    agent = agent_of("a", certificates_of(keys_of("a")).agent)
    assert name_of(shake(server, agent)) == "paceline-agent"
    assert name_of(shake(server, operator_context(keys_of("a")))) == "paceline-operator"


@pytest.mark.parametrize("stranger", ["none", "agent of b", "operator of b", "server of a"])
def test_a_coordinator_refuses_callers_without_a_client_certificate_of_the_job(
    stranger: str,
) -> None:
    """The coordinator's own certificate is for servers, and each pod of the job can read it."""
    shown = {
        "none": None,
        "agent of b": certificates_of(keys_of("b")).agent,
        "operator of b": certificates_of(keys_of("b")).operator,
        "server of a": certificates_of(keys_of("a")).server,
    }[stranger]
    with pytest.raises(ssl.SSLError):
        shake(server_context(keys_of("a")), agent_of("a", shown))


@pytest.mark.parametrize("role", ["agent", "operator"])
def test_a_caller_cannot_pose_as_the_coordinator(role: str) -> None:
    """The certificate of an agent must not let it answer in the coordinator's name."""
    own: Pair = getattr(certificates_of(keys_of("a")), role)
    with tempfile.TemporaryDirectory() as folder:
        crt, key = Path(folder) / "crt", Path(folder) / "key"
        crt.write_text(own.certificate)
        key.write_text(own.private_key)
        posing = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        posing.load_cert_chain(crt, key)
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake(posing, operator_context(keys_of("a")))


def test_certificates_pass_the_strict_check_of_newer_pythons() -> None:
    mine, server = operator_context(keys_of("a")), server_context(keys_of("a"))
    mine.verify_flags |= ssl.VERIFY_X509_STRICT
    server.verify_flags |= ssl.VERIFY_X509_STRICT
    shake(server, mine)
