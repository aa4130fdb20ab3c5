"""A recorded run, replayed in one process, gives the same weights bit for bit (I15)."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path

import pytest
from paceline.core.protocol.pending import Merge, Swap
from paceline.core.replay import sequence as replay
from paceline.core.replay.journal import Did, Gave, Logged, Placed, pack
from paceline.errors import ReplayError
from paceline.train.replay import ReplaySession
from paceline.worker.journals import read_journals

from testing.processes.runs import forked_paceline, joined
from tests.layers import exhaustive_except

pytestmark = pytest.mark.processes

JOB = """\
apiVersion: paceline.dev/v1alpha1
kind: TrainingJob
metadata: {{name: job}}
spec:
  replicas: 3
  maxReplicas: 4
  collective: {{backend: {backend}, mode: Quorum, quorum: 2, hashEveryRounds: 10}}
  template:
    spec:
      containers:
      - name: trainer
        image: none
        command: [python, script.py]
        env: [{{name: DROPOUT, value: "{dropout}"}}]
"""
SCRIPT = """\
import os, time
import paceline as pl
import torch
from testing.processes import two_levels
from paceline_api.ids import parse_member

torch.manual_seed(0)
torch.set_num_threads(1)
if os.environ["LEVELS"] == "yes" and "PACELINE_MEMBER" in os.environ:
    two_levels.play(parse_member(os.environ["PACELINE_MEMBER"]).slot)
pl.init()
HIDDEN, TWICE = int(os.environ["HIDDEN"]), os.environ["TWICE"] == "yes"
net = torch.nn.Sequential(
    torch.nn.Linear(8, HIDDEN), torch.nn.Dropout(float(os.environ["DROPOUT"])),
    torch.nn.Linear(HIDDEN, 1),
)
optimizer = pl.DistributedOptimizer(torch.optim.Adam(net.parameters(), lr=0.01), net, clip_norm=1.0)
x = torch.randn(603, 8, generator=torch.Generator().manual_seed(1))
loader = pl.DataLoader(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), 4, accumulate=2)
if TWICE:
    net[0].weight.register_hook(lambda _: time.sleep(0.005))  # the last of backward()
EPOCHS, WAIT_FOR, STOP = (int(os.environ[name]) for name in ("EPOCHS", "WAIT_FOR", "STOP"))
steps = 0
for _ in loader.epochs(EPOCHS):
    for x, y in loader:
        steps += 1
        if steps > 60 and pl.size() < WAIT_FOR:
            time.sleep(0.2)  # the job shall not end before all are there
        loss = torch.nn.functional.mse_loss(net(x), y)
        if TWICE and x[0, 0] > 1.5:  # by the batch alone, so that the replay does it too
            loss = loss / 2
            loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        if steps == STOP:
            pl.stop()
"""


def call(folder: Path, *words: str, **env: str) -> tuple[int, str]:
    usual = {"EPOCHS": "3", "WAIT_FOR": "0", "STOP": "0", "HIDDEN": "90", "TWICE": "no"}
    usual["LEVELS"] = "no"
    return forked_paceline(folder, *words, **(usual | env))


def record(folder: Path, *words: str, backend: str = "mpi", dropout: str = "0", **env: str) -> str:
    (folder / "job.yaml").write_text(JOB.format(backend=backend, dropout=dropout))
    (folder / "script.py").write_text(SCRIPT)
    code, output = call(folder, "run", "job.yaml", "--record", "--run-dir", "run", *words, **env)
    assert code == 0, output
    return output


@pytest.mark.exhaustive
def test_a_run_ended_by_its_script_is_replayed_to_its_end(tmp_path: Path) -> None:
    """End the run by a count in the script.

    The replay makes the steps of all ranks, so it reaches that count much earlier.
    """
    record(tmp_path, backend="gloo", STOP="40")
    code, output = call(tmp_path, "replay", "run", STOP="40")
    assert code == 0, output
    assert "same: the state of version" in output
    assert int(re.findall(r"replayed (\d+) rounds", output)[0]) >= 20


@pytest.mark.parametrize("backend", exhaustive_except(["shm"], ["mpi", "gloo", "shm"]))
def test_a_slow_rank_a_kill_and_joins_replay_to_the_same_state(
    tmp_path: Path, backend: str
) -> None:
    output = record(
        tmp_path,
        *("--inject", "slow:rank=2,ms=40"),
        *("--inject", "kill:rank=1,at=round:40"),
        *("--inject", "join:at=round:40"),
        backend=backend,
        EPOCHS="5",
        WAIT_FOR="4",
    )
    assert joined(output) == {"1.0#1", "3.0#0"}
    journals = read_journals(tmp_path / "run")
    kinds = Counter(type(entry) for journal in journals.values() for entry in journal)
    ops = Counter(
        type(entry.op) for journal in journals.values() for entry in journal if type(entry) is Did
    )
    assert kinds[Placed] >= 2, "somebody joined"
    assert ops[Merge] + ops[Swap] > 10, "late gradients were moved and added up"
    code, output = call(tmp_path, "replay", "run", EPOCHS="5")
    assert code == 0, output
    assert re.search(r"replayed \d+ rounds with \d+ contributions of 5 ranks", output)
    assert "same: the state of version" in output


@pytest.mark.exhaustive
@pytest.mark.parametrize("backend", ["mpi", "gloo"])
def test_sums_of_two_levels_replay_to_the_same_state(tmp_path: Path, backend: str) -> None:
    """Change the machines during the run.

    First two ranks are on one machine and one on another, then one on each, then two on each. The
    slices have a mebibyte and more.
    """
    large = {"HIDDEN": "90000", "LEVELS": "yes"}
    record(
        tmp_path,
        *("--inject", "kill:rank=1,at=round:20"),
        *("--inject", "join:at=round:20"),
        backend=backend,
        WAIT_FOR="4",
        **large,
    )
    journals = read_journals(tmp_path / "run")
    given = [e for journal in journals.values() for e in journal if isinstance(e, Gave)]
    assert all(name.startswith(f"hier:{backend}") for e in given for name in e.methods)
    assert {(0, 1, 0), (0, 1, 0, 1)} <= {entry.machines for entry in given}
    code, output = call(tmp_path, "replay", "run", **large)
    assert code == 0, output
    assert "same: the state of version" in output


@pytest.mark.exhaustive
def test_streamed_and_aborted_rounds_replay_to_the_same_state(tmp_path: Path) -> None:
    """Run backward() twice for some batches; the second pass writes what was already summed."""
    settings = ("mode=Full", "quorum=3", "segmentBytes=65536")
    words = [f"--set=spec.collective.{setting}" for setting in settings]
    large = {"HIDDEN": "9000", "TWICE": "yes"}
    record(tmp_path, *words, **large)
    log = json.loads((tmp_path / "run" / "status.json").read_text())["log"]
    assert log["streamed"] > 0, log
    assert log["rounds"]["void"] > 0, log
    code, output = call(tmp_path, "replay", "run", **large)
    assert code == 0, output
    assert "same: the state of version" in output


@pytest.mark.exhaustive
def test_a_pipelined_run_replays_to_the_same_state(tmp_path: Path) -> None:
    """Use a pipeline (R36), a rank that is sometimes late, a kill and a join."""
    record(
        tmp_path,
        "--set=spec.collective.pipeline=1",
        *("--inject", "slow:rank=2,ms=40"),
        *("--inject", "kill:rank=1,at=round:40"),
        *("--inject", "join:at=round:40"),
        EPOCHS="8",
        WAIT_FOR="4",
    )
    code, output = call(tmp_path, "replay", "run", EPOCHS="8")
    assert code == 0, output
    assert "same: the state of version" in output


@pytest.mark.timeout(900)  # six programs in turn, each of which imports torch
def test_replay_detects_other_data_a_changed_journal_and_missing_ones(tmp_path: Path) -> None:
    record(tmp_path)
    run = tmp_path / "run"
    code, output = call(tmp_path, "replay", "run")
    assert (code, "same: " in output) == (0, True), output

    code, output = call(tmp_path, "replay", "run", EPOCHS="4")
    assert code == 1
    assert "other data than in the run" in output

    journals = read_journals(run)
    # Double one contribution: the first hash after it must differ. Which rank contributed to which
    # round depends on timing. The rank whose journal has the log from its beginning is needed
    # below.
    others = {
        member: journal
        for member, journal in journals.items()
        if not any(isinstance(entry, Logged) and entry.index == 1 for entry in journal)
    }
    member, at, gave = next(
        (member, at, entry)
        for member, journal in others.items()
        for at, entry in enumerate(journal)
        if isinstance(entry, Gave) and entry.round > 10 and entry.source and entry.factor
    )
    version = (gave.round // 10 + 1) * 10
    path = run / "record" / f"{str(member).replace('#', '-')}.journal"
    whole = path.read_bytes()
    entries = list(journals[member])
    entries[at] = Gave(gave.generation, gave.round, gave.source, 2 * gave.factor, gave.methods)
    head = whole[: len(whole) - sum(len(pack(e)) for e in journals[member])]
    path.write_bytes(head + b"".join(map(pack, entries)))
    code, output = call(tmp_path, "replay", "run")
    assert code == 1
    assert f"the weights differ from version {version} on" in output
    assert "hint: a gradient must depend on weights and batch alone" in output

    path.unlink()
    code, output = call(tmp_path, "replay", "run")
    assert code == 1
    assert f"the journal of rank {member} lacks what it gave to round" in output
    assert output.count("error: ") == 1
    shutil.rmtree(run / "record")
    code, output = call(tmp_path, "replay", "run")
    assert code == 1
    assert "run the job with --record" in output


def test_replay_refuses_a_run_whose_sums_were_rounded(tmp_path: Path) -> None:
    job = json.loads((Path(__file__).parents[1] / "api/golden/job.json").read_text())
    (tmp_path / "job.json").write_text(json.dumps(job | {"wire": "BFloat16"}))
    with pytest.raises(ReplayError, match="travelled as BFloat16") as refused:
        ReplaySession(tmp_path)
    assert "spec.collective.wire: Float32" in refused.value.hint


def test_an_unsupported_replay_is_refused_before_the_script_starts(tmp_path: Path) -> None:
    """Replay unsupported runs.

    The error used to be a traceback of the script, after torch was imported.
    """
    job = json.loads((Path(__file__).parents[1] / "api/golden/job.json").read_text())
    here = {"command": [sys.executable, "-c", "print('started')"], "workingDir": str(tmp_path)}
    run = tmp_path / "run"
    run.mkdir()
    for change, problem in (
        ({}, "has no journals, which ranks write only where they are asked to"),
        ({"wire": "BFloat16"}, "gradients travelled as BFloat16"),
    ):
        (run / "job.json").write_text(json.dumps(job | here | change))
        code, output = call(tmp_path, "replay", "run")
        assert code == 1
        assert problem in output
        assert output.count("error: ") == 1
        assert "Traceback" not in output
        assert "started" not in output


@pytest.mark.exhaustive
def test_an_error_of_the_script_is_one_line_in_the_replay_output(tmp_path: Path) -> None:
    """Change the environment of the script, or let it fail before it calls `init()`."""
    record(tmp_path, backend="gloo", STOP="40")
    code, output = call(tmp_path, "replay", "run", STOP="40", HIDDEN="none")
    assert code == 1
    assert "Traceback" not in output
    assert "did not come to its end: ValueError: invalid literal for int()" in output
    assert "hint: run it with the arguments, files and environment of the run" in output
    assert "Traceback" in (tmp_path / "run" / "replay.log").read_text()
    script = (tmp_path / "script.py").read_text()
    (tmp_path / "script.py").write_text(f"import os\nos.environ['NOT_THERE']\n{script}")
    code, output = call(tmp_path, "replay", "run", STOP="40")
    assert code == 1
    assert "Traceback" not in output
    assert "did not come to its end: KeyError: 'NOT_THERE'" in output


def test_replay_detects_a_nondeterministic_script(tmp_path: Path) -> None:
    record(tmp_path, dropout="0.5")
    code, output = call(tmp_path, "replay", "run")
    assert code == 1
    assert "the weights differ from version 10 on" in output


@pytest.mark.exhaustive
def test_a_truncated_journal_leaves_no_gap_in_the_log(tmp_path: Path) -> None:
    """Truncate one journal: each rank writes the whole log, so nothing is missing."""
    record(tmp_path)
    journals = read_journals(tmp_path / "run")
    first, *others = sorted(journals)
    logged = [i for i, e in enumerate(journals[first]) if isinstance(e, Logged)]
    whole = replay.true_log(journals)
    journals[first] = journals[first][: logged[len(logged) // 2]]
    assert replay.true_log(journals) == whole
    journals = {first: journals[first]}
    with pytest.raises(replay.SequenceError, match="no rank was released"):
        replay.true_log(journals)
    assert others
