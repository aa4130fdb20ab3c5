"""First program of a rank process: it reports to the agent, then becomes the user's command.

It is run by path with `python -I -S`, so it may import the standard library only and starts in 15
ms.

The agent's only evidence of a death is `waitpid` on the rank itself (D6). Under mpiexec a rank
would be a child of hydra's proxy. So this program splits in two. The *guard* stays with the proxy,
keeps the chain mpiexec - proxy - guard alive while the rank lives, and shows the agent by the end
of its connection when the chain breaks. The *rank* is handed over to the agent, which is a child
subreaper, so its exit status reaches the agent on any kernel. Measured with MPICH 5.0.2: MPI_Init
and Open_port work in a rank that was handed over.

The rank asks the kernel to kill it when the agent dies, moves into a session of its own and reports
its pid to the agent (by SO_PEERCRED). It receives five descriptors: stdout, stderr, the memory of
its metrics, its line to the coordinator (R43), and the order. The order holds command, environment
and folder, which so never pass through hydra (to which a lone ":" among the arguments would mean a
second program). A rank of a group also receives its sockets within the group (R50). Then it
executes the command. The connection stays open across that, as PACELINE_AGENT_FD.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import sys
import time

ENV_SOCKET = "PACELINE_SHIM_SOCKET"
ENV_KEY = "PACELINE_SHIM_KEY"
ENV_AGENT = "PACELINE_SHIM_AGENT"
ENV_GUARD = "PACELINE_SHIM_GUARD"

PR_SET_PDEATHSIG = 1
HANDOVER_S = 5.0
ANSWER_S = 30.0
EXIT_UNSTARTABLE = 127
DESCRIPTORS_MAX = 5 + 63
"""Largest number of descriptors to receive: those of a group's lead, which has a socket to each of
the other ranks."""


def main() -> None:
    """Report to the agent, receive the order and become the user's command."""
    name, key = os.environ.pop(ENV_SOCKET), os.environ.pop(ENV_KEY)
    agent = int(os.environ.pop(ENV_AGENT))
    if os.environ.pop(ENV_GUARD) == "1":
        _become_rank_or_guard(name, key)
    _die_with_parent(agent)
    line = _connect(name, key, "rank")
    line.settimeout(ANSWER_S)
    try:
        answer, descriptors, _, _ = socket.recv_fds(line, 16, DESCRIPTORS_MAX)
    except OSError as error:
        sys.exit(f"paceline: no answer from the agent: {error}")
    if not answer:
        os._exit(0)  # the agent has given up on this start
    line.settimeout(None)
    stdout, stderr, record, talk, order, *group = descriptors
    with open(order, "rb") as file:  # noqa: PTH123  (a descriptor, no path)
        wanted = json.load(file)
    _take_over(stdout, stderr, record, talk, line)
    _join_group(group)
    os.environ.update(wanted["env"])
    _enter(line, wanted["dir"], wanted["umask"])
    _execute(line, wanted["argv"])


def _become_rank_or_guard(name: str, key: str) -> None:
    """Split in two. Return in the rank, a child of the agent; stay here in the guard."""
    _die_with_parent(None)
    line = _connect(name, key, "guard")
    read_end, write_end = os.pipe()
    middle = os.fork()
    if middle == 0:
        middle = os.getpid()
        if os.fork() > 0:
            os._exit(0)
        line.close()
        os.close(read_end)
        until = time.monotonic() + HANDOVER_S
        while os.getppid() == middle:
            if time.monotonic() > until:
                os._exit(EXIT_UNSTARTABLE)
            time.sleep(0.0002)  # wait until the middle process has ended
        os.write(write_end, b"%d" % os.getpid())
        os.close(write_end)
        os.setsid()
        return
    os.waitpid(middle, 0)
    os.close(write_end)
    text = os.read(read_end, 20)
    if text:
        try:
            rank = os.pidfd_open(int(text))
        except ProcessLookupError:
            os._exit(0)
        poll = select.poll()
        poll.register(rank, select.POLLIN)
        poll.register(line.fileno(), select.POLLIN)
        poll.poll()  # ends with the rank or with the agent, whichever is first
    # Not the rank's exit code: hydra would print a page about it, and the agent has it already.
    os._exit(0)


def _die_with_parent(parent: int | None) -> None:
    """Have the kernel send SIGKILL to this process when its parent ends. Kept across exec."""
    before = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != (parent or before):
        # The parent died before the request took effect, or another process has adopted this one.
        sys.exit(
            f"paceline: this process is a child of {os.getppid()} instead of {parent or before}"
        )


def _connect(name: str, key: str, role: str) -> socket.socket:
    line = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        line.connect(f"\0{name}")
        line.send(json.dumps({"kind": role, "key": key}).encode())
    except OSError as error:
        sys.exit(f"paceline: no connection to the agent: {error}")
    return line


def _take_over(stdout: int, stderr: int, record: int, talk: int, line: socket.socket) -> None:
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    os.close(stdout)
    os.close(stderr)
    os.set_inheritable(record, True)
    os.set_inheritable(talk, True)
    line.set_inheritable(True)
    os.environ["PACELINE_RECORD_FD"] = str(record)
    os.environ["PACELINE_LINE_FD"] = str(talk)
    os.environ["PACELINE_AGENT_FD"] = str(line.fileno())
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec keeps that
        signal.signal(number, signal.SIG_DFL)


def _enter(line: socket.socket, folder: str, umask: int | None) -> None:
    if umask is not None:
        os.umask(umask)
    try:
        if folder:
            os.chdir(folder)
    except OSError as error:
        _fail(line, f"the working folder {folder} cannot be used: {error.strerror}")


def _execute(line: socket.socket, argv: list[str]) -> None:
    try:
        os.execvp(argv[0], argv)
    except OSError as error:
        _fail(line, _why_not(argv[0], error))


def _join_group(lines: list[int]) -> None:
    for line in lines:
        os.set_inheritable(line, True)
    if lines:
        os.environ["PACELINE_GROUP_FDS"] = ",".join(map(str, lines))


def _why_not(command: str, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        if os.sep in command and os.path.exists(command):  # noqa: PTH110  (pathlib is slow to import)
            return f"the interpreter in the first line of {command} does not exist"
        where = f"in {os.getcwd()}" if os.sep in command else "in any folder of PATH"  # noqa: PTH109
        return (
            f'command not found: there is no "{command}" {where}; '
            "hint: see command of the container trainer in spec.template"
        )
    if isinstance(error, PermissionError):
        return f'"{command}" must not be executed: {error.strerror}; hint: chmod +x'
    return f'"{command}" cannot be executed: {error.strerror}'


def _fail(line: socket.socket, message: str) -> None:
    line.send(json.dumps({"kind": "unstartable", "message": message}).encode())
    os._exit(EXIT_UNSTARTABLE)


if __name__ == "__main__":
    main()
