"""`python -m paceline.coordinator` as a process: how it starts, restarts and ends."""

from __future__ import annotations

import dataclasses
import os
import resource
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pytest
from paceline_api.jobfile import JobFile
from paceline_api.reading.load import parse_job
from paceline_api.resolve import resolve
from paceline_api.rounds import RoundSettings
from paceline_api.settings import ResolvedJob
from paceline_api.types.enums import MaxAgePolicy, Mode, Pacing

from testing import left_files

pytestmark = pytest.mark.processes

START_S = 60.0
CONNECTIONS = 60
EACH_KIB_MAX = 120
"""Memory that one TLS connection may cost the process. asyncio's own buffer alone is 256 KiB."""
JOB = """
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: job}
spec:
  replicas: 100
  collective: {COLLECTIVE}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, train.py]}]
"""


def make_job(collective: str = "{}") -> ResolvedJob:
    return resolve(parse_job(JOB.replace("{COLLECTIVE}", collective)))


def environment(folder: Path, **more: str) -> dict[str, str]:
    spec = folder / "job.json"
    spec.write_text(JobFile.of(make_job(), command=["python"]).to_json())
    own = {
        "PACELINE_JOB": "job",
        "PACELINE_TOKEN": "of-ranks",
        "PACELINE_OPERATOR_TOKEN": "secret",
        "PACELINE_SPEC": str(spec),
        "PACELINE_LISTEN": "127.0.0.1:0",
    }
    outer = {name: v for name, v in os.environ.items() if not name.startswith("PACELINE_")}
    return outer | own | more


def limited(files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))


@contextmanager
def coordinator(env: dict[str, str], *fds: int) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "paceline.coordinator"]
    with subprocess.Popen(
        argv, env=env, stderr=subprocess.PIPE, text=True, pass_fds=fds
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ask(port: int, path: str) -> bytes:
    """Send a GET, and retry until the server answers."""
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}", headers={"Authorization": "Bearer secret"}
    )
    end = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_S) as response:
                return bytes(response.read())
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


def test_an_inherited_listening_socket_outlives_a_killed_coordinator(tmp_path: Path) -> None:
    """A client that connects in between waits, and no other process can take the port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port, fd = listener.getsockname()[1], listener.fileno()
        env = environment(tmp_path, PACELINE_LISTEN_FD=str(fd))
        with coordinator(env, fd) as first:
            assert b'"job":"job"' in ask(port, "/v1/status")
            first.kill()
            first.wait(START_S)
            waiting = socket.create_connection(("127.0.0.1", port), timeout=START_S)
            waiting.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        with coordinator(env, fd) as second:
            assert waiting.recv(100).startswith(b"HTTP/1.1 200")
            waiting.close()
            second.terminate()
            assert second.wait(START_S) == 0


def port_of(process: subprocess.Popen[str]) -> int:
    """Wait until a process listens, and return its only port."""
    end = time.monotonic() + START_S
    while not (ports := left_files.listening(process.pid)):
        assert process.poll() is None, "it has ended"
        assert time.monotonic() < end, "it does not listen"
        time.sleep(0.02)
    (port,) = ports
    return int(port.rpartition("TCP port ")[2])


def test_a_restarted_coordinator_can_reuse_its_port_at_once(tmp_path: Path) -> None:
    """A connection to the killed process is still open.

    The kernel therefore does not give this port to a process that asks for any port.
    """
    with coordinator(environment(tmp_path)) as first:
        port = port_of(first)
        left = socket.create_connection(("127.0.0.1", port), timeout=START_S)
        ask(port, "/healthz")
        first.send_signal(signal.SIGKILL)
        first.wait(START_S)
    with left, coordinator(environment(tmp_path, PACELINE_LISTEN=f"127.0.0.1:{port}")):
        assert ask(port, "/healthz")


def test_a_port_in_use_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        env = environment(tmp_path, PACELINE_LISTEN=f"127.0.0.1:{port}")
        with coordinator(env) as process:
            _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == 4
    assert f"cannot listen on 127.0.0.1:{port}: address already in use" in stderr
    assert "Traceback" not in stderr


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("PACELINE_TOKEN", "", "PACELINE_TOKEN is not set"),
        ("PACELINE_OPERATOR_TOKEN", "", "PACELINE_OPERATOR_TOKEN is not set"),
        ("PACELINE_SPEC", "/nowhere.json", "/nowhere.json cannot be read"),
        ("PACELINE_LISTEN", "7070", 'PACELINE_LISTEN is "7070"'),
        ("PACELINE_TLS_CERT", "cert.pem", "PACELINE_TLS_KEY is not set"),
    ],
)
def test_an_invalid_environment_variable_is_reported(
    tmp_path: Path, name: str, value: str, problem: str
) -> None:
    with coordinator(environment(tmp_path, **{name: value})) as process:
        _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == 2
    assert problem in stderr
    assert "Traceback" not in stderr


@contextmanager
def over_tls(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int, ssl.SSLContext]]:
    """Yield a coordinator, its port, and the TLS context with which a client trusts it."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-days", "1"]
    names = ["-subj", "/CN=job", "-addext", "subjectAltName=IP:127.0.0.1", "-out", str(cert)]
    subprocess.run([*make, *names, "-keyout", str(key)], check=True, capture_output=True)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        env = environment(
            folder,
            PACELINE_LISTEN_FD=str(listener.fileno()),
            PACELINE_TLS_CERT=str(cert),
            PACELINE_TLS_KEY=str(key),
        )
        with coordinator(env, listener.fileno()) as process:
            context = ssl.create_default_context(cafile=str(cert))
            yield process, listener.getsockname()[1], context


needs_openssl = pytest.mark.skipif(
    not shutil.which("openssl"), reason="openssl makes the certificate"
)


@needs_openssl
def test_the_coordinator_serves_over_tls(tmp_path: Path) -> None:
    with over_tls(tmp_path) as (_, port, context):
        url = f"https://127.0.0.1:{port}/healthz"
        with urllib.request.urlopen(url, timeout=START_S, context=context) as response:
            assert response.status == 200


@needs_openssl
def test_a_tls_connection_uses_little_memory(tmp_path: Path) -> None:
    """A limit of 1 GiB must suffice for all ranks and agents of a job."""

    def connect() -> ssl.SSLSocket:
        bare = socket.create_connection(("127.0.0.1", port), timeout=START_S)
        secure = context.wrap_socket(bare, server_hostname="127.0.0.1")
        secure.sendall(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert secure.recv(100).startswith(b"HTTP/1.1 200")
        return secure

    with over_tls(tmp_path) as (process, port, context), ExitStack() as open_ones:
        for _ in range(10):  # warm up: the first connections have one-time costs
            open_ones.enter_context(connect())
        before = resident_kib(process.pid)
        for _ in range(CONNECTIONS):
            open_ones.enter_context(connect())
        each_kib = (resident_kib(process.pid) - before) / CONNECTIONS
    assert each_kib < EACH_KIB_MAX


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1])


def test_an_invalid_certificate_is_reported(tmp_path: Path) -> None:
    spec = str(tmp_path / "job.json")
    env = environment(tmp_path, PACELINE_TLS_CERT=spec, PACELINE_TLS_KEY=spec)
    with coordinator(env) as process:
        _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == 2
    assert "PACELINE_TLS_CERT and PACELINE_TLS_KEY name no usable pair" in stderr


def test_a_file_that_is_not_a_frozen_job_is_refused(tmp_path: Path) -> None:
    env = environment(tmp_path)
    Path(env["PACELINE_SPEC"]).write_text('{"command": ["x"]}')
    with coordinator(env) as process:
        _, stderr = process.communicate(timeout=START_S)
    assert process.returncode == 2
    assert f"error: {env['PACELINE_SPEC']} is not the file of a frozen job" in stderr
    assert "hint: PACELINE_SPEC names it" in stderr


def test_round_settings_follow_from_the_job() -> None:
    text = (
        "{mode: Deadline, quorum: 50%, deadline: 20ms, grace: 3ms, fullEvery: 10, "
        "pacing: Round, maxAgePolicy: Decay, maxAge: 2, benchAfter: 5s}"
    )
    got = RoundSettings.of(make_job(text).collective)
    want = RoundSettings(
        mode=Mode.DEADLINE,
        quorum_percent=50,
        deadline_ns=20_000_000,
        grace_ns=3_000_000,
        grace_share=0.0,
        full_every=10,
        pacing=Pacing.ROUND,
        late=MaxAgePolicy.DECAY,
        max_age=2,
        bench_after_ns=5 * 10**9,
    )
    kept = ("normalisation", "warmup_rounds", "decay_factor", "buffers_every", "hash_every")
    for name in RoundSettings.__struct_fields__:
        if name not in kept:
            assert getattr(got, name) == getattr(want, name), name


def test_a_file_limit_too_low_for_the_job_is_reported(tmp_path: Path) -> None:
    env = environment(tmp_path)
    job = dataclasses.replace(make_job(), replicas=500, procs_per_replica=2)
    (tmp_path / "job.json").write_text(JobFile.of(job, command=["python"]).to_json())
    ended = subprocess.run(
        [sys.executable, "-m", "paceline.coordinator"],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=START_S,
        preexec_fn=partial(limited, 1024),
    )
    assert ended.returncode == 2
    error, hint = ended.stderr.splitlines()
    assert "the coordinator needs up to 12" in error, error
    assert error.endswith("open files and sockets, and the limit is 1024")
    assert hint.startswith("hint: allow 12")
