"""Leader election by a Lease, which a thread of its own renews (C11).

The thread has its own connection and event loop, so that a long decision cannot cost the lead. The
leader calls `leads()` before each write. It turns False some time before another operator may take
over, by a clock that continues while the process is stopped.

A holder that returns under the same name continues at once: a container that was restarted in its
pod need not wait. `epoch` increases with every change of the holder and orders the inventories that
successive leaders send to coordinators.
"""

from __future__ import annotations

import asyncio
import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from paceline_api.access.access import Access

from paceline_operator.cluster.api import ApiError
from paceline_operator.cluster.kube import Kube, pause
from paceline_operator.cluster.rights import describe
from paceline_operator.metrics import OperatorMetrics

log = logging.getLogger("paceline.operator")

NAME: Final = "paceline-operator"
"""Name of the Lease."""
MARGIN: Final = 0.2
"""Fraction of the duration by which a leader stops before its Lease expires."""


@dataclass(frozen=True, slots=True)
class Terms:
    """Identity and times of a candidate."""

    namespace: str
    identity: str
    duration_s: float = 10.0
    renew_s: float = 3.0


class Election:
    """Candidate in the leader election; `changed` is called in the election's own thread."""

    def __init__(
        self,
        access: Access,
        terms: Terms,
        *,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        changed: Callable[[bool], None],
    ) -> None:
        self._access, self._terms, self._clock = access, terms, clock
        self._changed = changed
        self._renewed_s = float("-inf")
        self._last_renewal: tuple[str, str] = ("", "")
        """Holder and renewal time of the Lease as last read."""
        self._last_renewal_s = 0.0
        """Time at which this renewal was first read."""
        self.epoch = 0
        """Number of the present leadership: leaseTransitions of the Lease."""
        self._leading = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Release the Lease, so that another operator can begin at once; wait up to 5 s for it."""
        self._ended.set()
        self._thread.join(timeout=5.0)

    def leads(self) -> bool:
        """Return True if the Lease is held and not near its expiry. Any thread may call it."""
        limit_s = self._terms.duration_s * (1 - MARGIN)
        return self._leading and self._clock() - self._renewed_s < limit_s

    def _run(self) -> None:
        asyncio.run(self._elect())

    async def _elect(self) -> None:
        async with Kube(self._access, OperatorMetrics()) as kube:
            while not self._ended.is_set():
                started_s = self._clock()
                try:
                    async with asyncio.timeout(self._terms.renew_s):
                        held = await self._try(kube)
                except (ApiError, TimeoutError) as error:
                    text = describe(error) if isinstance(error, ApiError) else error
                    log.warning("the Lease could not be renewed: %s", text)
                    held = self.leads()
                self._set(held)
                spent_s = self._clock() - started_s
                rest_s = max(0.05, self._terms.renew_s * random.uniform(0.8, 1.0) - spent_s)
                await self._sleep(min(rest_s, 0.5) if not held else rest_s)
            if self._leading:
                self._set(False)
                await self._give_back(kube)

    async def _sleep(self, seconds: float) -> None:
        until_s = self._clock() + seconds
        while not self._ended.is_set() and self._clock() < until_s:
            await pause(min(0.1, max(0.0, until_s - self._clock())))
            if self._leading and not self.leads():
                return  # the process was stopped for long: report the lost lead first

    def _set(self, leads: bool) -> None:
        if leads != self._leading:
            self._leading = leads
            log.info("leading as %s" if leads else "not leading any more: %s", self._terms.identity)
            self._changed(leads)

    async def _try(self, kube: Kube) -> bool:
        now_s = self._clock()
        lease = await self._read(kube)
        if lease is None:
            lease = await self._write(kube, None, transitions=1)
            self._won(now_s, lease)
            return True
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        mark = (holder, str(spec.get("renewTime")))
        if mark != self._last_renewal:
            self._last_renewal, self._last_renewal_s = mark, now_s
        duration_s = float(spec.get("leaseDurationSeconds") or self._terms.duration_s)
        mine = holder == self._terms.identity
        if not mine and holder and now_s - self._last_renewal_s < duration_s:
            return False
        lapsed = mine and self._leading and not self.leads()
        transitions = int(spec.get("leaseTransitions") or 0)
        # A restart or a lapse of the same holder also starts a new epoch.
        fresh = not mine or not self._leading or lapsed
        lease = await self._write(kube, lease, transitions=transitions + fresh)
        self._won(now_s, lease)
        return True

    def _won(self, asked_s: float, lease: Mapping[str, Any]) -> None:
        """Record a renewal as of the moment before the request, since its answer may be late."""
        self._renewed_s = asked_s
        spec = lease["spec"]
        self.epoch = int(spec["leaseTransitions"])
        self._last_renewal = (self._terms.identity, str(spec["renewTime"]))
        self._last_renewal_s = asked_s

    async def _read(self, kube: Kube) -> Mapping[str, Any] | None:
        try:
            return await kube.get("leases", self._terms.namespace, NAME)
        except ApiError as error:
            if error.code == 404:
                return None
            raise

    async def _write(
        self, kube: Kube, lease: Mapping[str, Any] | None, *, transitions: int, holder: str = ""
    ) -> Mapping[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = dict((lease or {}).get("spec") or {})
        spec |= {
            "holderIdentity": holder or self._terms.identity,
            "leaseDurationSeconds": max(1, round(self._terms.duration_s)),
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        spec.setdefault("acquireTime", now)
        body: dict[str, Any] = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": dict((lease or {}).get("metadata") or {"name": NAME}),
            "spec": spec,
        }
        if lease is None:
            return await kube.create("leases", self._terms.namespace, body)
        return await kube.replace("leases", self._terms.namespace, body)

    async def _give_back(self, kube: Kube) -> None:
        try:
            lease = await self._read(kube)
            if lease and (lease.get("spec") or {}).get("holderIdentity") == self._terms.identity:
                spec = {**lease["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
                body = {**lease, "spec": spec}
                await kube.replace("leases", self._terms.namespace, body)
        except ApiError as error:
            log.warning("the Lease could not be given back: %s", error)
