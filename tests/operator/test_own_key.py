"""The operator's keys: created once, replaced without disturbing jobs, restored when lost."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace

import pytest
from paceline_api.errors import PacelineError
from paceline_api.names import NOTE_KEY
from paceline_operator.cluster.own_key import NAME, OwnKeys
from paceline_operator.core.keys import key_id
from paceline_operator.core.observed import Observed, Sent
from paceline_operator.core.reconcile import reconcile

from testing.fake_cluster.observations import COORDINATOR, NOW, RUNNING, job_of, training, worker
from testing.fake_cluster.server import Server

HERE = "paceline-system"
OLD, NEW = b"o" * 32, b"n" * 32


class Desk:
    def __init__(self) -> None:
        self.server = Server(lambda: 0.0)
        self.changes = 0
        self.keys = OwnKeys(self.server, self._changed)

    def _changed(self) -> None:
        self.changes += 1

    def load(self) -> None:
        asyncio.run(self.keys.load(HERE))

    def look(self, *, may_write: bool = True) -> None:
        asyncio.run(self.keys.look(may_write))

    def put(self, **fields: bytes) -> None:
        self.server.objects.pop(("secrets", HERE, NAME), None)
        data = {name: base64.b64encode(key).decode() for name, key in fields.items()}
        self.server.insert("secrets", HERE, {"metadata": {"name": NAME}, "data": data})

    def stored(self) -> dict[str, bytes]:
        data = self.server.find("secrets", HERE, NAME)["data"]
        return {name: base64.b64decode(text) for name, text in data.items()}


def test_the_key_is_created_once() -> None:
    desk = Desk()
    desk.load()
    made = desk.keys.newest
    again = OwnKeys(desk.server, lambda: None)
    asyncio.run(again.load(HERE))
    assert again.newest == made
    assert desk.server.find("secrets", HERE, NAME)["immutable"] is True


def test_a_deleted_key_is_restored_by_the_leader(caplog: pytest.LogCaptureFixture) -> None:
    desk = Desk()
    desk.load()
    before = desk.stored()
    desk.server.remove("secrets", HERE, NAME)
    desk.look(may_write=False)
    assert ("secrets", HERE, NAME) not in desk.server.objects, "only the leader writes"
    desk.look()
    assert desk.stored() == before
    assert "was deleted" in caplog.text
    assert desk.changes == 0


def test_a_new_key_replaces_the_old_one_which_is_known_while_it_is_listed() -> None:
    desk = Desk()
    desk.put(key=OLD)
    desk.load()
    assert desk.keys.newest == key_id(OLD)
    desk.put(key=NEW, before=OLD)
    desk.look()
    assert desk.keys.newest == key_id(NEW)
    assert desk.keys.of(key_id(OLD)) == OLD
    assert desk.changes == 1
    desk.put(key=NEW)
    desk.look()
    assert desk.keys.of(key_id(OLD)) is None


@pytest.mark.parametrize("fields", [{"other": OLD}, {"key": b"short"}, {"key": OLD, "b": b""}])
def test_a_secret_without_usable_keys_is_refused(fields: dict[str, bytes]) -> None:
    desk = Desk()
    desk.put(**fields)
    with pytest.raises(PacelineError, match="no usable keys"):
        desk.load()


def keyed(observed: Observed, key: str) -> Observed:
    pods = tuple(replace(pod, notes={NOTE_KEY: key}) for pod in observed.pods)
    return replace(observed, pods=pods, sent=Sent())


def test_a_job_keeps_the_key_of_its_pods() -> None:
    """The pods trust each other; the Secret of another key has another token and certificate."""
    observed = replace(keyed(training(2), "0ld0ld00"), key_id="new0new0")
    changes = reconcile(job_of(RUNNING, replicas=3), observed, NOW)
    assert changes.needs_secret is not None
    assert changes.needs_secret.key_id == "0ld0ld00"
    (made,) = changes.workers
    assert made.manifest["metadata"]["annotations"][NOTE_KEY] == "0ld0ld00"
    volumes = {volume["name"]: volume for volume in made.manifest["spec"]["volumes"]}
    assert "-0ld0ld00-2-" in volumes["paceline-job"]["secret"]["secretName"]


def test_a_job_without_pods_gets_the_newest_key() -> None:
    ended = replace(worker(0), deleting=True, notes={NOTE_KEY: "0ld0ld00"})
    for pods in ((), (ended, replace(COORDINATOR, deleting=True, notes={NOTE_KEY: "0ld0ld00"}))):
        observed = Observed(pods=pods, key_id="new0new0")
        assert observed.key_in_use("job-uid") == "new0new0"
    changes = reconcile(job_of(replicas=1), Observed(key_id="new0new0"), NOW)
    assert changes.needs_secret is not None
    assert changes.needs_secret.key_id == "new0new0"
