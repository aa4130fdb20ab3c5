"""Parts of the test harness that need no cluster: programs, images, instances and clients."""

from __future__ import annotations

import asyncio
import fcntl
import json
import shutil
import tarfile
from pathlib import Path
from typing import IO, Any, cast

import pytest

from testing.cluster import (
    host_python,
    instance,
    kubeconfigs,
    leftovers,
    other_release,
    prerequisites,
    programs,
)
from testing.cluster.api import Api, ApiError
from testing.cluster.audit import requests_of
from testing.cluster.certificates import Authority
from testing.cluster.fake_kubelet import EVICTED, EXIT_CODE, FakeKubelet, Metadata, Pod, PodStatus
from testing.cluster.images import Image


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv(programs.CACHE_VARIABLE, str(tmp_path))
    monkeypatch.delenv(programs.ASSETS_VARIABLE, raising=False)
    programs.cache_folder().mkdir(parents=True)
    return programs.cache_folder()


def test_a_missing_program_names_the_make_target(empty_cache: Path) -> None:
    with pytest.raises(prerequisites.MissingPrerequisiteError, match="make cluster-programs"):
        programs.require("kube-apiserver")


def test_a_program_built_by_another_recipe_counts_as_missing(empty_cache: Path) -> None:
    (empty_cache / "etcd").touch()
    stamp = empty_cache / "etcd.recipe"
    stamp.write_text("an older one")
    assert programs.find("etcd") is None
    stamp.write_text(programs.PROGRAMS["etcd"].digest("etcd"))
    assert programs.find("etcd") == empty_cache / "etcd"


def test_programs_provided_by_the_user_take_precedence(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(programs.ASSETS_VARIABLE, str(tmp_path))
    (tmp_path / "etcd").touch()
    assert programs.require("etcd") == tmp_path / "etcd"


def test_staging_modules_match_the_kubernetes_version() -> None:
    """Kubernetes 1.N.P publishes the modules of its own repository as 0.N.P."""
    text = (programs.MODULE / "go.mod").read_text()
    assert f"k8s.io/kubernetes {programs.PINNED}\n" in text
    replaced = [line.split() for line in text.splitlines() if "=>" in line]
    assert len(replaced) == 31
    for old, _, new, version in replaced:
        assert (old, version) == (new, programs.PINNED.replace("v1.", "v0."))


def test_another_release_is_built_with_its_own_staging_modules() -> None:
    published = """module k8s.io/kubernetes
go 1.25.0
godebug default=go1.25
require github.com/spf13/cobra v1.10.0
replace (
	k8s.io/api => ./staging/src/k8s.io/api
	k8s.io/new => ./staging/src/k8s.io/new
)
"""
    assert other_release.go_mod("v1.35.4", published).splitlines()[1:] == [
        "go 1.25.0",
        "godebug default=go1.25",
        "require k8s.io/kubernetes v1.35.4",
        "replace k8s.io/api => k8s.io/api v0.35.4",
        "replace k8s.io/new => k8s.io/new v0.35.4",
    ]


def test_an_incomplete_kubernetes_version_is_refused(tmp_path: Path) -> None:
    with pytest.raises(prerequisites.MissingPrerequisiteError, match="write it whole"):
        other_release.module("1.35", tmp_path)


def test_other_kubernetes_releases_have_their_own_folder(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    etcd, server = programs.PROGRAMS["etcd"], programs.PROGRAMS["kube-apiserver"]
    before = etcd.digest("etcd"), server.digest("kube-apiserver")
    monkeypatch.setattr(programs, "KUBERNETES", "v1.35.4")
    folders = {name: programs.folder_of(program) for name, program in programs.PROGRAMS.items()}
    assert folders["kubectl"] == folders["kube-apiserver"] == empty_cache.parent / "v1.35.4"
    assert folders["etcd"] == folders["helm"] == folders["coredns"] == empty_cache
    assert etcd.digest("etcd") == before[0], "built again for nothing"
    assert server.digest("kube-apiserver") != before[1]


def test_missing_packages_are_named() -> None:
    wanted = {"sh": "dash", "no-such-program": "some-package", "/no/such/file": "other-package"}
    assert prerequisites.missing_packages(wanted) == ["other-package", "some-package"]


def test_images_are_reproducible_byte_for_byte(tmp_path: Path) -> None:
    image = Image("test/it:1", {"bin/it": b"#!"}, {"it": "bin/it"}, {"tmp": 0o1777}, ("/bin/it",))
    first, second = image.write(tmp_path / "1.tar"), image.write(tmp_path / "2.tar")
    assert first.read_bytes() == second.read_bytes()
    with tarfile.open(first) as archive:
        manifest = json.load(archive.extractfile("manifest.json") or pytest.fail("no manifest"))
        assert manifest[0]["RepoTags"] == ["test/it:1"]
        with tarfile.open(fileobj=archive.extractfile("layer.tar")) as layer:
            assert {(entry.name, entry.mode) for entry in layer} == {
                ("tmp", 0o1777),
                ("bin/it", 0o755),
                ("it", 0o644),
            }


def test_concurrent_clusters_share_nothing() -> None:
    """Two instances at once have different numbers, folders, address ranges and ports."""
    first, second = instance.acquire(), instance.acquire()
    try:
        assert first.index != second.index
        assert first.folder != second.folder
        assert first.pod_range != second.pod_range
        ports = [room.free_port() for room in (first, first, second, second)]
        assert len(set(ports)) == 4
    finally:
        first.release(keep_logs=False)
        second.release(keep_logs=False)
    assert not first.folder.exists()


@pytest.fixture
def clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use separate instance numbers and remove only folders: a running cluster may share names."""

    def remove(name: str, folder: Path, *, keep_logs: bool) -> None:
        shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr(leftovers, "remove", remove)
    monkeypatch.setattr(instance, "base_folder", lambda: tmp_path / "clusters")
    return tmp_path / "clusters"


def test_the_last_cluster_removes_its_lock_and_the_common_folder(
    clusters: Path,
) -> None:
    first, second = instance.acquire(), instance.acquire()
    first.release(keep_logs=False)
    assert sorted(path.name for path in clusters.iterdir()) == ["1", "1.lock"]
    assert instance.take(1) is None
    second.release(keep_logs=False)
    assert not clusters.exists()


def test_a_lock_file_removed_before_it_is_locked_is_created_again(
    clusters: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[Path] = []
    real = fcntl.flock

    def flock(file: IO[str], operation: int) -> None:
        if not removed:
            removed.append(Path(file.name))
            removed[0].unlink()
        real(file, operation)

    monkeypatch.setattr(instance.fcntl, "flock", flock)  # type: ignore[attr-defined]
    room = instance.take(0)
    assert room is not None
    assert removed[0].exists()
    assert instance.take(0) is None
    room.release(keep_logs=False)
    assert not clusters.exists()


def test_logs_are_kept_on_request() -> None:
    room = instance.acquire()
    (room.folder / "logs").mkdir()
    (room.folder / "logs" / "etcd.log").touch()
    (room.folder / "etcd").mkdir()
    room.release(keep_logs=True)
    assert [path.name for path in room.folder.iterdir()] == ["logs"]
    again = instance.take(room.index)
    assert again is not None
    assert not list(again.folder.iterdir()), "the next run starts with nothing"
    again.release(keep_logs=False)


def test_host_python_folders_are_mounted_without_overlap() -> None:
    folders = host_python.mounted_folders()
    assert Path("/usr") in folders
    for folder in folders:
        assert not any(up in folders for up in folder.parents), f"{folder} is in another"
    assert any(Path(host_python.PYTHON).is_relative_to(folder) for folder in folders)


def test_an_api_error_quotes_the_server_message() -> None:
    body = json.dumps({"kind": "Status", "message": "pods is forbidden"})
    assert str(ApiError(403, "GET", "/api", body)) == "GET /api: 403 pods is forbidden"
    assert "no JSON" in str(ApiError(502, "GET", "/api", "no JSON"))


def test_a_kubeconfig_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    """The private key has the same permissions, and a refused connection is an error."""
    authority = Authority(tmp_path / "pki")
    pair = authority.client("admin")
    target = tmp_path / "admin.yaml"
    path = kubeconfigs.write(target, "https://127.0.0.1:1", authority.certificate, pair)
    assert path.stat().st_mode & 0o077 == 0
    assert pair.key.stat().st_mode & 0o077 == 0
    with pytest.raises(ConnectionError, match="refused"):
        Api(path).get("/version")


def test_audit_entries_are_counted_by_user(tmp_path: Path) -> None:
    def entry(user: str, verb: str, **what: str) -> str:
        ref = {"requestURI": "/healthz"} | ({"objectRef": what} if what else {})
        return json.dumps(
            {"user": {"username": user}, "verb": verb, "stage": "ResponseComplete", **ref}
        )

    log = tmp_path / "audit.log"
    lines = [
        entry("me", "create", resource="pods"),
        entry("me", "create", resource="pods", subresource="binding"),
        entry("you", "create", resource="pods"),
        entry("me", "get"),
    ]
    half_written = entry("me", "create", resource="pods")[:20]
    log.write_text("\n".join([*lines, half_written]))
    assert requests_of(log, user="me") == {
        ("create", "pods"): 1,
        ("create", "pods/binding"): 1,
        ("get", "/healthz"): 1,
    }


def test_a_fake_kubelet_does_not_restart_an_ended_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod stays ended if the request to end it arrives before its start is complete.

    The request may arrive while the start is under way, or before the kubelet has looked at the
    pod. A late answer or a first look once made such a pod run again, beside its replacement.
    """
    sent: list[tuple[str, str]] = []

    async def slow_at_first(self: FakeKubelet, method: str, path: str, body: Any) -> bool:
        del self, method
        phase = body["status"]["phase"]
        await asyncio.sleep(0.02 if phase == "Running" else 0.0)
        sent.append((path.split("/")[-2], phase))
        return True

    def pod(name: str, phase: str, **notes: str) -> Pod:
        return Pod(Metadata(name, "default", name, annotations=notes), status=PodStatus(phase))

    async def story() -> None:
        kubelet = FakeKubelet(cast(Any, None), [], "10.0.0.0/29")
        kubelet._look_at(pod("a", "Pending"))
        kubelet._look_at(pod("a", "Pending", **{EXIT_CODE: EVICTED}))
        kubelet._look_at(pod("b", "Failed"))
        await asyncio.gather(*kubelet._tasks)

    monkeypatch.setattr(FakeKubelet, "_sent", slow_at_first)
    asyncio.run(story())
    assert sent == [("a", "Running"), ("a", "Failed")]
