"""An API server in memory, as strict as a real one where the operator could go wrong.

Names are unique, uids are never reused, versions grow. A deletion with another uid is refused. A
running pod is deleted gracefully. Children are deleted some time after their owner. A client may be
cut off before a request, or between a request and its answer.
"""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from paceline_api.times import timestamp
from paceline_operator.cluster.api import MANAGER, ApiError

Name = tuple[str, str, str]
"""Key of an object: (kind, namespace, name)."""


class CrashError(BaseException):
    """The operator's process is gone; no error handler may catch this."""


@dataclass
class Server:
    """Objects, their history, and the faults to inject."""

    clock: Callable[[], float]
    objects: dict[Name, dict[str, Any]] = field(default_factory=dict)
    log: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """(kind, ADDED | MODIFIED | DELETED, object) in order: what watches deliver."""
    requests: Counter[str] = field(default_factory=Counter)
    writes: list[str] = field(default_factory=list)
    version: int = 0
    quota: int | None = None
    bad_image: str = ""
    """Image for which a pod is refused, as for an unknown field."""
    refusing: dict[str, ApiError] = field(default_factory=dict)
    """Kind -> error for every request: the API is not served, or the operator lacks the right."""
    admission: Callable[[Mapping[str, Any]], ApiError | None] = lambda _: None
    """Return why a pod is refused; None if it is admitted."""
    no_dry_runs: bool = False
    """True if a webhook for pods has side effects, so that a dry run of a pod is refused."""
    crash_in: int | None = None
    crash_before: bool = True
    failing: int = 0
    """Number of further requests that are answered with 500."""
    failing_applied: bool = False
    """True if failing requests are carried out all the same, as when the answer times out."""
    watchers: list[Callable[[], None]] = field(default_factory=list)
    """Callbacks for each new entry of `log`."""

    # ---- what the operator calls ------------------------------------------------------------

    async def create(
        self,
        kind: str,
        namespace: str,
        manifest: Mapping[str, Any],
        *,
        strict: bool = False,
        dry_run: bool = False,
    ) -> Mapping[str, Any]:
        """Create an object; pods must be created with strict field validation (C7)."""
        name = manifest["metadata"]["name"]
        assert strict or kind != "pods", "an unknown field of a template must be told (C7)"
        if dry_run:
            return await self._request(
                "DRYRUN", kind, name, lambda: self._try_out(kind, namespace, manifest)
            )
        return await self._request(
            "POST", kind, name, lambda: self.insert(kind, namespace, manifest)
        )

    async def get(self, kind: str, namespace: str, name: str) -> Mapping[str, Any]:
        """Return an object."""
        return await self._request("GET", kind, name, lambda: self.find(kind, namespace, name))

    async def warnings_of(self, namespace: str, uid: str) -> bytes:
        """Return the warnings about an object as JSON."""
        await asyncio.sleep(0)
        self.requests["LIST events"] += 1
        if "events" in self.refusing:
            raise self.refusing["events"]
        warnings = [
            body
            for body in self.of_kind("events")
            if body["involvedObject"].get("uid") == uid and body["type"] == "Warning"
        ]
        assert all(body["metadata"]["namespace"] == namespace for body in warnings)
        return msgspec.json.encode({"items": warnings})

    async def namespaces_of(self, kind: str, name: str, *, within: str) -> list[str]:
        """Return the namespaces with an object of this name, within one or "" for all."""
        await asyncio.sleep(0)
        if kind in self.refusing:
            raise self.refusing[kind]
        return [
            namespace
            for (of, namespace, named) in self.objects
            if (of, named) == (kind, name) and within in ("", namespace)
        ]

    async def delete(
        self, kind: str, namespace: str, name: str, *, uid: str = ""
    ) -> Mapping[str, Any]:
        """Delete an object; with `uid` only if it is still that object."""
        return await self._request(
            "DELETE", kind, name, lambda: self.remove(kind, namespace, name, uid=uid)
        )

    async def apply(
        self,
        kind: str,
        namespace: str,
        manifest: Mapping[str, Any],
        *,
        force: bool,
        subresource: str = "",
        dry_run: bool = False,
    ) -> Mapping[str, Any]:
        """Apply an object on the server side; without `force` an existing one is a conflict."""
        name = manifest["metadata"]["name"]
        if dry_run:
            return await self._request("DRYRUN", kind, name, lambda: manifest)
        call = lambda: self.patch(kind, namespace, manifest, subresource, force=force)  # noqa: E731
        return await self._request("PATCH", f"{kind}/{subresource}".rstrip("/"), name, call)

    async def replace(
        self, kind: str, namespace: str, manifest: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """Replace an object that has not changed since it was read."""
        name = manifest["metadata"]["name"]
        return await self._request("PUT", kind, name, lambda: self.put(kind, namespace, manifest))

    async def _request(
        self, verb: str, kind: str, name: str, do: Callable[[], Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        await asyncio.sleep(0)
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0:
                if not self.crash_before:
                    self._try(do)
                raise CrashError
        self.requests[f"{verb} {kind}"] += 1
        self.writes.append(f"{verb} {kind} {name}")
        if kind in self.refusing:
            raise self.refusing[kind]
        if self.failing:
            self.failing -= 1
            if self.failing_applied:
                self._try(do)
            raise ApiError(500, "InternalError", "the fake server has a bad day")
        return copy.deepcopy(dict(do()))

    def _try(self, do: Callable[[], Mapping[str, Any]]) -> None:
        """Carry out a request whose answer never reaches the client."""
        try:
            do()
        except ApiError:
            return

    # ---- what happens to objects --------------------------------------------------------------

    def _try_out(self, kind: str, namespace: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Check an object as for its creation, and store nothing."""
        if kind == "pods" and self.no_dry_runs:
            text = 'admission webhook "w.example" does not support dry run'
            raise ApiError(400, "BadRequest", text)
        body = copy.deepcopy(dict(manifest))
        name = (kind, namespace, body["metadata"]["name"])
        if kind == "pods":
            self._admit(namespace, body)
        if name in self.objects:
            raise ApiError(409, "AlreadyExists", f"{kind} {name[2]} already exists")
        return body

    def insert(self, kind: str, namespace: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Create an object with a new uid and version, after quota and image checks."""
        body = copy.deepcopy(dict(manifest))
        name = (kind, namespace, body["metadata"]["name"])
        if name in self.objects:
            raise ApiError(409, "AlreadyExists", f"{kind} {name[2]} already exists")
        if kind == "pods":
            self._admit(namespace, body)
        self.version += 1
        body["metadata"] |= {
            "namespace": namespace,
            "uid": f"uid-{self.version}",
            "creationTimestamp": timestamp(self.clock()),
            "generation": 1,
        }
        if kind == "pods":
            body["status"] = {"phase": "Pending"}
        self.objects[name] = body
        self._bump(kind, "ADDED", body)
        return body

    def _admit(self, namespace: str, body: dict[str, Any]) -> None:
        if self.bad_image and body["spec"]["containers"][0].get("image") == self.bad_image:
            raise ApiError(422, "Invalid", f'Pod "{body["metadata"]["name"]}" is invalid: image')
        if refused := self.admission(body):
            raise refused
        if self.quota is None:
            return
        pods = [k for k, o in self.objects.items() if k[:2] == ("pods", namespace) and not _over(o)]
        if len(pods) >= self.quota:
            raise ApiError(403, "Forbidden", f"pods is forbidden: exceeded quota: {self.quota}")

    def find(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """Return the stored object, or raise 404."""
        body = self.objects.get((kind, namespace, name))
        if body is None:
            raise ApiError(404, "NotFound", f"{kind} {name} not found")
        return body

    def patch(
        self,
        kind: str,
        namespace: str,
        manifest: Mapping[str, Any],
        subresource: str,
        *,
        force: bool,
    ) -> dict[str, Any]:
        """Apply a manifest to the spec or to a subresource, as the operator."""
        name = manifest["metadata"]["name"]
        if not subresource and (kind, namespace, name) not in self.objects:
            body = self.insert(kind, namespace, manifest)
            body["metadata"]["managedFields"] = [{"manager": MANAGER, "operation": "Apply"}]
            return body
        body = self.find(kind, namespace, name)
        if not force:
            raise ApiError(409, "Conflict", "somebody else has set a field of it")
        uid = manifest["metadata"].get("uid")
        if uid and uid != body["metadata"]["uid"]:
            raise ApiError(409, "Conflict", "the uid differs")
        part = subresource or "spec"
        if None in manifest[part].values():
            raise ApiError(422, "Invalid", f"null is no value: {manifest[part]}")
        if body.get(part) != manifest.get(part):
            body[part] = copy.deepcopy(manifest[part])
            self._bump(kind, "MODIFIED", body)
        return body

    def put(self, kind: str, namespace: str, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """Replace the spec if nothing has been written since the object was read."""
        body = self.find(kind, namespace, manifest["metadata"]["name"])
        if manifest["metadata"].get("resourceVersion") != body["metadata"]["resourceVersion"]:
            raise ApiError(409, "Conflict", "the object has been modified")
        body["spec"] = copy.deepcopy(manifest["spec"])
        self._bump(kind, "MODIFIED", body)
        return body

    def change(self, kind: str, namespace: str, name: str, **fields: Any) -> None:
        """Change fields as another client; a change of the spec raises the generation."""
        body = self.find(kind, namespace, name)
        for part, values in fields.items():
            body[part] = {**body.get(part, {}), **values}
        if "spec" in fields:
            body["metadata"]["generation"] += 1
        self._bump(kind, "MODIFIED", body)

    def remove(
        self, kind: str, namespace: str, name: str, *, uid: str = "", at_once: bool = False
    ) -> dict[str, Any]:
        """Delete an object; a running pod is only marked, unless `at_once`."""
        body = self.find(kind, namespace, name)
        if uid and uid != body["metadata"]["uid"]:
            raise ApiError(409, "Conflict", "the uid differs")
        graceful = kind == "pods" and body["spec"].get("nodeName") and not _over(body)
        if graceful and not at_once:
            if "deletionTimestamp" not in body["metadata"]:
                body["metadata"]["deletionTimestamp"] = timestamp(self.clock())
                self._bump(kind, "MODIFIED", body)
            return body
        del self.objects[kind, namespace, name]
        self._bump(kind, "DELETED", body)
        return body

    def collect_garbage(self) -> None:
        """Delete objects whose owners do not exist."""
        uids = {body["metadata"]["uid"] for body in self.objects.values()}
        for (kind, namespace, name), body in list(self.objects.items()):
            owners = body["metadata"].get("ownerReferences") or ()
            if owners and not any(owner["uid"] in uids for owner in owners):
                self.remove(kind, namespace, name)

    def _bump(self, kind: str, what: str, body: dict[str, Any]) -> None:
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.log.append((kind, what, copy.deepcopy(body)))
        for watcher in self.watchers:
            watcher()

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """Return all objects of a kind."""
        return [body for (k, _, _), body in self.objects.items() if k == kind]


def _over(body: Mapping[str, Any]) -> bool:
    return body.get("status", {}).get("phase") in ("Succeeded", "Failed")
