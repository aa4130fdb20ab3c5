"""Logs of a job's workers, merged: one log stream of the kubelet for each pod.

While logs are followed, one thread reads each stream. Another thread watches the pods, since a
replacement is a new pod, and one more watches the job. A stream that breaks, or that is silent for
long, is opened again where it ended, as long as the container runs. A short job may end before a
node has reported that its container started; such pods are waited for.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from paceline_api.errors import PacelineError
from paceline_api.names import worker_selector
from paceline_api.times import NS_PER_MS, NS_PER_S, timestamp
from paceline_api.types.template import TRAINER

from paceline.clock import now_ns, pause
from paceline.jobs.cluster.patience import RETRY_S, Patience
from paceline.jobs.cluster.server import ApiServer, NotFoundError
from paceline.jobs.core import from_cluster
from paceline.jobs.core.lines import Shuffle, merged, parse_line
from paceline.jobs.errors import AwayError, NoSuchRankError, RejectedError
from paceline.jobs.interface import COMPLETE, FAILED, LogLine, Selection

SILENCE_S: Final = 120.0
"""Seconds without a line after which a stream is opened again: its other end may be gone."""
WATCH_S: Final = 240
"""Seconds after which the API server ends a watch of the pods."""
LATE_NS: Final = 10 * NS_PER_S
"""Upper bound on the time that a node may take, after the job's end, to report that a container has
started."""
HOLD_NS: Final = 500 * NS_PER_MS
"""Time for which a line is held back, so that older lines of other pods that arrive later can be
printed first."""
QUEUED_MAX: Final = 10_000
"""Upper bound on the lines in the queue. When it is full, the reading threads block until lines
were printed."""
Object = Mapping[str, Any]


class Logs:
    """The logs of one job; an object is used for one reading only."""

    def __init__(
        self,
        server: ApiServer,
        namespace: str,
        job: Object,
        selection: Selection,
        patience: Patience,
    ) -> None:
        """Create a reader and check the selection; no request is sent yet.

        A selected rank that the job does not have raises NoSuchRankError.

        Args:
            server: The API server.
            namespace: Namespace of the job.
            job: The TrainingJob, as the API server holds it.
            selection: Which lines to return.
            patience: Handles an API server that is away.
        """
        self._server, self._selection, self._patience = server, selection, patience
        self._pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self._query = {"labelSelector": worker_selector(job["metadata"]["name"])}
        self._name, self._uid = job["metadata"]["name"], job["metadata"]["uid"]
        self._procs = from_cluster.members_per_pod(job["spec"])
        replicas = int(job["spec"].get("replicas", 1))
        self._check(replicas * self._procs)
        self._news: queue.Queue[_News] = queue.Queue(QUEUED_MAX)
        self._stop = threading.Event()
        self._reading: set[str] = set()
        """Uids of the pods whose logs were opened, or are not to be opened."""
        self._opening = threading.Lock()
        self._listed = threading.Event()
        """Set once the pods that existed at the beginning are open."""

    def until_now(self, pods: Iterable[Object]) -> Generator[LogLine]:
        """Yield the lines that exist now, in order of time.

        Args:
            pods: Pods of the job.

        Yields:
            The selected lines.
        """
        chosen = from_cluster.workers(pods)
        if not self._selection.previous:
            chosen = from_cluster.latest(chosen)
        tail = self._selection.tail
        wanted = [pod for pod in chosen if self._is_wanted(pod)]
        streams = [self._lines(pod, follow=False, tail=tail) for pod in wanted]
        for line in merged(streams):
            if self._is_meant(line):
                yield line

    def followed(self, changes: Callable[[], Iterable[Object]]) -> Generator[LogLine]:
        """Yield existing and new lines, until the job has ended or is deleted.

        The generator starts the threads. Closing it tells them to stop. It raises the PacelineError
        that ended one of the threads.

        Args:
            changes: Returns the job after each change, until it is deleted. It is called on a
                thread.

        Yields:
            The selected lines, in order of time as far as they arrive within `HOLD_NS`.
        """
        for work in (self._watch_pods, lambda: self._watch_job(changes)):
            threading.Thread(target=self._run, args=(work,), daemon=True).start()
        shuffle, open_pods, over = Shuffle(hold_ns=HOLD_NS), 0, False
        try:
            while not (over and open_pods == 0):
                match self._next(shuffle.next_ns()):
                    case LogLine() as line:
                        shuffle.add(line, now_ns())
                    case _Opened(source):
                        shuffle.opened(source)
                        open_pods += 1
                    case _Closed(source):
                        shuffle.closed(source)
                        open_pods -= 1
                    case _Over():
                        over = True
                    case PacelineError() as error:
                        raise error
                yield from filter(self._is_meant, shuffle.ready(now_ns()))
            yield from filter(self._is_meant, shuffle.ready(now_ns() + HOLD_NS))
        finally:
            self._stop.set()
            self._listed.set()

    # ---- threads ---------------------------------------------------------------------------

    def _next(self, at_ns: int | None) -> _News | None:
        timeout_s = None if at_ns is None else max(0.0, (at_ns - now_ns()) / NS_PER_S)
        try:
            return self._news.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _put(self, news: _News) -> None:
        while not self._stop.is_set():
            try:
                self._news.put(news, timeout=RETRY_S)
            except queue.Full:
                continue
            return

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except PacelineError as error:
            self._put(error)

    def _watch_job(self, changes: Callable[[], Iterable[Object]]) -> None:
        for job in changes():
            state = (job.get("status") or {}).get("state")
            if self._stop.is_set() or state in (COMPLETE, FAILED):
                break
        self._listed.wait()
        self._wait_for_late()
        self._put(_Over())

    def _wait_for_late(self) -> None:
        deadline_ns = now_ns() + LATE_NS
        while not self._stop.is_set() and (left_ns := deadline_ns - now_ns()) > 0:
            try:
                pods, since = self._list()
                late = {pod["metadata"]["uid"] for pod in pods if self._is_late(pod)}
                for pod in pods:
                    self._open(pod)
                watch = self._server.watch(
                    self._pods_path, since, timeout_s=math.ceil(left_ns / NS_PER_S)
                )
                while late and (change := next(watch, None)) is not None:
                    kind, pod = change
                    if kind == "ERROR":
                        break
                    self._open(pod)
                    if kind == "DELETED" or not self._is_late(pod):
                        late.discard(pod["metadata"]["uid"])
            except PacelineError as error:
                self._patience.rest(error)
                continue
            if not late:
                return

    def _watch_pods(self) -> None:
        first = True
        while not self._stop.is_set():
            try:
                pods, since = self._list()
                if first and not self._selection.previous:
                    pods = self._without_earlier(pods)
                for pod in pods:
                    self._open(pod, tail=self._selection.tail if first else None)
                first = False
                self._listed.set()
                for kind, pod in self._server.watch(self._pods_path, since, timeout_s=WATCH_S):
                    if self._stop.is_set():
                        break
                    if kind != "ERROR":
                        self._open(pod)
            except PacelineError as error:
                self._patience.rest(error)

    def _list(self) -> tuple[list[Object], dict[str, Any]]:
        """Return the job's worker pods, and the query for a watch that starts after them."""
        answer = self._server.get(self._pods_path, self._query)
        self._patience.answered()
        since = self._query | {"resourceVersion": answer["metadata"]["resourceVersion"]}
        return answer["items"], since

    def _without_earlier(self, pods: Iterable[Object]) -> list[Object]:
        """Return the latest pod of each slot, and mark the others as already read.

        Args:
            pods: All worker pods.

        Returns:
            Pods whose logs are still to be opened.
        """
        own = [pod for pod in pods if self._is_own(pod)]
        latest = from_cluster.latest(own)
        now = {pod["metadata"]["uid"] for pod in latest}
        self._reading |= {pod["metadata"]["uid"] for pod in own} - now
        return latest

    def _open(self, pod: Object, *, tail: int | None = None) -> None:
        uid = pod["metadata"]["uid"]
        with self._opening:
            if uid in self._reading or not self._is_own(pod) or not _has_begun(pod):
                return
            self._reading.add(uid)
            if not self._is_wanted(pod):
                return
            # Report it here and not on the new thread, so that the count is right before _Over.
            self._put(_Opened(pod["metadata"]["name"]))
        work = partial(self._read, pod, tail)
        threading.Thread(target=self._run, args=(work,), daemon=True).start()

    def _read(self, pod: Object, tail: int | None) -> None:
        try:
            last_ns = 0
            while not self._stop.is_set():
                try:
                    for line in self._lines(pod, follow=True, since_ns=last_ns, tail=tail):
                        last_ns = max(last_ns, line.wall_ns)
                        self._put(line)
                        if self._stop.is_set():
                            return
                    if not self._runs(pod):
                        return
                except PacelineError as error:
                    # If only the kubelet is away, retry here. _watch_pods handles the API server.
                    if not (self._patience.outage or isinstance(error, AwayError)):
                        raise
                    pause(RETRY_S)
        finally:
            self._put(_Closed(pod["metadata"]["name"]))

    def _runs(self, pod: Object) -> bool:
        try:
            now = self._server.get(f"{self._pods_path}/{pod['metadata']['name']}")
        except NotFoundError:
            return False
        same = now["metadata"]["uid"] == pod["metadata"]["uid"]
        return same and not _has_ended(now)

    # ---- one pod ---------------------------------------------------------------------------

    def _lines(
        self, pod: Object, *, follow: bool, since_ns: int = 0, tail: int | None
    ) -> Generator[LogLine]:
        """Yield the lines of one pod after `since_ns`.

        A pod that is gone, or has not started yet, has no lines.

        Args:
            pod: The pod.
            follow: Wait for further lines.
            since_ns: Unix time in nanoseconds of the last line that was read; 0 reads from the
                beginning.
            tail: Upper bound on the existing lines; used only if `since_ns` is 0.

        Yields:
            Parsed lines.
        """
        name = pod["metadata"]["name"]
        query: dict[str, Any] = {"container": TRAINER, "timestamps": True, "follow": follow}
        if since_ns:
            query["sinceTime"] = timestamp(since_ns // NS_PER_S)
        elif tail is not None:
            query["tailLines"] = tail
        path = f"{self._pods_path}/{name}/log"
        try:
            for raw in self._server.lines(path, query, silence_s=SILENCE_S):
                line = parse_line(raw, source=name, procs=self._procs)
                if line is not None and line.wall_ns > since_ns:
                    yield line
        except (NotFoundError, RejectedError):
            return  # the log is gone with its node, or the pod has not started on a node yet

    def _check(self, ranks: int) -> None:
        rank = self._selection.rank
        if rank is not None and not 0 <= rank < ranks:
            raise NoSuchRankError(
                f"job {self._name} has no rank {rank}",
                hint=f"use 0 to {ranks - 1}: slot x procsPerReplica + process, as the table of "
                "`paceline status` shows it",
            )

    def _is_own(self, pod: Object) -> bool:
        owners = pod["metadata"].get("ownerReferences") or ()
        return any(one["uid"] == self._uid for one in owners)

    def _is_wanted(self, pod: Object) -> bool:
        rank = self._selection.rank
        return rank is None or from_cluster.place(pod)[0] == rank // self._procs

    def _is_late(self, pod: Object) -> bool:
        """Return True if the pod has a node that has not reported its container's start."""
        placed = bool(pod["spec"].get("nodeName")) and "deletionTimestamp" not in pod["metadata"]
        return placed and not (_has_begun(pod) or _has_ended(pod)) and self._is_own(pod)

    def _is_meant(self, line: LogLine) -> bool:
        return self._selection.rank in (None, line.rank)


def _has_begun(pod: Object) -> bool:
    statuses = pod["status"].get("containerStatuses") or ()
    states = (one.get("state") or {} for one in statuses if one["name"] == TRAINER)
    return any("running" in state or "terminated" in state for state in states)


def _has_ended(pod: Object) -> bool:
    return pod["status"].get("phase") in ("Succeeded", "Failed")


@dataclass(frozen=True, slots=True)
class _Opened:
    """The log of a pod is being read from now on."""

    source: str


@dataclass(frozen=True, slots=True)
class _Closed:
    """The log of a pod was read to its end."""

    source: str


class _Over:
    """The job has ended or was deleted."""


_News = LogLine | _Opened | _Closed | _Over | PacelineError
