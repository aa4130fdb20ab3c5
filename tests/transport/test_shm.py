"""Sums in shared memory: both loops, buffers in place or not, and errors that name their cause.

Ranks are threads here, each with its own memory, sockets and descriptors, like processes.
"""

from __future__ import annotations

import errno
import gc
import itertools
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch
from paceline.core.collectives.conduct import Conduct
from paceline.core.collectives.shared import BOUNCE_BYTES, SMALL_BYTES, fold
from paceline.limits import LimitError
from paceline.transport import factory
from paceline.transport.base import (
    HOST,
    Abort,
    Group,
    Peer,
    PeerLost,
    Transport,
    TransportAborted,
    TransportError,
)
from paceline.transport.factory import make_transport
from paceline.transport.rendezvous import Deadline, PeerConnection
from paceline.transport.selected import MACHINE, SelectedTransport
from paceline.transport.shm import memory as shm_memory
from paceline.transport.shm import room as shm_room
from paceline.transport.shm.hier import HierTransport, machines_of
from paceline.transport.shm.memory import SharedMemory
from paceline.transport.shm.rendezvous import _take
from paceline.transport.shm.transport import ShmTransport

from testing.memory_transport import Hub, SimTransport
from tests.layers import exhaustive

NUMELS = (1, 7, SMALL_BYTES // 4, SMALL_BYTES // 4 + 1, 3 * BOUNCE_BYTES // 4 + 5)
OPEN_S = 10.0
Ranks = list[ShmTransport]


def on_all(work: Callable[[int], object], ranks: int) -> list[object]:
    """Run the work of each rank and return the results, exceptions included."""
    with ThreadPoolExecutor(ranks) as threads:
        futures = [threads.submit(work, rank) for rank in range(ranks)]
        return [future.exception() or future.result() for future in futures]


def opened(ranks: Sequence[Transport], number: int = 1) -> Sequence[Transport]:
    peers = tuple(Peer(f"r{i}", rank.address) for i, rank in enumerate(ranks))

    def open_(rank: int) -> None:
        ranks[rank].open(Group(f"g{number}", number, peers, rank), Abort(), OPEN_S)

    assert on_all(open_, len(ranks)) == [None] * len(ranks)
    return ranks


@pytest.fixture
def made() -> Iterator[Callable[..., Ranks]]:
    everybody: Ranks = []

    def make(*native: bool) -> Ranks:
        ranks = [ShmTransport(SharedMemory(), native=one) for one in native]
        everybody.extend(ranks)
        return ranks

    yield make
    for rank in everybody:
        rank.shutdown()


def parts_of(ranks: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(numel)
    return [torch.randn(numel, generator=generator).mul(100).to(dtype) for _ in range(ranks)]


def summed(
    ranks: Sequence[Transport], parts: Sequence[torch.Tensor], in_place: Sequence[bool]
) -> list[torch.Tensor]:
    def reduce(rank: int) -> torch.Tensor:
        part = parts[rank]
        owned = ranks[rank].zeros(part.numel(), part.dtype, HOST)
        buffer = owned if in_place[rank] else torch.empty_like(part)
        buffer.copy_(part)
        ranks[rank].allreduce([buffer], Abort(), "native")
        return buffer.clone()

    results = on_all(reduce, len(ranks))
    assert all(isinstance(one, torch.Tensor) for one in results), results
    return [one for one in results if isinstance(one, torch.Tensor)]


PER_RANK = ((True, True, True), (False, False, False), (True, False, True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("native", "in_place"),
    [
        (native, in_place) if native == in_place else exhaustive(native, in_place)
        for native, in_place in itertools.product(PER_RANK, PER_RANK)
    ],
    ids=str,
)
def test_native_and_python_loops_add_in_member_order(
    made: Callable[..., Ranks], native: tuple[bool, ...], in_place: tuple[bool, ...]
) -> None:
    ranks = opened(made(*native))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.float16):
        for numel in NUMELS:
            parts = parts_of(len(ranks), numel, dtype)
            wanted = fold([part.clone() for part in parts], torch.add)
            for result in summed(ranks, parts, in_place):
                assert torch.equal(result.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.long
def test_two_levels_sum_exactly_on_machines_of_unequal_size() -> None:
    """Put two ranks on one machine and three on the other: two slices, and one rank only copies."""
    hub = Hub()
    places = ("a", "b", "b", "a", "b")
    ranks = [
        HierTransport(SharedMemory(), SimTransport(hub, f"r{i}"), place=place)
        for i, place in enumerate(places)
    ]
    assert machines_of([rank.address for rank in ranks]) == [[0, 3], [1, 2, 4]]
    opened(ranks)
    for numel in NUMELS:
        parts = [part.round() for part in parts_of(len(ranks), numel, torch.float32)]
        wanted = torch.stack(parts).sum(0)
        for owned in (True, False):
            for result in summed(ranks, parts, [owned] * len(ranks)):
                assert torch.equal(result, wanted)
    assert ranks[0].describe()["machines"] == "2"
    assert ranks[0].machines() == (0, 1, 1, 0, 1)
    assert ranks[0].conducts() == (Conduct("hier:sim", machines=ranks[0].machines()),)
    for rank in ranks:
        rank.shutdown()


def test_two_levels_need_several_machines_with_several_ranks() -> None:
    rank = HierTransport(SharedMemory(), SimTransport(Hub(), "r0"), place="a")
    assert rank.name == "hier:sim"
    assert "all ranks are on one" in rank.unfit(["a/x|1", "a/y|2"])
    assert "each rank has one of its own" in rank.unfit(["a/x|1", "b/y|2"])
    assert rank.unfit(["a/x|1", "a/y|2", "b/z|3"]) == ""
    rank.shutdown()


def test_shared_memory_is_refused_on_several_machines() -> None:
    ranks = [ShmTransport(SharedMemory(), place=place) for place in ("a", "a", "b")]
    named = [SelectedTransport([rank], {}) for rank in ranks]
    peers = tuple(Peer(f"r{i}", rank.address) for i, rank in enumerate(named))
    with pytest.raises(TransportError, match=r"rank 2 runs in another one.*hint: use backend: au"):
        named[0].open(Group("g", 1, peers, 0), Abort(), 1.0)
    for rank in named:
        rank.shutdown()


def test_an_error_names_the_rank_whose_buffer_size_differs(made: Callable[..., Ranks]) -> None:
    ranks = opened(made(True, False))
    sizes = (100_000, 100_001)

    def reduce(rank: int) -> None:
        ranks[rank].allreduce([torch.ones(sizes[rank])], Abort(), "native")

    errors = on_all(reduce, 2)
    assert all(isinstance(error, TransportError) for error in errors), errors
    messages = {r: str(e) for r, e in enumerate(errors) if not isinstance(e, PeerLost)}
    assert messages, "the first to find out says it; the other may see only that it has given up"
    for rank, text in messages.items():
        assert f"rank {1 - rank} sums a buffer of {4 * sizes[1 - rank]} bytes" in text
        assert "hint: start every rank with the same script" in text


@pytest.mark.parametrize("native", [True, False])
def test_a_rank_that_gives_up_wakes_waiting_ranks(made: Callable[..., Ranks], native: bool) -> None:
    ranks, abort = opened(made(native, native, native)), Abort()
    outcomes: list[object] = []

    def wait() -> None:
        outcomes.extend(
            on_all(
                lambda rank: ranks[rank].allreduce(
                    [torch.ones(1 << 20)], abort if rank else Abort(), "native"
                ),
                2,
            )
        )

    waiting = threading.Thread(target=wait)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    abort.raise_()
    waiting.join(10)
    assert not waiting.is_alive()
    first, second = outcomes
    assert isinstance(first, PeerLost), first
    assert first.rank == 1
    assert isinstance(second, TransportAborted), second


def test_refused_memory_is_an_error_and_auto_continues_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(TransportError, match=r"needs memfd_create.*not permitted.*seccomp profile"):
        make_transport("shm", local=True)
    transport = make_transport("auto", local=True)
    assert "memfd_create" in transport.describe()["left out.shm"]
    assert not transport.zeros(3, torch.float32, HOST).any()
    transport.shutdown()


@pytest.mark.long
@pytest.mark.parametrize("refused", ["fcntl.fcntl", "mmap.mmap"])
def test_a_refused_mapping_is_an_error_and_auto_continues_without_it(
    monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Refuse the mapping, like `ulimit -v` or a kernel without seals.

    Nothing of the attempt stays open.
    """

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    before = open_files()
    module, _, name = refused.partition(".")
    monkeypatch.setattr(getattr(shm_memory, module), name, refuse)
    with pytest.raises(TransportError, match=r"shm cannot map shared memory here.*hint: use"):
        make_transport("shm", local=True)
    transport = make_transport("auto", local=True)
    assert "cannot map" in transport.describe()["left out.shm"]
    transport.shutdown()
    assert open_files() == before


@pytest.mark.exhaustive
@pytest.mark.long
def test_a_rank_that_cannot_map_the_others_blocks_nobody_and_leaks_nothing(
    made: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = made(True, True, True)
    before = open_files()
    peers = tuple(Peer(f"r{i}", rank.address) for i, rank in enumerate(ranks))
    poor = threading.local()

    def map_others(fd: int, nbytes: int) -> object:
        # A wrong size stands for a mapping that the kernel refuses.
        return shm_memory.map_others(fd, nbytes + getattr(poor, "bytes", 0))

    def open_(rank: int) -> None:
        poor.bytes = rank == 1
        ranks[rank].open(Group("g1", 1, peers, rank), Abort(), 1.0)

    with monkeypatch.context() as patched:
        patched.setattr(shm_room, "map_others", map_others)
        results = on_all(open_, 3)
    assert isinstance(results[1], TransportError), results
    assert "has another size than it says" in str(results[1])
    assert any(isinstance(one, PeerLost) for one in results), results
    for rank in ranks:
        rank.close()
    opened(ranks, 2)
    parts = parts_of(3, 1000, torch.float32)
    assert len(summed(ranks, parts, [True] * 3)) == 3
    for rank in ranks:
        rank.close()
    del results  # the tracebacks keep mapped memory alive
    gc.collect()
    assert open_files() == before


@contextmanager
def one_descriptor_left() -> Iterator[None]:
    """Leave this process room for one more open file, whatever other tests have left open."""
    gc.collect()
    gc.disable()  # files closed meanwhile would make more room
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    # Set a limit above every open file. Then take all numbers below it, gaps included.
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 8, before[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.dup(taken[0]))
        os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for file in taken:
            os.close(file)
        gc.enable()


@pytest.mark.long
def test_a_rank_at_its_limit_of_files_keeps_no_partial_descriptors() -> None:
    here, there = socket.socketpair()
    there.setblocking(False)
    connection = PeerConnection(there, "a peer")
    socket.send_fds(here, [b"."], [here.fileno(), here.fileno()])
    files = open_files()
    with one_descriptor_left():
        with pytest.raises(TransportError, match=r"no room for the descriptors.*ulimit -n"):
            _take(connection, Deadline(Abort(), 5.0), "taking", 1)
        os.close(os.dup(here.fileno()))  # raises OSError if the one that fitted was kept
    assert open_files() == files
    connection.close()
    here.close()


def test_a_buffer_above_the_memory_limit_of_the_pod_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Check the limit before the kernel kills the process for a page that is not allowed."""
    memory = SharedMemory()
    monkeypatch.setattr(shm_memory, "cgroup_limits", lambda _: iter([64 << 20]))
    memory.zeros(1 << 20, torch.float32)
    with pytest.raises(LimitError, match=r"needs 128 MiB of shared memory.* is 64 MiB") as error:
        memory.zeros(32 << 20, torch.float32)
    assert "resources.limits.memory" in error.value.hint
    memory.close()


def test_a_group_above_the_memory_limit_of_the_pod_is_a_transport_error(
    made: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Raise TransportError, which makes `auto` leave the transport out; others end the rank."""
    [rank] = made(True)
    monkeypatch.setattr(shm_memory, "cgroup_limits", lambda _: iter([1 << 20]))
    group = Group("g", 1, (Peer("r0", rank.address),), 0)
    with pytest.raises(TransportError, match=r"is 1 MiB; hint: raise resources.limits.memory"):
        rank.open(group, Abort(), 1.0)


def test_without_a_compiler_python_is_used_where_stores_are_ordered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "false")
    transport = ShmTransport(SharedMemory())
    assert transport.describe()["loop"].startswith("python: /")
    transport.shutdown()
    monkeypatch.setattr("paceline.transport.shm.plain_loop.ORDERED", ())
    with pytest.raises(TransportError, match="needs a C compiler on this processor"):
        ShmTransport(SharedMemory())


def pages(memory: SharedMemory) -> int:
    return os.fstat(memory.fd).st_blocks


@pytest.mark.long
def test_memory_is_released_with_its_last_tensor() -> None:
    memory = SharedMemory()
    whole = memory.zeros(1 << 20, torch.float32)
    assert not whole.any()
    view = whole.fill_(1.0)[5:9]
    assert memory.place(view) == memory.place(whole) + 20
    assert memory.place(torch.ones(3)) == 0
    held = pages(memory)
    del whole
    gc.collect()
    assert (pages(memory), int(view.sum())) == (held, 4)
    del view
    gc.collect()
    assert pages(memory) == 0
    assert not memory.zeros(1 << 20, torch.float32).any(), "memory that was used is zero again"
    memory.close()


def test_a_forked_child_releases_no_memory_of_its_parent() -> None:
    memory = SharedMemory()
    tensor = memory.zeros(1 << 16, torch.float32).fill_(2.0)
    child = os.fork()
    if child == 0:
        del tensor
        gc.collect()
        os._exit(0)
    os.waitpid(child, 0)
    assert tensor.sum() == 2 * (1 << 16)
    memory.close()


def test_the_memory_cannot_be_written_or_resized_through_its_file() -> None:
    memory = SharedMemory()
    tensor = memory.zeros(1000, torch.float32)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.pwrite(memory.fd, b"x", memory.place(tensor))
    with pytest.raises(PermissionError):
        os.ftruncate(os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR), 1)
    memory.close()


def open_files() -> list[str]:
    gc.collect()  # closes files of earlier tests now rather than meanwhile
    targets = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(fd.readlink()))
        except FileNotFoundError:
            continue  # the descriptor of the listing itself
    return sorted(name for name in targets if "memfd:paceline" in name or "eventfd" in name)


@pytest.mark.long
def test_no_files_or_mappings_stay_open(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before, mapped = open_files(), Path("/proc/self/maps").read_text().count("memfd:paceline")
    ranks = [ShmTransport(SharedMemory()) for _ in range(3)]
    for number in range(8):
        opened(ranks, number)
        parts = parts_of(3, 1000, torch.float32)
        assert len(summed(ranks, parts, [True] * 3)) == 3
        if number % 2:
            ranks[0].close()
    for rank in ranks:
        rank.shutdown()
    del ranks, rank, parts
    gc.collect()
    assert open_files() == before
    assert Path("/proc/self/maps").read_text().count("memfd:paceline") == mapped


@pytest.mark.long
def test_a_process_of_another_user_is_refused(
    made: Callable[..., Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = made(True, True)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    peers = tuple(Peer(f"r{i}", rank.address) for i, rank in enumerate(ranks))
    for error in on_all(lambda i: ranks[i].open(Group("g", 1, peers, i), Abort(), 0.3), 2):
        assert isinstance(error, PeerLost), error


def test_auto_measures_shared_memory_in_a_local_run_and_two_levels_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(factory, "own_address", lambda: factory.LOOPBACK)
    for local, wanted in ((True, {"gloo", "shm"}), (False, {"gloo", "shm", "hier:gloo"})):
        transport = make_transport("auto", local=local)
        named = {part.partition("=")[0] for part in transport.address.split(";")}
        transport.shutdown()
        assert named - {MACHINE} == wanted
