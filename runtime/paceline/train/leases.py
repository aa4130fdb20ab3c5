"""The batch sampler inside the loader: turns leases into lists of sample numbers (D1).

torch's loader asks for batches ahead of time, for its workers, and gives them back in the order in
which it asked. This sampler therefore notes which lease each batch belongs to. It never waits: it
runs dry when the rank holds no other lease, and goes on when leases have come, since torch asks
again with each batch that it hands out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from paceline.core.messages import DealtBatch
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import batches_of, epoch_of, samples_of
from paceline.train.contribution import Batch
from paceline.worker.session import Session


class LeaseSampler:
    """Batches of the leases that this rank pulls, and a note of each until it is handed out."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._plan = DataPlan()
        self._waiting: deque[tuple[Batch, list[int]]] = deque()
        self._asked: deque[Batch] = deque()
        self._left: set[int] = set()
        self._loading = False
        """The script waits for a batch."""

    def bind(self, session: Session, plan: DataPlan) -> None:
        """From now on batches can be drawn."""
        self._session, self._plan = session, plan

    def leave(self, epoch: int) -> None:
        """The user's loop has left this epoch early: what is left of it is skipped, and counted."""
        self._left.add(epoch)

    def has_left(self, lease: int) -> bool:
        return epoch_of(self._plan, lease) in self._left

    def loads(self) -> None:
        """The script waits for the next batch from now on: the first one that torch's loader has
        asked for, or the next one that it will ask for."""
        self._loading = True
        self._work_on(self._asked[0] if self._asked else None)

    def takes(self, batch: Batch) -> None:
        """The script computes this batch from now on."""
        self._work_on(batch)

    def rests(self) -> None:
        """The script is between two batches."""
        self._loading = False
        self._work_on(None)

    def handed_out(self) -> Batch:
        """What the batch is that torch's loader has just given."""
        self._loading = False
        return self._asked.popleft()

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        # Raising StopIteration and giving more later is unusual for an iterator, and the point of
        # this one: torch's loader takes it for "nothing to prefetch just now".
        while not self._waiting:
            self._draw()
        batch, numbers = self._waiting.popleft()
        if self._loading and not self._asked:
            self._work_on(batch)
        self._asked.append(batch)
        return numbers

    def _work_on(self, batch: Batch | None) -> None:
        if self._session is not None:
            self._session.works_on(DealtBatch(batch.lease, batch.index) if batch else None)

    def _draw(self) -> None:
        """Pull the next lease; StopIteration if there is none now."""
        lease = self._session.pull() if self._session is not None else None
        if lease is None:
            raise StopIteration
        samples = samples_of(self._plan, lease)
        if self._session is not None and self.has_left(lease):
            self._session.skip(lease, samples)
            return
        parts = batches_of(self._plan, lease)
        for index, numbers in enumerate(parts):
            self._waiting.append((Batch(lease, index, len(parts), len(numbers), samples), numbers))
