"""`make monitor`: Prometheus, and Grafana if installed, over a job that runs on this machine.

JOB=NAME selects one of several jobs. Both servers listen on loopback, keep their data in a scratch
folder, and end with the job or with Ctrl-C. Each agent of a local run leaves a file with the
addresses to scrape. Prometheus watches these files, so it discovers ranks that join.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import yaml
from paceline.agent.targets import FOLDER
from paceline.local import index
from paceline_api.errors import EXIT_BAD_INPUT, PacelineError

from testing.cluster import prometheus
from testing.cluster.prerequisites import MissingPrerequisiteError
from testing.temporary import temporary_folder

ROOT: Final = Path(__file__).resolve().parent.parent.parent
CHART: Final = ROOT / "charts/paceline"
SCRAPE_S: Final = 5
HOMES: Final = ("/usr/share/grafana", "/usr/local/share/grafana", "/opt/grafana")
"""Folders where packages install Grafana's pages; $GF_PATHS_HOME overrides them."""
END_S: Final = 20.0


def choose(running: list[index.RunEntry], wanted: str) -> index.RunEntry:
    """Return the running job called `wanted`, or the only job; raise PacelineError if ambiguous."""
    entries = [entry for entry in running if wanted in ("", entry.job)]
    if len(entries) == 1:
        return entries[0]
    names = ", ".join(sorted(entry.job for entry in running)) or "none"
    raise PacelineError(
        f"{len(entries)} jobs{f' called {wanted}' * bool(wanted)} run on this machine, not one "
        f"(running: {names})",
        hint="start one in another terminal: paceline run JOB.yaml; among several choose with "
        "make monitor JOB=NAME",
        exit_code=EXIT_BAD_INPUT,
    )


def prometheus_config(run_dir: Path) -> str:
    """Return a Prometheus configuration that scrapes the targets listed below `run_dir`."""
    config = {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": [str(CHART / "rules/paceline.yaml")],
        "scrape_configs": [
            {
                "job_name": "paceline-workers",
                "file_sd_configs": [{"files": [str(run_dir / FOLDER / "*.json")]}],
            }
        ],
    }
    return yaml.safe_dump(config, sort_keys=False)


def provision(folder: Path, prometheus_url: str) -> None:
    """Write the provisioning files of Grafana's data source and dashboards."""
    source = {
        "name": "Prometheus",
        "type": "prometheus",
        "uid": "prometheus",
        "url": prometheus_url,
        "access": "proxy",
        "isDefault": True,
        "jsonData": {"timeInterval": f"{SCRAPE_S}s"},
    }
    boards = {
        "name": "Paceline",
        "type": "file",
        "folder": "Paceline",
        "options": {"path": str(CHART / "dashboards")},
    }
    for kind, content in (
        ("datasources", {"apiVersion": 1, "datasources": [source]}),
        ("dashboards", {"apiVersion": 1, "providers": [boards]}),
    ):
        (folder / kind).mkdir(parents=True)
        (folder / kind / "paceline.yaml").write_text(yaml.safe_dump(content, sort_keys=False))


@contextmanager
def grafana(
    program: str, folder: Path, prometheus_url: str, env: Mapping[str, str]
) -> Iterator[str]:
    """Run Grafana without log-in, on loopback only, and yield its URL."""
    provision(folder / "provisioning", prometheus_url)
    port = prometheus.free_port()
    home = env.get("GF_PATHS_HOME") or next((h for h in HOMES if Path(h).is_dir()), HOMES[0])
    own = {
        "GF_PATHS_DATA": str(folder / "data"),
        "GF_PATHS_LOGS": str(folder / "log"),
        "GF_PATHS_PROVISIONING": str(folder / "provisioning"),
        "GF_SERVER_HTTP_ADDR": "127.0.0.1",
        "GF_SERVER_HTTP_PORT": str(port),
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Admin",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }
    with (folder / "grafana.log").open("w") as log:
        process = subprocess.Popen(
            [program, "server", "--homepath", home],
            env={**env, **own},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(timeout=END_S)


def say(line: str) -> None:
    """Print one line and flush it."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def monitor(entry: index.RunEntry, env: Mapping[str, str]) -> None:
    """Run the servers until the job's runner exits."""
    runner = os.pidfd_open(entry.pid)
    with ExitStack() as parts:
        parts.callback(os.close, runner)
        folder = parts.enter_context(temporary_folder())
        config = folder / "prometheus.yaml"
        config.write_text(prometheus_config(Path(entry.run_dir).resolve()))
        server = parts.enter_context(prometheus.serving(folder / "data", config))
        say(f"Prometheus  {server.url}  scrapes {entry.job} every {SCRAPE_S} s")
        program = shutil.which("grafana", path=env.get("PATH"))
        if program is None:
            say("Grafana     none on the PATH; docs/monitoring.md has one with docker compose")
        else:
            url = parts.enter_context(grafana(program, folder / "grafana", server.url, env))
            query = f"var-namespace=local&var-job={entry.job}&var-scrape={SCRAPE_S}s&refresh=5s"
            say(f"Grafana     {url}/d/paceline-job?{query}&from=now-15m")
        say("ends with the job, or with Ctrl-C")
        select.select([runner], [], [])
        say("the job has ended")


def _stop(number: int, _frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def main() -> int:
    """Run the command and return its exit code."""
    signal.signal(signal.SIGTERM, _stop)
    try:
        monitor(choose(index.running(os.environ), os.environ.get("JOB", "")), os.environ)
    except PacelineError as error:
        sys.stderr.write(error.render() + "\n")
        return error.exit_code
    except MissingPrerequisiteError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
