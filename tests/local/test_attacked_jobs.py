"""A job completes although every process of the machine attacks it while its membership changes."""

from __future__ import annotations

import json
import os
import random
import re
import socket
import struct
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import pytest
import zmq

from testing.processes.runs import forked_paceline, joined
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

OTHER_USER: Final = 54_321
JOB: Final = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {name: job}
spec:
  replicas: 3
  collective: {mode: Quorum, quorum: 2, maxAge: 0}
  template:
    spec:
      containers: [{name: trainer, image: none, command: [python, script.py]}]
"""
SCRIPT: Final = """\
import os, time
import torch
from paceline.transport.rendezvous import Rendezvous
from paceline.worker.peer_sockets import PeerSockets

def tell_address(kind):
    before = kind.__init__
    def init(self, *args, **options):
        before(self, *args, **options)
        with open(os.path.join(os.environ["ADDRESSES"], f"{os.getpid()}-{id(self)}"), "w") as file:
            file.write(self.address)
    kind.__init__ = init

tell_address(Rendezvous)
tell_address(PeerSockets)
import paceline as pl

torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Linear(8, 1)
x = torch.randn(600, 8, generator=torch.Generator().manual_seed(1))
data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
pl.init()
optimizer = pl.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.01), net)
loader = pl.DataLoader(data, 4, seed=5)
steps = 0
for _ in loader.epochs(8):
    for x, y in loader:
        steps += 1
        if steps > 60 and pl.size() < 4:
            time.sleep(0.25)  # the job shall not end before all are there
        torch.nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
print("ENDED", flush=True)
"""
AS_ANOTHER_USER: Final = """
import os, socket, sys, time
folder, user = os.open(sys.argv[1], os.O_RDONLY), int(sys.argv[2])
def addresses():
    for name in os.listdir(folder):
        with open(os.open(name, os.O_RDONLY, dir_fd=folder)) as file:
            yield file.read()
attacks = 0
while os.getppid() > 1:
    for address in list(addresses()):
        place, _, name = address.rpartition("/")
        if not place or "{" in address:
            continue
        os.seteuid(user)
        caller = socket.socket(socket.AF_UNIX)
        caller.settimeout(0.5)
        try:
            caller.connect("\\0" + name)
            caller.sendall(b"\\0\\1\\x86\\xa0" + b"[" * 100_000)
            attacks += 1
        except OSError:
            pass
        os.seteuid(0)
        caller.close()
    print(attacks, flush=True)
    time.sleep(0.02)
"""


class Attack:
    """Attacks every rendezvous and every lane of the ranks repeatedly until it is ended."""

    def __init__(self, folder: Path, attacked: str) -> None:
        self.folder, self.attacked, self.sent = folder, attacked, 0
        self._end = threading.Event()
        self._dice = random.Random(11)
        self._calls: list[socket.socket] = []
        self._context = zmq.Context()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Attack:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        for call in self._calls:
            call.close()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        while not self._end.wait(0.02):
            for file in self.folder.iterdir():
                address = file.read_text()
                if address.startswith("{"):
                    if self.attacked == "all":
                        self._attack_lanes(address)
                elif address:
                    self._attack_rendezvous(address)

    def _attack_rendezvous(self, address: str) -> None:
        place, _, name = address.rpartition("/")
        if place:
            call, target = socket.socket(socket.AF_UNIX), "\0" + name
        else:
            host, _, port = address.rpartition(":")
            call, target = socket.socket(), (host, int(port))  # type: ignore[assignment]
        call.setblocking(False)
        self._calls.append(call)
        old = json.dumps(
            {"key": "1.1@x", "number": 1 << 20, "from": "0.0#0", "serial": ""}
        ).encode()
        body = self._dice.choice([b"[" * 100_000, b'{"a":' * 50_000, old, os.urandom(500), b"5"])
        data = self._dice.choice(
            [
                struct.pack("!I", len(body)) + body,
                os.urandom(32) + struct.pack("!I", len(body)) + os.urandom(32) + body,
                struct.pack("!I", 1 << 20) + bytes(1 << 19),
                b"",
            ]
        )
        with suppress(OSError):
            call.connect_ex(target)
            call.send(data)
            self.sent += 1
        while len(self._calls) > 200:
            self._calls.pop(0).close()

    def _attack_lanes(self, address: str) -> None:
        for lane in msgspec.json.decode(address).values():
            there = self._context.socket(zmq.PUSH)
            there.set(zmq.IMMEDIATE, 1)
            there.connect(lane)
            if there.poll(20, zmq.POLLOUT):
                frames = [
                    [b""],
                    [b"\x02" + b"\x91" * 60_000],
                    [b"\x02" + os.urandom(100)],
                    [msgspec.msgpack.encode([5, 1 << 40]), b"\x02half"],
                    [os.urandom(10)] * 50,
                ]
                there.send_multipart(self._dice.choice(frames), zmq.NOBLOCK)
                self.sent += 1
            there.close(linger=200)


@pytest.mark.parametrize("attacked", exhaustive_except(["all"], ["all", "rendezvous"]))
@pytest.mark.parametrize("backend", exhaustive_except(["shm"], ["shm", "gloo", "mpi"]))
def test_a_job_under_attack_changes_membership_and_completes(
    tmp_path: Path, backend: str, attacked: str
) -> None:
    """Send frames of strangers; one from another user used to fail the next membership change."""
    addresses = tmp_path / "addresses"
    addresses.mkdir()
    (tmp_path / "job.yaml").write_text(JOB)
    (tmp_path / "script.py").write_text(SCRIPT)
    stranger = None
    if os.geteuid() == 0:
        stranger = subprocess.Popen(
            [sys.executable, "-c", AS_ANOTHER_USER, str(addresses), str(OTHER_USER)],
            stdout=subprocess.PIPE,
            text=True,
        )
    try:
        with Attack(addresses, attacked) as attack:
            code, output = forked_paceline(
                tmp_path,
                *("run", "job.yaml", "--run-dir=run"),
                *("--set", f"spec.collective.backend={backend}"),
                *("--inject", "kill:rank=1,at=round:30", "--inject", "join:at=round:30"),
                ADDRESSES=str(addresses),
            )
    finally:
        attacks = 0
        if stranger is not None:
            stranger.kill()
            attacks = int(stranger.communicate()[0].split()[-1])
    assert code == 0, output
    assert output.count("ENDED") == 4, output
    assert joined(output) == {"1.0#1", "3.0#0"}
    assert "epochs               8 with each sample applied exactly once" in output
    assert attack.sent > 0
    if backend == "shm" and stranger is not None:
        assert attacks > 0
    assert re.search(r"rendezvous: refused a message of ", output), output
    assert bool(re.search(r"peers: refused a message of ", output)) == (attacked == "all"), output
    assert output.count("refused a message of ") < 50, "one line in a minute, entry point and rank"
