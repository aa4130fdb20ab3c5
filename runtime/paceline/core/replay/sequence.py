"""Turn the journals of all ranks into one sequence of actions that gives the same weights (I15).

In the run ranks worked in parallel; in the replay they take turns. At each version every rank first
does what its journal says up to the point where it needs the next version: it computes the batches
that it computed on these weights, and adds, moves and drops gradients as it did. Then the round is
made from what its contributors gave. So one process with one copy of the weights is enough, and no
old weights have to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec import Struct
from paceline_api.ids import GenerationId, MemberId

from paceline.core.protocol.composition import Weighing
from paceline.core.protocol.log import Log, LogError, chain
from paceline.core.protocol.pending import BufferName, BufferOp
from paceline.core.protocol.progress import Progress, progress_of
from paceline.core.protocol.records import DataPlan, Gen, Go, Record
from paceline.core.replay.journal import (
    Did,
    Ended,
    Entry,
    Gave,
    Hashed,
    Let,
    Logged,
    Placed,
    Skipped,
    Stepped,
)

NEVER: Final = GenerationId(0, "", -1)
"""A generation that cannot exist: no contribution belongs to it."""
RESULT: Final = "replay.json"
"""Name of the file in the run folder that holds the result."""


class SequenceError(Exception):
    """Raised for journals that cannot be replayed; the message says why."""


class ReplayResult(Struct, frozen=True):
    """The outcome of a replay."""

    version: int
    """Last version of the weights."""
    rounds: int
    """Number of rounds that were replayed."""
    contributions: int
    """Number of contributions in them."""
    ranks: int
    """Number of ranks whose gradients were replayed."""
    recorded: str
    """Hash of weights, optimizer and scheduler at the end of the run."""
    replayed: str
    """The same hash at the end of the replay."""
    differs_at: int | None
    """First version whose weights are known to differ; None if there is none."""


# ---- actions -----------------------------------------------------------------------------------


class Compute(Struct, frozen=True):
    """Compute the gradient of these leases as `member`, on the present weights."""

    member: MemberId
    step: Stepped


class Operate(Struct, frozen=True):
    """Carry out an operation on the gradient buffers of `member`."""

    member: MemberId
    op: BufferOp


class Forget(Struct, frozen=True):
    """Empty the buffers of a rank that was left out and has rejoined (R8)."""

    member: MemberId


class Give(Struct, frozen=True):
    """Contribute the content of a buffer of `member`, times `factor`, to the next round."""

    member: MemberId
    source: BufferName
    factor: float


class Round(Struct, frozen=True):
    """Sum what was contributed, in the order of `members`, and apply it."""

    round: int
    members: tuple[MemberId, ...]
    methods: tuple[str, ...]
    """Candidate that summed each buffer; empty in a group of one."""
    machines: tuple[int, ...]
    """Machine of each member, if one of the methods has two levels; else empty."""
    weighing: Weighing
    """The contributors, and how the sum is weighed."""
    progress: Progress
    """Progress of the job after this round."""


class Void(Struct, frozen=True):
    """A round that was aborted: the next version has the same weights as the one before (R32)."""

    round: int


class Check(Struct, frozen=True):
    """Compare the weights of the present version with the hash that a rank recorded."""

    member: MemberId
    version: int
    value: int


Action = Compute | Operate | Forget | Give | Round | Void | Check


@dataclass(frozen=True, slots=True)
class Score:
    """Everything that a replay has to do."""

    plan: DataPlan
    """The data of the run."""
    ranks: int
    """Number of ranks in the first generation."""
    actions: tuple[Action, ...]
    """The actions, in order."""
    end: Ended
    """The end of the run, with the hashes to compare with."""


# ---- the log -----------------------------------------------------------------------------------


def true_log(journals: Mapping[MemberId, Sequence[Entry]]) -> tuple[Ended, list[Record], list[str]]:
    """Return the released log, joined from all journals.

    Args:
        journals: The entries of each rank's journal, in order.

    Returns:
        The last entry of a rank that reached the end, the records of the log, and the digest after
        each record.

    Raises:
        SequenceError: No rank was released, ranks ended with different logs or states, or a record
            is in no journal.
    """
    ends = [e for journal in journals.values() for e in journal if isinstance(e, Ended)]
    if not ends:
        raise SequenceError(
            "no rank was released: only a run that ended as Complete can be replayed"
        )
    end = max(ends, key=lambda e: e.index)
    if any((e.digest, e.state) != (end.digest, end.state) for e in ends if e.index == end.index):
        raise SequenceError("the ranks ended with different logs or states")
    known: dict[tuple[int, str], Record] = {}
    digests: dict[int, set[str]] = {0: {""}}
    for journal in journals.values():
        for entry in journal:
            if isinstance(entry, Logged):
                known[entry.index, entry.digest] = entry.record
                digests.setdefault(entry.index, set()).add(entry.digest)
    # Go backwards, because only the released branch leads to the end. A rank that was left out may
    # have recorded a round that the others abandoned.
    path, digest = [], end.digest
    for index in range(end.index, 0, -1):
        record = known.get((index, digest))
        if record is None:
            raise SequenceError(f"record {index} of {end.index} is in no journal")
        path.append((record, digest))
        before = [d for d in digests.get(index - 1, ()) if chain(d, record) == digest]
        if not before:
            raise SequenceError(f"record {index - 1} of {end.index} is in no journal")
        digest = before[0]
    path.reverse()
    return end, [record for record, _ in path], [d for _, d in path]


# ---- one rank's journal --------------------------------------------------------------------------


class _Part:
    """Walks through one journal as far as the completed rounds allow."""

    def __init__(self, member: MemberId, journal: Sequence[Entry], digests: Sequence[str]) -> None:
        self.member = member
        self._journal = journal
        self._digests = digests
        self._at = 0
        self._apart = False
        """True while the rank is on a branch: it went on from a round that the others abandoned,
        and has not rejoined yet."""

    def walk(self, log: Log, attempt: GenerationId) -> list[Action]:
        """Return what this rank does before the next record is appended to the log.

        Args:
            log: The log so far.
            attempt: The generation that completes the round of the log's version; NEVER if there is
                none.

        Returns:
            The actions, in order.
        """
        actions: list[Action] = []
        while self._at < len(self._journal):
            entry = self._journal[self._at]
            if self._must_wait(entry, log):
                break
            self._at += 1
            if (action := self._take(entry, log, attempt)) is not None:
                actions.append(action)
        return actions

    def _must_wait(self, entry: Entry, log: Log) -> bool:
        """Return True if the entry needs a version or a record that `log` does not have yet."""
        match entry:
            case Logged(index=index) | Placed(index=index):
                return self._on_branch(entry) and index > log.index
            case Let(version=version) | Hashed(version=version):
                return not self._apart and version > log.version
            case Gave(round=round_):
                return not self._apart and round_ > log.version
        return False

    def _take(self, entry: Entry, log: Log, attempt: GenerationId) -> Action | None:
        """Return the action of an entry, or None if it needs none."""
        match entry:
            case Logged():
                self._apart = not self._on_branch(entry)
            case Placed():
                back, self._apart = self._apart, False
                return Forget(self.member) if back else None
            case Skipped(lease=lease):
                raise SequenceError(
                    f"the script of rank {self.member} took a batch of lease {lease} and made no "
                    "step of it; what it does then can not be replayed"
                )
            case _ if self._apart:
                return None
            case Let(version=version):
                step = self._step_after()
                if step is not None and step.leases:
                    if version != log.version:
                        raise SequenceError(
                            f"rank {self.member} computes on version {version} late"
                        )
                    return Compute(self.member, step)
            case Did(op=op):
                return Operate(self.member, op)
            case Gave(generation=generation, round=round_, source=source, factor=factor):
                if (generation, round_) == (attempt, log.version):
                    return Give(self.member, source, factor)
            case Hashed(version=version, value=value):
                return Check(self.member, version, value) if version == log.version else None
        return None

    def _on_branch(self, entry: Logged | Placed) -> bool:
        """Return True if the entry belongs to the released log."""
        known = len(self._digests) >= entry.index > 0
        return known and self._digests[entry.index - 1] == entry.digest

    def _step_after(self) -> Stepped | None:
        """Return the next step of the main thread; None if it is parked first, or the rank dies."""
        for at in range(self._at, len(self._journal)):
            entry = self._journal[at]
            if isinstance(entry, Stepped):
                return entry
            if isinstance(entry, Let):
                return None
        return None


# ---- all journals together -----------------------------------------------------------------------


def compose(journals: Mapping[MemberId, Sequence[Entry]]) -> Score:
    """Return the sequence of actions that replays a run.

    Args:
        journals: The entries of each rank's journal, in order.

    Returns:
        The data plan, the actions and the end of the run.

    Raises:
        SequenceError: The journals are not those of one complete run that can be replayed.
    """
    end, records, digests = true_log(journals)
    first = records[0]
    if not isinstance(first, Gen) or first.plan is None:
        raise SequenceError("the log does not begin with a first generation")
    if not first.plan.samples:
        raise SequenceError("the script feeds itself: only data from pl.DataLoader can be replayed")
    if first.version:
        raise SequenceError(f"the run began with version {first.version}, from a checkpoint")
    given = {
        (entry.generation, entry.round): entry
        for journal in journals.values()
        for entry in journal
        if isinstance(entry, Gave)
    }
    parts = [_Part(m, journal, digests) for m, journal in sorted(journals.items())]
    attempts = {record.round: record.generation for record in records if isinstance(record, Go)}
    log, actions = Log(), list[Action]()
    for record in records:
        attempt = attempts.get(log.version, NEVER)
        for part in parts:
            actions += part.walk(log, attempt)
        if isinstance(record, Go) and record.void:
            _append(log, record)
            actions.append(Void(record.round))
        elif isinstance(record, Go):
            actions.append(_round(log, record, given.get((record.generation, record.round))))
        else:
            _append(log, record)
    for part in parts:
        actions += part.walk(log, NEVER)
    _check_given(actions)
    return Score(first.plan, len(first.members), tuple(actions), end)


def _round(log: Log, go: Go, gave: Gave | None) -> Round:
    """Append the round of `go` to the log, and return the action for it.

    Args:
        log: The log before the round; the record is appended to it.
        go: The record of the round.
        gave: What any rank recorded of its contribution to the round, or None.

    Returns:
        The action.

    Raises:
        SequenceError: The record contradicts the log.
    """
    try:
        weighing = log.weigh(go)
    except LogError as error:
        raise SequenceError(f"the log is broken: {error}") from None
    members = log.members
    _append(log, go)
    did = (gave.methods, gave.machines) if gave else ((), ())
    return Round(go.round, members, *did, weighing, progress_of(log))


def _append(log: Log, record: Record) -> None:
    try:
        log.append(record)
    except LogError as error:
        raise SequenceError(f"the log is broken: {error}") from None


def _check_given(actions: Sequence[Action]) -> None:
    """Check that each contribution that a round names is in its contributor's journal."""
    given: set[MemberId] = set()
    for action in actions:
        if isinstance(action, Give):
            given.add(action.member)
        elif isinstance(action, Round):
            missing = sorted(set(action.weighing.contributors) - given)
            if missing:
                raise SequenceError(
                    f"the journal of rank {missing[0]} lacks what it gave to round {action.round}"
                )
            given.clear()
