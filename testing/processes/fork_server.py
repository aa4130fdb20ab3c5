"""Processes that start fast: forked from one that has imported everything (D16).

A rank spends its first six CPU-seconds on importing torch. Here one process, the fork server,
imports it once, before any thread, MPI or event loop. Runners, coordinators, agents and ranks are
forked from it or from each other. This replaces only exec: every process is a real one with its own
pid, parent, session, descriptors, environment and signals. A rank is a child of its agent, started
below its own mpiexec with PMI's environment, and ends as any interpreter does.

    fork server of a test run -> fork server of a test process -> runner of a history
        -> its fork server -> coordinator, agents -> their fork servers -> ranks

A fork server forks the processes that are requested over its socket. It forks twice, so that the
new process becomes a child of the nearest subreaper above: the runner, or the agent.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import importlib
import json
import os
import secrets
import select
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NoReturn

PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
MADV_COLLAPSE: Final = 25
HUGE: Final = 2 << 20
NAME: Final = "paceline-fork-server"
"""What the names of the sockets of fork servers begin with."""
LISTENER_FD: Final = 3
ORDER_BYTES_MAX: Final = 256 * 1024
FDS_MAX: Final = 16
ANSWER_S: Final = 20.0
IMPORT_S: Final = 120.0
PRELOADED: Final = (
    *("numpy", "torch", "torch._dynamo", "aiohttp", "zmq", "msgspec", "mpi4py"),
    *("paceline", "paceline.agent.__main__", "paceline.coordinator.__main__"),
    *("paceline.cli.run", "paceline.cli.status", "paceline.local.runner"),
    *("paceline.transport.factory", "paceline.transport.mpi.transport"),
    *("paceline.worker.session", "paceline.worker.checkpoint.service", "zmq.utils.z85"),
    *("paceline.train.context", "paceline.train.loader"),
    *("paceline.train.optimizer", "paceline.train.steps", "paceline.transport.solo"),
    *(
        "paceline.transport.torch.gloo",
        "testing.processes.history_run",
        "testing.processes.forked",
        "runpy",
    ),
)


class Become(BaseException):
    """Raised in a new process, so that it works on an empty stack instead of its parent's."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order


def preload(modules: Sequence[str]) -> None:
    """Import everything, and prepare the memory so that children copy little of it."""
    for name in modules:
        importlib.import_module(name)
    if torch := sys.modules.get("torch"):
        # The first optimizer of a process imports much more of torch.
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    settle()


def settle() -> None:
    """Prepare the memory for children after imports."""
    gc.collect()
    gc.freeze()  # a collection in a child must not copy all these pages
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        each.atexit = False  # nor may a child's exit finalize objects of its parent
    use_huge_pages()


def use_huge_pages() -> None:
    """Put the present memory on pages of 2 MiB, where the kernel can (Linux 6.1).

    A fork copies the page tables: it took 29 ms before, and takes 5 ms then.
    """
    libc = ctypes.CDLL(None)
    with open("/proc/self/maps") as maps:  # noqa: PTH123  (pathlib is slow to import)
        lines = maps.read().splitlines()
    for line in lines:
        place, rights, _, _, inode, *_ = line.split()
        begin, end = (int(text, 16) for text in place.split("-"))
        if inode == "0" and rights.startswith("rw"):
            for at in range(-(-begin // HUGE) * HUGE, end // HUGE * HUGE, HUGE):
                libc.madvise(ctypes.c_void_p(at), ctypes.c_size_t(HUGE), MADV_COLLAPSE)


def ask(
    name: str,
    call: str,
    *,
    arguments: Sequence[Any] = (),
    env: Mapping[str, str],
    cwd: str = "",
    fds: Mapping[int, int],
    leader: bool = True,
    limit_s: float = ANSWER_S,
) -> int:
    """Start a process by a fork server.

    Args:
        name: name of the fork server.
        call: "module:function" that the process calls; it exits with the result.
        arguments: positional arguments, as JSON values.
        env: whole environment of the process.
        cwd: working directory; by default that of the caller.
        fds: descriptor in the process -> descriptor here; it inherits no others.
        leader: the process leads a new session.
        limit_s: timeout of the answer in seconds.

    Returns:
        the pid of the new process.

    Raises:
        RuntimeError: the fork server started no process.
    """
    order = {
        "call": call,
        "arguments": list(arguments),
        "env": dict(env),
        "cwd": cwd or os.getcwd(),  # noqa: PTH109
        "fds": list(fds),
        "leader": leader,
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(limit_s)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * ORDER_BYTES_MAX)
        line.connect(f"\0{name}")
        socket.send_fds(line, [json.dumps(order).encode()], list(fds.values()))
        answer = line.recv(64)
    if not answer:
        raise RuntimeError(f"the fork server did not start {call}")
    return int(answer)


def import_in(name: str, modules: Sequence[str]) -> None:
    """Make a fork server import modules, so that none of its later processes needs the time.

    Args:
        name: name of the fork server.
        modules: names of modules, which must not import what Paceline replaces in a script's
            process: a name that a module has taken before stays as it was.

    Raises:
        RuntimeError: the fork server could not import them.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as line:
        line.settimeout(IMPORT_S)
        line.connect(f"\0{name}")
        line.send(json.dumps({"import": list(modules)}).encode())
        if not line.recv(64):
            raise RuntimeError(f"the fork server did not import {', '.join(modules)}")


def listener_of(name: str) -> socket.socket:
    """Return a new socket for the requests to the fork server of this name."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listener.bind(f"\0{name}")
        listener.listen(64)
    except OSError:
        listener.close()
        raise
    return listener


def start_below(leader: bool = True, without: Sequence[int] = ()) -> str:
    """Fork a fork server below this process, which must have no threads.

    The fork server ends with this process.

    Args:
        leader: the fork server leads a new session.
        without: descriptors of this process that the fork server must not hold open.

    Returns:
        its name for `ask`.

    Raises:
        Become: in each process that the fork server forks.
    """
    name = f"{NAME}-{secrets.token_hex(8)}"
    listener = listener_of(name)
    parent = os.getpid()
    if os.fork() == 0:
        try:
            die_with(parent)
            if leader:
                os.setsid()
            for fd in without:
                os.close(fd)
            serve(listener)
        except Become:
            raise
        except BaseException:
            os._exit(70)
    listener.close()
    return name


def stay(owner: int) -> NoReturn:
    """Be the fork server of a process until that ends; descriptor `LISTENER_FD` is its socket.

    Args:
        owner: pid of that process.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    serve(socket.socket(fileno=LISTENER_FD), os.pidfd_open(owner))


def serve(listener: socket.socket, owner: int = -1) -> NoReturn:
    """Fork or import what is requested; raises Become in each new process.

    Args:
        listener: socket for the requests.
        owner: pidfd of a process with whose end this one exits; -1 if there is none.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    while True:
        if owner >= 0 and owner in select.select([listener.fileno(), owner], [], [])[0]:
            os._exit(0)
        line, _ = listener.accept()
        line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * ORDER_BYTES_MAX)
        data, fds, _, _ = socket.recv_fds(line, ORDER_BYTES_MAX, FDS_MAX)
        order = json.loads(data or "{}")
        if "import" in order:
            for name in order["import"]:
                importlib.import_module(name)
            settle()
            line.send(b"imported")
        elif order:
            middle = os.fork()
            if middle == 0:
                listener_fd = listener.detach()  # no object may close a descriptor that is reused
                os.close(listener_fd)
                _deliver(order, fds, line.detach())
            os.waitpid(middle, 0)
        for fd in fds:
            os.close(fd)
        line.close()


def _deliver(order: dict[str, Any], fds: list[int], line: int) -> None:
    middle = os.getpid()
    if os.fork() > 0:
        os._exit(0)
    while os.getppid() == middle:
        time.sleep(0.0002)  # the process in the middle is about to exit
    if order["leader"]:
        os.setsid()
    os.write(line, str(os.getpid()).encode())
    _take_descriptors(dict(zip(order["fds"], fds, strict=True)))
    os.environ.clear()
    os.environ.update(order["env"])
    tempfile.tempdir = None  # it was computed from the old TMPDIR
    os.chdir(order["cwd"])
    raise Become(order)


def _take_descriptors(wanted: dict[int, int]) -> None:
    """Keep exactly the descriptors `wanted` (there -> here) and the standard ones open."""
    above = max([*wanted, *wanted.values(), 2]) + 1
    spare = {there: os.dup2(here, above + n) for n, (there, here) in enumerate(wanted.items())}
    for there, here in spare.items():
        os.dup2(here, there, inheritable=True)
    last = 2
    for there in sorted(fd for fd in wanted if fd > 2):
        os.closerange(last + 1, there)
        last = there
    os.closerange(last + 1, 65_536)


def die_with(parent: int, number: int = signal.SIGKILL) -> None:
    """Make the kernel signal this process when its parent ends; exit if it ended already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def become(order: dict[str, Any]) -> object:
    """Do the work of a new process and return the result."""
    module, _, function = order["call"].partition(":")
    return getattr(importlib.import_module(module), function)(*order["arguments"])


def run(work: Callable[[], object]) -> NoReturn:
    """Run `work` and exit; processes that are forked in it continue here, outside of its stack."""
    while True:
        try:
            result = work()
        except Become as new:
            work = partial(become, new.order)
            continue
        except SystemExit as end:
            result = end.code
        except BaseException:
            traceback.print_exc()
            result = 1
        break
    # End as multiprocessing ends its processes: tearing down the interpreter would touch, and so
    # copy, each page that is shared with the fork server.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(result if isinstance(result, int) else int(result is not None))


def main() -> None:
    """Run the first fork server.

    Its arguments are the descriptor of its socket, the pid of its parent, and modules to import.
    """
    preload(sys.argv[3:])
    die_with(int(sys.argv[2]))
    # Processes that a runner leaves behind become children of this process.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    serve(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    # Import it by its own name, so that later imports get the same module.
    this = importlib.import_module("testing.processes.fork_server")
    this.run(this.main)
