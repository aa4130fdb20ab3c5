"""Images from a Dockerfile and from a release run on nodes, without files of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import oci, release, version
from testing.cluster import image_build
from testing.cluster.image_build import ImageBuilder, ImageBuildError
from testing.cluster.nodes import Cluster

pytestmark = [pytest.mark.exhaustive, pytest.mark.processes]
TAG = "paceline.test/two-stages:1"
DOCKERFILE = """
ARG BASE
FROM ${BASE} AS build
RUN python3 -m venv /app && test -s /etc/ssl/certs/ca-certificates.crt
FROM ${BASE} AS small
COPY --from=build /app /app
USER 65532:65532
ENTRYPOINT ["/app/bin/python"]
"""


def test_a_target_of_a_dockerfile_runs_on_a_node(
    cluster: Cluster, cluster_namespace: str, image_builder: ImageBuilder, tmp_path: Path
) -> None:
    recipe = tmp_path / "Dockerfile"
    recipe.write_text(DOCKERFILE)
    base = {"BASE": image_builder.base()}
    archive = image_builder.build(
        TAG, context=tmp_path, dockerfile=recipe, target="small", arguments=base
    )
    cluster.load_image(archive)
    says = "import os, sys; print(sys.prefix, os.getuid(), os.path.exists('/etc/pip.conf'))"
    container = {"name": "main", "image": TAG, "imagePullPolicy": "Never", "args": ["-c", says]}
    spec = {"restartPolicy": "Never", "containers": [container]}
    pods = f"/api/v1/namespaces/{cluster_namespace}/pods"
    cluster.api.create(pods, {"metadata": {"name": "built"}, "spec": spec})
    cluster.api.wait(f"{pods}/built", lambda pod: pod["status"]["phase"] == "Succeeded", 60)
    assert cluster.api.text(f"{pods}/built/log").split() == ["/app", "65532", "False"]


def test_the_operator_of_a_release_runs_on_a_node(
    cluster: Cluster, cluster_namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "LEVEL", 1)
    release.release(tmp_path, None, ["operator"], image_build.make_base())
    cluster.load_image(tmp_path / f"paceline-operator-{version.current()}.oci.tar")
    container = {
        "name": "main",
        "image": f"paceline/operator:{version.current()}",
        "imagePullPolicy": "Never",
        "args": ["--help"],
        "securityContext": {"runAsNonRoot": True, "readOnlyRootFilesystem": True},
    }
    spec = {"restartPolicy": "Never", "containers": [container]}
    pods = f"/api/v1/namespaces/{cluster_namespace}/pods"
    cluster.api.create(pods, {"metadata": {"name": "released"}, "spec": spec})
    cluster.api.wait(f"{pods}/released", lambda pod: pod["status"]["phase"] == "Succeeded", 60)
    assert "--own-namespace" in cluster.api.text(f"{pods}/released/log")


def test_a_failing_build_step_is_quoted_in_the_error(
    image_builder: ImageBuilder, tmp_path: Path
) -> None:
    recipe = tmp_path / "Dockerfile"
    recipe.write_text(f"FROM {image_builder.base()}\nRUN echo because >&2; exit 3\n")
    with pytest.raises(ImageBuildError, match="because"):
        image_builder.build("paceline.test/fails:1", context=tmp_path, dockerfile=recipe)
