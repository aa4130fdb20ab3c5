"""Input that people write: job files, values on a command line, kubeconfigs and their plugins."""

from __future__ import annotations

import subprocess
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Final
from unittest import mock

import yaml
from paceline.core.faults import EXAMPLES, FaultError, parse_faults
from paceline.environment import AgentSettings, SettingsError
from paceline.jobs.core.lines import parse_line
from paceline_api.access import login, plugin
from paceline_api.access.errors import AccessError, PluginError
from paceline_api.errors import InvalidJobError, JobFileError
from paceline_api.reading.load import load_job
from paceline_api.reading.overrides import with_overrides
from paceline_api.types.durations import parse_duration, parse_percent

from testing.bad_specs import GOOD
from testing.fuzz.target import Form, Reader, Target, pure

YAML_BYTES_MAX: Final = 4096
YAML_CPU_MS: Final = 100.0
"""CPU time for a job file: the YAML reader is written in Python and takes 10 ms for 700 bytes of a
correct job."""
KUBECONFIG_BYTES_MAX: Final = 1024
KUBECONFIG_CPU_MS: Final = 1500.0
"""CPU time for a kubeconfig. The package `kubernetes` reads it with plain PyYAML, whose scanner
takes half a second for 1,000 open brackets. The file is the user's own."""

_KUBECONFIG: Final = b"""\
apiVersion: v1
kind: Config
current-context: one
contexts:
- name: one
  context: {cluster: here, user: me, namespace: team}
clusters:
- name: here
  cluster: {server: "http://127.0.0.1:1", proxy-url: "http://127.0.0.1:2"}
users:
- name: me
  user: {token: abc, as: somebody, as-groups: [a, b], as-user-extra: {scopes: [c]}}
"""
_CREDENTIAL: Final = (
    b'{"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential",'
    b'"status":{"token":"abc","expirationTimestamp":"2026-11-27T10:00:00Z"}}'
)
_EXEC_KUBECONFIG: Final = _KUBECONFIG.replace(
    b"token: abc,",
    b"exec: {apiVersion: client.authentication.k8s.io/v1, command: sh, args: [a], "
    b"env: [{name: A, value: b}], provideClusterInfo: true},",
)

_AGENT: Final = b"\n".join(
    b"PACELINE_" + line
    for line in (
        *(b"JOB=digits", b"SLOT=0", b"ATTEMPT=1", b"PROCS=2", b"COORDINATOR=http://here:1"),
        *(b"TOKEN=t", b"RUN_DIR=/runs/digits-1", b"ENV=/runs/digits-1/job.json", b"LOCAL=1"),
        *(b"DRAIN_GRACE_SECONDS=1.5", b"METRICS_PORT=9000", b"DRAINED_EXIT_CODE=3"),
    )
).replace(b"ENV=", b"SPEC=")


def _text(data: bytes) -> str:
    """Decode like the command line: bytes that are not UTF-8 become surrogates."""
    return data.decode(errors="surrogateescape")


def _job_file(_stack: ExitStack, folder: Path) -> Reader:
    path = folder / "job.yaml"

    def reader(data: bytes) -> object:
        path.write_bytes(data)
        return load_job(path)

    return reader


def _override(data: bytes) -> object:
    return with_overrides(yaml.safe_load(GOOD), [_text(data)])


def _words(data: bytes) -> object:
    """Parse single values; ValueError is the parsers' own error."""
    text = _text(data)
    for parse in (parse_duration, parse_percent):
        try:
            return parse(text)
        except ValueError:
            continue
    return None


def _kubeconfig(stack: ExitStack, folder: Path) -> Reader:
    """Return a reader for kubeconfigs; a plugin is not started, its answer is constant."""
    path = folder / "config"
    programs = SimpleNamespace(
        DEVNULL=subprocess.DEVNULL,
        PIPE=subprocess.PIPE,
        TimeoutExpired=subprocess.TimeoutExpired,
        run=lambda *_, **__: SimpleNamespace(returncode=0, stdout=_CREDENTIAL.decode(), stderr=""),
    )
    stack.enter_context(mock.patch.object(plugin, "subprocess", programs))

    def reader(data: bytes) -> object:
        path.write_bytes(data)
        return login.log_in(path).headers()

    return reader


def _environment(data: bytes) -> object:
    """Read the environment variables of an agent, one on each line."""
    pairs = (line.partition("=") for line in _text(data).split("\n"))
    return AgentSettings.from_environment({name: value for name, _, value in pairs})


def _plugin(data: bytes) -> object:
    return plugin._read(data.decode(errors="replace"), "plugin", plugin.APIS[0])


TARGETS: Final = (
    Target(
        name="environment",
        start=pure(_environment),
        errors=(SettingsError,),
        seeds=(_AGENT,),
        words=(b"\n", b"=", b"9" * 5000, b"PACELINE_SLOT=", b"PACELINE_ATTEMPT=-", b"nan", b"\0"),
        bytes_max=16 * 1024,
    ),
    Target(
        name="job-yaml",
        start=_job_file,
        errors=(InvalidJobError, JobFileError),
        seeds=(GOOD.encode(),),
        form=Form.YAML,
        words=(
            b"&a ",
            b"*a",
            b"<<: ",
            b"!!int ",
            b"- ",
            b": ",
            b"? ",
            b"|\n",
            b"---\n",
            b"{",
            b"[",
        ),
        bytes_max=YAML_BYTES_MAX,
        cpu_ms=YAML_CPU_MS,
    ),
    Target(
        name="override",
        start=pure(_override),
        errors=(InvalidJobError,),
        seeds=(b"spec.replicas=4", b"spec.template.spec.containers[0].env=[{name: a}]"),
        words=(b"spec.", b"[0]", b"[9999]", b"=", b"&a [*a]", b"{<<: ", b"!!timestamp 2001-99-99"),
        bytes_max=YAML_BYTES_MAX,
        cpu_ms=YAML_CPU_MS,
    ),
    Target(
        name="duration",
        start=pure(_words),
        errors=(),
        seeds=(b"1m30s", b"50ms", b"75%"),
        words=(b"1h", b"9" * 30, b".", b"ms", "\u0663".encode()),
    ),
    Target(
        name="faults",
        start=pure(lambda data: parse_faults(_text(data))),
        errors=(FaultError,),
        seeds=tuple(text.encode() for text in EXAMPLES.values()),
        words=(b"rank=", b",at=round:", b"9" * 5000, b",", b";", "\u0663".encode()),
        bytes_max=16 * 1024,
    ),
    Target(
        name="kubeconfig",
        start=_kubeconfig,
        errors=(AccessError,),
        seeds=(_KUBECONFIG, _EXEC_KUBECONFIG),
        form=Form.YAML,
        words=(b"&a ", b"*a", b"<<: ", b"!!int ", b"- ", b": ", b"https://", b"\0", b"{", b"["),
        bytes_max=KUBECONFIG_BYTES_MAX,
        cpu_ms=KUBECONFIG_CPU_MS,
    ),
    Target(
        name="exec-plugin",
        start=pure(_plugin),
        errors=(PluginError,),
        seeds=(_CREDENTIAL,),
        form=Form.JSON,
        words=(b"0001-01-01T00:00:00", b"9999-12-31T23:59:59-23:59", b"+00:00"),
    ),
    Target(
        name="log-line",
        start=pure(lambda data: parse_line(data.decode(errors="replace"), source="pod", procs=2)),
        errors=(),
        seeds=(
            b"2026-11-27T10:00:00.123456789Z [rank 0.1#1000] loss 0.5",
            b"2026-11-27T10:00:00+01:00 hello",
        ),
        words=(b"[rank ", b"9" * 5000, b"0001-01-01T00:00:00", b"9999-12-31T23:59:59", b"-23:59"),
        bytes_max=16 * 1024,
    ),
)
