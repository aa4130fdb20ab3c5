"""B2: one rank that reduces on command: over Paceline, or over a rival.

`reducer.py ADDRESS NAME SYSTEM`. Commands and times travel over a socket to the benchmark. As in a
job, a communication thread reduces while the main thread sleeps, calls torch or runs pure Python.
Times are monotonic nanoseconds, comparable between the processes of one machine.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener

import torch
from paceline.clock import now_ns
from paceline.core.collectives.select import Method
from paceline.transport.base import HOST, Abort, Group, Peer, Transport
from paceline_api.types.enums import Wire

REST_S = 0.002
SIDE = 96


class Work:
    """Work of the main thread, which the communication thread can change."""

    def __init__(self) -> None:
        self.kind = "sleep"
        self.changed = threading.Event()
        self.ended = False

    def go_on(self) -> None:
        """Work until `ended` is set; call it in the main thread."""
        matrix = torch.ones(SIDE, SIDE) / SIDE
        x, total = matrix, 0
        while not self.ended:
            if self.kind == "torch":
                for _ in range(50):
                    x = x @ matrix
            elif self.kind == "python":
                for number in range(20_000):
                    total += number & 7
            else:
                self.changed.wait()
                self.changed.clear()

    def set(self, kind: str) -> None:
        """Change the kind of work."""
        self.kind = kind
        self.changed.set()


class Paceline:
    """Transports of Paceline, called by the name of a method and, after a space, of a wire type.

    The wire type is optional.
    """

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = {transport.name: transport for transport in transports}
        self.address = " ".join(transport.address for transport in transports)
        self._residuals: dict[int, torch.Tensor] = {}

    def open(self, rank: int, peers: list[tuple[str, str]]) -> None:
        """Join the group of all ranks on each transport."""
        self._abort = Abort()
        for place, transport in enumerate(self._transports.values()):
            members = tuple(Peer(name, address.split()[place]) for name, address in peers)
            transport.open(Group("b2", 1, members, rank), self._abort, 30.0)

    def buffer(self, how: str, numel: int) -> torch.Tensor:
        """Return a zeroed buffer that lies where the gradients of a job lie."""
        return self._of(how).zeros(numel, torch.float32, HOST)

    def _of(self, how: str) -> Transport:
        return self._transports[Method.of(how.partition(" ")[0]).transport]

    def reduce(self, how: str) -> Callable[[torch.Tensor], object]:
        """Return the function that sums a buffer over all ranks in place."""
        transport = self._of(how)
        candidate, _, wire = how.partition(" ")
        algorithm = Method.of(candidate).algorithm
        if wire != Wire.BFLOAT16:
            return lambda buffer: transport.allreduce([buffer], self._abort, algorithm)

        def rounded(buffer: torch.Tensor) -> None:
            if buffer.numel() not in self._residuals:
                self._residuals[buffer.numel()] = torch.zeros_like(buffer)
            residual = self._residuals[buffer.numel()]
            transport.allreduce_rounded([buffer], [residual], self._abort, algorithm)

        return rounded

    def describe(self) -> dict[str, str]:
        """Return the description of the first transport."""
        return next(iter(self._transports.values())).describe()

    def end(self) -> None:
        """Exit at once."""
        os._exit(0)  # as a rank does: MPI_Finalize would wait for all ranks


def of_one_machine(*, native: bool) -> Paceline:
    """Return the mpi transport, with one process manager per rank, and shared memory."""
    from paceline.transport.mpi.transport import MpiTransport
    from paceline.transport.shm.memory import SharedMemory
    from paceline.transport.shm.transport import ShmTransport

    links = MpiTransport(host=os.environ["B2_HOST"], native=native)
    return Paceline([links, ShmTransport(SharedMemory(), native=native)])


def of_two_machines() -> Paceline:
    """Return the transports that work between machines, alone and below shared memory."""
    from paceline.transport.mpi.transport import MpiTransport
    from paceline.transport.shm.hier import HierTransport
    from paceline.transport.shm.memory import SharedMemory
    from paceline.transport.torch.gloo import GlooTransport

    host, place, memory = os.environ["B2_HOST"], os.environ["B2_MACHINE"], SharedMemory()
    return Paceline(
        [
            MpiTransport(host=host),
            GlooTransport(host=host),
            HierTransport(memory, MpiTransport(host=host), place=place),
            HierTransport(memory, GlooTransport(host=host), place=place),
        ]
    )


class Rivals:
    """MPICH's own allreduce in one world, and gloo through torch.distributed."""

    def __init__(self) -> None:
        import mpi4py

        # MPICH is fastest with one thread. It yields shared cores only with several threads.
        shared = int(os.environ["B2_RANKS"]) > (os.cpu_count() or 1)
        mpi4py.rc.thread_level = "multiple" if shared else "single"
        from mpi4py import MPI

        self._mpi = MPI
        self.address = ""

    def open(self, rank: int, peers: list[tuple[str, str]]) -> None:
        """Initialize torch.distributed with gloo; MPI's world exists already."""
        import torch.distributed as dist

        store = f"file://{os.environ['B2_FOLDER']}/gloo-{len(peers)}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=len(peers))
        self._gloo = dist.all_reduce

    def reduce(self, how: str) -> Callable[[torch.Tensor], object]:
        """Return the function that sums a buffer over all ranks in place."""
        if how == "gloo":
            return self._gloo
        world, in_place = self._mpi.COMM_WORLD, self._mpi.IN_PLACE
        return lambda buffer: world.Allreduce(in_place, buffer.numpy())

    def buffer(self, how: str, numel: int) -> torch.Tensor:  # noqa: ARG002
        """Return a zeroed buffer."""
        return torch.zeros(numel)

    def describe(self) -> dict[str, str]:
        """Return the version of the MPI library."""
        return {"mpi": self._mpi.Get_library_version().split("\n", 1)[0]}

    def end(self) -> None:
        """Finalize MPI and exit."""
        self._mpi.Finalize()  # otherwise its shared memory would stay
        os._exit(0)


class Starter:
    """Stands for GO: a message of rank 0 to each other rank, which waits in the kernel."""

    def __init__(self, rank: int, where: str, others: int) -> None:
        self._lines: list[Connection] = []
        if rank == 0:
            listener = Listener(where, "AF_UNIX")
            self._lines = [listener.accept() for _ in range(others)]
            listener.close()
        else:
            self._lines = [self._dial(where)]
        self._leads = rank == 0

    @staticmethod
    def _dial(where: str) -> Connection:
        until = now_ns() + 30 * 10**9
        while True:
            try:
                return Client(where, "AF_UNIX")
            except (FileNotFoundError, ConnectionRefusedError):
                if now_ns() > until:
                    raise
                time.sleep(0.02)

    def go(self) -> int:
        """Send or receive GO; return when it left (rank 0) or arrived, in ns."""
        begun = now_ns()
        for line in self._lines:
            if self._leads:
                line.send_bytes(b"go")
            else:
                line.recv_bytes()
        return begun if self._leads else now_ns()


def serve(
    system: Paceline | Rivals, rank: int, starter: Starter, connection: Connection, work: Work
) -> None:
    """Execute the benchmark's commands until it sends None."""
    while (command := connection.recv()) is not None:
        match command:
            case ("describe",):
                connection.send(system.describe())
            case ("work", kind):
                work.set(kind)
                connection.send(kind)
            case ("bandwidth", numel):
                connection.send(copies(numel))
            case ("reduce", how, numel, calls):
                buffer = system.buffer(how, numel)
                call = system.reduce(how)
                times = []
                for number in range(calls):
                    buffer.fill_(number % 5 + rank)
                    time.sleep(REST_S)
                    begun = starter.go()
                    call(buffer)
                    times.append((begun, now_ns()))
                connection.send((times, float(buffer[0]), float(buffer[-1])))
    work.ended = True
    work.changed.set()


def copies(numel: int) -> float:
    """Return the bytes per second, read and written, of copies in this process."""
    source, target = torch.ones(numel), torch.empty(numel)
    target.copy_(source)
    spent = []
    for _ in range(9):
        begun = now_ns()
        target.copy_(source)
        spent.append(now_ns() - begun)
    return 2 * source.nbytes / (sorted(spent)[len(spent) // 2] / 1e9)


def main() -> None:
    """Connect to the benchmark, join the other ranks, and serve its commands."""
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-4)  # the same as in a rank
    address, name, kind = sys.argv[1:]
    connection = Client(address, "AF_UNIX")
    system: Paceline | Rivals
    match kind:
        case "rivals":
            system = Rivals()
        case "levels":
            system = of_two_machines()
        case _:
            system = of_one_machine(native=kind != "plain")
    connection.send((name, os.getpid(), system.address))
    rank, peers, where = connection.recv()
    system.open(rank, peers)
    starter = Starter(rank, where, len(peers) - 1)
    connection.send("ready")
    work = Work()
    arguments = (system, rank, starter, connection, work)
    if kind == "rivals":  # MPICH is fastest with one thread
        serve(*arguments)
    else:
        thread = threading.Thread(target=serve, args=arguments)
        thread.start()
        work.go_on()
        thread.join()
    connection.close()
    system.end()


main()
