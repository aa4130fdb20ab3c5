"""A real Prometheus: where it is installed, how it is fetched, started and queried.

A Prometheus on the PATH is used as it is. Otherwise the programs are extracted from Debian's
package without installing it: installing would start its service and bring a dozen packages of web
pages.
"""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import tempfile
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testing.cluster.prerequisites import MissingPrerequisiteError
from testing.cluster.programs import cache_folder

PROGRAMS = ("prometheus", "promtool")
APT_TIMEOUT_S = 300.0
READY_TIMEOUT_S = 60.0
ASK_TIMEOUT_S = 30.0
READY = "Server is ready to receive web requests."
KEEP = "100y"
"""Retention time; a recorded run may be of any age."""


def find(name: str) -> Path | None:
    """Return the program from the PATH or the cache, or None."""
    on_path = shutil.which(name)
    kept = cache_folder().parent / "prometheus" / name
    return Path(on_path) if on_path else kept if kept.is_file() else None


def require(name: str) -> Path:
    """Return the program's path, or raise MissingPrerequisiteError if it is missing."""
    path = find(name)
    if path is None:
        raise MissingPrerequisiteError(
            f"{name} is not there", "put one on the PATH, or on a Debian: make cluster-programs"
        )
    return path


def fetch(say: Callable[[str], None]) -> None:
    """Extract the programs from Debian's package if one is missing."""
    if all(find(name) for name in PROGRAMS):
        return
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise MissingPrerequisiteError("no prometheus", "put prometheus and promtool on the PATH")
    folder = cache_folder().parent / "prometheus"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        Path(scratch).chmod(0o755)
        if (download := _run(["apt-get", "download", "prometheus"], scratch)).returncode:
            _run(["apt-get", "update", "--quiet"], scratch)
            download = _run(["apt-get", "download", "prometheus"], scratch)
        packages = [str(path) for path in Path(scratch).glob("prometheus_*.deb")]
        if len(packages) != 1 or _run(["dpkg-deb", "-x", *packages, "x"], scratch).returncode:
            raise MissingPrerequisiteError(
                f"Debian's prometheus cannot be fetched:\n{download.stdout[-2000:]}",
                "put prometheus and promtool on the PATH",
            )
        for name in PROGRAMS:
            (Path(scratch) / "x/usr/bin" / name).replace(folder / name)
    say("took prometheus out of Debian's package")


def _run(command: list[str], folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=APT_TIMEOUT_S,
    )


def backfill(openmetrics: Path, data: Path) -> None:
    """Load samples with timestamps, as if they had been scraped at those times."""
    words = ["tsdb", "create-blocks-from", "openmetrics", str(openmetrics), str(data)]
    done = subprocess.run(
        [require("promtool"), *words], capture_output=True, text=True, timeout=READY_TIMEOUT_S
    )
    assert done.returncode == 0, done.stderr[-2000:]


def free_port() -> int:
    """Return a loopback port that nothing listens on."""
    with socket.socket() as line:
        line.bind(("127.0.0.1", 0))
        return int(line.getsockname()[1])


@contextmanager
def serving(data: Path, config: Path) -> Iterator[Server]:
    """Run Prometheus on loopback at a free port and yield its client; stop it afterwards."""
    command = [
        str(require("prometheus")),
        f"--config.file={config}",
        f"--storage.tsdb.path={data}",
        f"--storage.tsdb.retention.time={KEEP}",
        "--web.listen-address=127.0.0.1:0",
        "--log.format=json",
    ]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        yield Server(_address(process))
    finally:
        process.terminate()
        process.communicate(timeout=READY_TIMEOUT_S)


def _address(process: subprocess.Popen[bytes]) -> str:
    """Read the log until the server is ready and return its URL."""
    assert process.stderr is not None
    address, lines = "", []
    for line in process.stderr:
        lines.append(line.decode())
        entry = json.loads(line)
        if entry.get("msg") == "Listening on":
            address = entry["address"]
        if entry.get("msg") == READY:
            return f"http://{address}"
    raise AssertionError("prometheus has ended:\n" + "".join(lines[-20:]))


class Server:
    """Client of a running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def instant(self, expression: str, at_s: float) -> list[dict[str, Any]]:
        """Return the result of an instant query at a time in seconds since the epoch."""
        return self._ask("query", query=expression, time=at_s)

    def range(
        self, expression: str, from_s: float, to_s: float, step_s: float
    ) -> list[dict[str, Any]]:
        """Return the result of a range query; times are in seconds since the epoch."""
        return self._ask("query_range", query=expression, start=from_s, end=to_s, step=step_s)

    def _ask(self, what: str, **parameters: Any) -> list[dict[str, Any]]:
        body = urllib.parse.urlencode(parameters).encode()
        url = f"{self.url}/api/v1/{what}"
        try:
            with urllib.request.urlopen(url, body, timeout=ASK_TIMEOUT_S) as answer:
                content = json.load(answer)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        result: list[dict[str, Any]] = content["data"]["result"]
        return result
