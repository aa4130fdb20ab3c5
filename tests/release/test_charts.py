"""Charts of a release: Helm pulls them from a registry, and their Artifact Hub data is correct."""

from __future__ import annotations

import json
import os
import subprocess
import tarfile
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from paceline_api.crdgen import DEFINITIONS

from scripts import release, version
from testing.cluster import programs
from testing.cluster.fixtures import or_skip

pytestmark = [pytest.mark.cluster_programs, pytest.mark.processes]

VERSION = version.current()
CRDS = "paceline-crds"
KNOWN = (
    *("category", "changes", "crds", "images", "license", "links"),
    *("operator", "operatorCapabilities"),
)
KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")


@contextmanager
def registry(archive: Path, name: str) -> Iterator[str]:
    """Serve one OCI layout as the distribution specification says, and yield its address."""
    with tarfile.open(archive) as layout:
        files = {entry.name: file.read() for entry in layout if (file := layout.extractfile(entry))}
    [described] = json.loads(files["index.json"])["manifests"]
    tag = described["annotations"]["org.opencontainers.image.ref.name"]
    manifest = files[f"blobs/{described['digest'].replace(':', '/')}"]
    answers = {"/v2/": ("application/json", b"{}")}
    for reference in (tag, described["digest"]):
        answers[f"/v2/{name}/manifests/{reference}"] = (described["mediaType"], manifest)
    answers[f"/v2/{name}/tags/list"] = (
        "application/json",
        json.dumps({"name": name, "tags": [tag]}).encode(),
    )
    for each in (json.loads(manifest)["config"], *json.loads(manifest)["layers"]):
        blob = files[f"blobs/{each['digest'].replace(':', '/')}"]
        answers[f"/v2/{name}/blobs/{each['digest']}"] = ("application/octet-stream", blob)

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, content = answers.get(self.path, ("text/plain", b""))
            self.send_response(200 if self.path in answers else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize("name", release.CHARTS)
def test_helm_pulls_the_archive_from_a_registry(tmp_path: Path, name: str) -> None:
    """Helm reads no layout from disk, so a minimal registry serves it."""
    with or_skip():
        helm = programs.require("helm")
    packed = release.pack(release.ROOT / "charts" / name, 0)
    archive = tmp_path / "chart.oci.tar"
    release.write_chart_archive(archive, release.chart_of(name), packed, 0)
    with registry(archive, name) as address:
        done = subprocess.run(
            [helm, "pull", f"oci://{address}/{name}", f"--version={VERSION}", "--plain-http"],
            cwd=tmp_path,
            env=os.environ | {"HOME": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / f"{name}-{VERSION}.tgz").read_bytes() == packed


# ---- Artifact Hub: https://artifacthub.io/docs/topics/annotations/helm ---------------------------


def annotations_of(name: str) -> dict[str, str]:
    return dict(release.chart_of(name)["annotations"])


def listed(name: str, what: str) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = yaml.safe_load(annotations_of(name)[f"artifacthub.io/{what}"])
    return entries


@pytest.mark.parametrize("name", release.CHARTS)
def test_charts_state_license_and_category(name: str) -> None:
    project = tomllib.loads((release.ROOT / "pyproject.toml").read_text())["project"]
    entries = annotations_of(name)
    assert entries["artifacthub.io/license"] == project["license"]
    assert entries["artifacthub.io/category"] == "ai-machine-learning"
    assert set(entries) <= {f"artifacthub.io/{what}" for what in KNOWN}


def test_the_crd_chart_lists_each_custom_resource() -> None:
    assert {(entry["name"], entry["kind"], entry["version"]) for entry in listed(CRDS, "crds")} == {
        (crd["metadata"]["name"], crd["spec"]["names"]["kind"], version["name"])
        for crd in (yaml.load(text(), yaml.CSafeLoader) for text in DEFINITIONS.values())
        for version in crd["spec"]["versions"]
    }


def test_the_chart_lists_the_image_that_it_runs() -> None:
    """The image of a job is its user's, so the chart does not list it."""
    image = yaml.safe_load((release.ROOT / "charts/paceline/values.yaml").read_text())["image"]
    assert image["tag"] == ""
    [entry] = listed("paceline", "images")
    assert entry["image"] == f"{image['repository']}:{VERSION}"
    assert entry["platforms"] == ["linux/amd64"]
    assert "artifacthub.io/images" not in annotations_of(CRDS)


@pytest.mark.parametrize("name", release.CHARTS)
def test_chart_changes_quote_the_changelog(name: str) -> None:
    notes = " ".join(release.notes(VERSION).split())
    sections = {part.split()[0]: part for part in notes.split(" ### ")[1:]}
    for change in listed(name, "changes"):
        assert change["kind"] in KINDS
        assert change["description"] in sections[change["kind"].capitalize()], (
            f"CHANGELOG.md does not say so as {change['kind']}; use its words in {name}'s chart"
        )


@pytest.mark.parametrize("name", release.CHARTS)
def test_chart_links_are_cited_in_the_docs(name: str) -> None:
    cited = "".join(path.read_text() for path in (release.ROOT / "docs").glob("*.md"))
    for link in listed(name, "links"):
        host, _, number = link["url"].removeprefix("https://").partition("/abs/")
        assert (host, link["name"] != "") == ("arxiv.org", True)
        assert f"arXiv {number}" in cited
