"""Batch sampler inside the loader: turns leases into lists of sample numbers (D1).

torch's loader asks for batches ahead of time, to keep its workers busy, and returns them in the
order in which it asked. The sampler therefore notes which lease each batch belongs to. It never
waits. If the rank holds no further lease, the sampler raises StopIteration. It continues when
leases have arrived, because torch asks again with each batch that it hands out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from paceline.core.messages import DealtBatch
from paceline.core.protocol.records import DataPlan
from paceline.core.protocol.sampling import batches_of, epoch_of, samples_of
from paceline.train.contribution import LeaseBatch
from paceline.worker.session import Session


class LeaseSampler:
    """Batches of the leases that this rank pulls; each is noted until torch hands it out.

    Main thread only.
    """

    def __init__(self) -> None:
        self._session: Session | None = None
        self._plan = DataPlan()
        self._waiting: deque[tuple[LeaseBatch, list[int]]] = deque()
        self._asked: deque[LeaseBatch] = deque()
        self._left: set[int] = set()
        self._loading = False
        """True while the script waits for a batch."""

    def bind(self, session: Session, plan: DataPlan) -> None:
        """Attach the session that leases are pulled from; before, the sampler is empty."""
        self._session, self._plan = session, plan

    def leave(self, epoch: int) -> None:
        """Skip and count every lease of this epoch that is pulled from now on.

        Called when the user's loop has left the epoch early.
        """
        self._left.add(epoch)

    def has_left(self, lease: int) -> bool:
        """Return True if the user's loop has left the epoch of this lease early."""
        return epoch_of(self._plan, lease) in self._left

    def loads(self) -> None:
        """Report to the session that the script waits for its next batch.

        That is the first batch that torch's loader has asked for and not handed out. If there is
        none, it is the next one that torch will ask for.
        """
        self._loading = True
        self._work_on(self._asked[0] if self._asked else None)

    def takes(self, batch: LeaseBatch) -> None:
        """Report to the session that the script computes this batch from now on."""
        self._work_on(batch)

    def rests(self) -> None:
        """Report to the session that the script is between two batches."""
        self._loading = False
        self._work_on(None)

    def handed_out(self) -> LeaseBatch:
        """Return the batch that torch's loader has just given to the script."""
        self._loading = False
        return self._asked.popleft()

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        # It is unusual that an iterator raises StopIteration and yields more later. Here it is
        # intended: torch's loader takes it for "nothing to prefetch at the moment".
        while not self._waiting:
            self._draw()
        batch, numbers = self._waiting.popleft()
        if self._loading and not self._asked:
            self._work_on(batch)
        self._asked.append(batch)
        return numbers

    def _work_on(self, batch: LeaseBatch | None) -> None:
        if self._session is not None:
            self._session.works_on(DealtBatch(batch.lease, batch.index) if batch else None)

    def _draw(self) -> None:
        """Pull the next lease and queue its batches; skip it if its epoch was left early.

        Raises:
            StopIteration: The rank holds no other lease at the moment.
        """
        lease = self._session.pull() if self._session is not None else None
        if lease is None:
            raise StopIteration
        samples = samples_of(self._plan, lease)
        if self._session is not None and self.has_left(lease):
            self._session.skip(lease, samples)
            return
        parts = batches_of(self._plan, lease)
        for index, numbers in enumerate(parts):
            self._waiting.append(
                (LeaseBatch(lease, index, len(parts), len(numbers), samples), numbers)
            )
