"""`make monitor` finds the job, configures Prometheus and Grafana, and ends with the job."""

from __future__ import annotations

import json
import os
import subprocess
import threading
from pathlib import Path

import pytest
import yaml
from paceline.agent import targets
from paceline.local.index import RunEntry
from paceline_api.errors import PacelineError

from testing.cluster import monitor, prometheus
from testing.cluster.fixtures import or_skip

FIRST = RunEntry("first", "/runs/first-1", "", 1)
OTHER = RunEntry("other", "/runs/other-1", "", 2)
GRAFANA = """#!/bin/sh
env | grep GF_ > "$GRAFANA_TOLD.draft"
mv "$GRAFANA_TOLD.draft" "$GRAFANA_TOLD"
kill "$JOB_PID"
exec sleep 600
"""
"""A stand-in for Grafana that records its settings and ends the job as soon as it is started."""


def test_monitor_chooses_the_only_job_or_the_named_one() -> None:
    assert monitor.choose([FIRST], "") is FIRST
    assert monitor.choose([FIRST, OTHER], "other") is OTHER
    for running, wanted in (([], ""), ([FIRST, OTHER], ""), ([FIRST], "third")):
        with pytest.raises(PacelineError, match=r"running: (none|first)") as raised:
            monitor.choose(running, wanted)
        assert "JOB=NAME" in (raised.value.hint or "")


def test_an_agent_publishes_its_scrape_target_with_cluster_labels(tmp_path: Path) -> None:
    for attempt in (0, 1):  # the next pod of the slot takes its place
        path = targets.publish(
            tmp_path, job="first", slot=2, attempt=attempt, address="127.0.0.1:9464"
        )
    assert [each.name for each in path.parent.iterdir()] == ["2.json"]
    (target,) = json.loads(path.read_text())
    assert target["targets"] == ["127.0.0.1:9464"]
    labels = target["labels"]
    assert labels.pop("node")
    assert labels == {
        "namespace": "local",
        "paceline_dev_job_name": "first",
        "pod": "first-2-2",
    }


def test_the_prometheus_config_has_the_targets_and_the_rules(tmp_path: Path) -> None:
    config = yaml.safe_load(monitor.prometheus_config(tmp_path))
    (rules,) = config["rule_files"]
    assert Path(rules).is_file()
    (scrape,) = config["scrape_configs"]
    assert scrape["file_sd_configs"] == [{"files": [f"{tmp_path}/targets/*.json"]}]


def test_grafana_is_provisioned_with_data_source_and_dashboards(tmp_path: Path) -> None:
    monitor.provision(tmp_path, "http://127.0.0.1:9090")
    source = yaml.safe_load((tmp_path / "datasources/paceline.yaml").read_text())["datasources"][0]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    assert source["jsonData"]["timeInterval"] == "5s"
    boards = yaml.safe_load((tmp_path / "dashboards/paceline.yaml").read_text())
    folder = Path(boards["providers"][0]["options"]["path"])
    assert len(list(folder.glob("paceline-*.json"))) == 3


@pytest.mark.processes
def test_monitor_starts_both_programs_and_ends_with_the_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with or_skip():
        prometheus.require("prometheus")
    variables, program = tmp_path / "told", tmp_path / "bin/grafana"
    program.parent.mkdir()
    program.write_text(GRAFANA)
    program.chmod(0o755)
    with subprocess.Popen(["sleep", "600"]) as job:
        deadline = threading.Timer(120.0, job.kill)
        deadline.start()
        path = f"{program.parent}:{os.environ['PATH']}"
        env = {"PATH": path, "GRAFANA_TOLD": str(variables), "JOB_PID": str(job.pid)}
        monitor.monitor(RunEntry("first", str(tmp_path), "", job.pid), env)
        deadline.cancel()
    output = capsys.readouterr().out
    assert "Prometheus  http://127.0.0.1:" in output
    assert "/d/paceline-job?var-namespace=local&var-job=first&var-scrape=5s" in output
    assert "the job has ended" in output
    given = dict(line.split("=", 1) for line in variables.read_text().splitlines())
    assert given["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert not Path(given["GF_PATHS_PROVISIONING"]).exists(), "nothing is left over"
