"""The errors for mistakes of a user: rank or field, the reason and a hint, without a hang.

For every mistake the exit code is not 0, no traceback shows frames of Paceline, and no process is
left (`wait` checks it).
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path
from signal import SIGINT

import pytest

from testing.processes.runs import LIMIT_S, PACELINE, ForkedRun, forked_paceline
from tests.layers import exhaustive, exhaustive_except

pytestmark = pytest.mark.processes

HEAD = """\
import os, torch
import paceline as pl
torch.set_num_threads(1)
pl.init()
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.zeros(64, 4), torch.zeros(64, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
"""
LOOP = """\
optimizer = pl.DistributedOptimizer(sgd, model)
loader = pl.DataLoader(data, batch_size=4)
for epoch in loader.epochs(4):
    for x, y in loader:
        (model(x) - y).square().mean().backward()
        optimizer.step()
"""
ANOTHER_MODEL = (
    "if pl.rank() == 1:\n"
    "    model = torch.nn.Linear(4, 2)\n"
    "    sgd = torch.optim.SGD(model.parameters(), lr=0.1)\n" + LOOP
)
ONE_POD = tuple(
    f"--set=spec.{setting}"
    for setting in ("collective.backend=shm", "replicas=1", "procsPerReplica=2")
)


def train(folder: Path, script: str, *words: str) -> tuple[int, str]:
    """Run a script on two ranks."""
    (folder / "train.py").write_text(HEAD + script)
    return ForkedRun(folder, "[python, train.py]", "--quiet", *words).wait()


def line_of(script: str, text: str) -> int:
    """Return the number of the first line of the script that begins with `text`."""
    lines = (HEAD + script).splitlines()
    return next(n for n, line in enumerate(lines, 1) if line.strip().startswith(text))


def final_error(output: str) -> str:
    """Return the end of the output, from its last `error:` line on."""
    lines = output.splitlines()
    last = max(n for n, line in enumerate(lines) if line.startswith("error: "))
    return "\n".join(lines[last:])


def is_clean(output: str) -> bool:
    """Return True if no traceback in the output shows a frame of Paceline."""
    return "runtime/paceline/" not in output and "site-packages/paceline/" not in output


def no_restart(folder: Path) -> bool:
    """Return True if each rank was started exactly once."""
    logs = "".join(path.read_text() for path in folder.glob("runs/*/*.log"))
    return "#0 started with pid" in logs and "#1 started with pid" not in logs


def test_an_invalid_job_file_is_refused_before_a_run_folder_exists(tmp_path: Path) -> None:
    """This runs the installed program; test_commands covers the individual fields."""
    text = (
        "apiVersion: paceline.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: job}\n"
        "spec: {replicas: 2, collective: {backend: gloo}, template: {spec: {containers: ["
        "{name: trainer, image: none, command: [python, train.py]}]}}}\n"
    )
    (tmp_path / "job.yaml").write_text(text.replace("replicas", "replcas"))
    done = subprocess.run(
        [PACELINE, "run", "job.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "\nhint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert "spec.replcas" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_an_unknown_libfabric_provider_is_reported(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HEAD + LOOP)
    env = {**os.environ, "FI_PROVIDER": "no_such_provider"}
    words = ("--quiet", "--set", "spec.collective.backend=mpi")
    code, output = ForkedRun(tmp_path, "[python, train.py]", *words, env=env).wait()
    assert code == 1
    error = final_error(output)
    for part in ("FI_PROVIDER=no_such_provider", "hint: ", "spec.fabric.profile"):
        assert part in error
    assert "error: rank " in output
    assert "Traceback" not in output
    assert no_restart(tmp_path)


def test_an_unknown_command_is_reported(tmp_path: Path) -> None:
    code, output = ForkedRun(tmp_path, "[no-such-program, '1']", "--quiet").wait()
    assert code == 1
    error = final_error(output)
    assert 'command not found: there is no "no-such-program"' in error
    assert "hint: " in error
    assert "Traceback" not in output


def test_a_run_folder_that_cannot_be_created_is_reported(tmp_path: Path) -> None:
    for words, folder in ((["--run-dir", "/proc/here"], "/proc/here"), ([], "runs")):
        if not words:
            (tmp_path / "runs").write_text("a file, since root may write into every folder")
        code, output = ForkedRun(tmp_path, "[sleep, '100']", *words).wait()
        assert code == 2
        assert f"run folder {folder}" in output
        assert "hint: " in output
        assert "Traceback" not in output


def test_two_jobs_of_one_name_run_at_once_from_different_folders(tmp_path: Path) -> None:
    """A job started from another folder finds its script beside its job file.

    Two jobs with the same name do not disturb each other.
    """
    (tmp_path / "job").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "job" / "early.py").write_text("print('found', flush=True)\n")
    job = ForkedRun(tmp_path / "job", "[python, early.py]", "--quiet")
    other = forked_paceline(tmp_path / "here", "run", "../job/job.yaml", "--quiet")
    for code, output in (job.wait(), other):
        assert code == 1
        assert "] found" in output
        assert "pl.init()" in final_error(output)
        assert "Traceback" not in output


def test_a_second_run_with_the_same_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    words = ("--set", "spec.checkpoint.path=saved", "--quiet")
    (tmp_path / "wait.py").write_text("print('up', flush=True)\nimport time\ntime.sleep(100)\n")
    first = ForkedRun(tmp_path, "[python, wait.py]", *words)
    first.until("up")
    code, output = ForkedRun(tmp_path, "[python, wait.py]", *words, name="other").wait()
    assert code == 2
    assert f"another run keeps its checkpoints in {tmp_path / 'saved'}" in output
    assert "hint: " in output
    first.process.kill()
    first.until_gone()
    again = ForkedRun(tmp_path, "[python, -c, 'print(1)']", *words)
    assert again.wait()[0] == 1, "a killed run leaves no lock behind"


def test_unsupported_loaders_and_optimizers_are_refused_before_training(tmp_path: Path) -> None:
    """One script makes all mistakes: it prints each error, and does not catch the last one."""
    script = """\
from paceline.errors import PacelineError
def refused(make):
    try:
        make()
    except PacelineError as error:
        print(error.render(), flush=True)
refused(lambda: pl.DataLoader(data, batch_size=0))
refused(lambda: pl.DataLoader(torch.utils.data.TensorDataset(torch.zeros(0, 4))))
refused(lambda: pl.DataLoader(data, shuffle=True))
lbfgs = torch.optim.LBFGS(model.parameters())
pl.DistributedOptimizer(lbfgs, model)
"""
    code, output = train(tmp_path, script)
    assert code == 1
    assert "error: batch_size=0" in output
    assert "error: the data set is empty" in output
    assert "error: DataLoader(shuffle=...) is not supported" in output
    assert output.count("hint: ") >= 4
    error = final_error(output)
    assert error.startswith("error: rank ")
    assert "LBFGS is not supported" in error
    assert f"train.py, line {line_of(script, 'pl.DistributedOptimizer')})" in error
    assert "hint: use SGD, Adam" in error
    assert "Traceback" not in output
    assert no_restart(tmp_path)


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        (
            LOOP.replace(
                "        optimizer.step()",
                "        optimizer.step()\n"
                "        if pl.rank() == 1: optimizer.param_groups[0]['lr'] = 0.01",
            ),
            ["lr", "scheduler", "train.py, line "],
        ),
        (
            "scaler = torch.amp.GradScaler('cpu')\n"
            + LOOP.replace("optimizer.step()", "scaler.step(optimizer)")
            .replace(".mean().backward()", ".mean(); scaler.scale(loss).backward()")
            .replace("(model(x)", "loss = (model(x)"),
            ["GradScaler is not supported", "bfloat16"],
        ),
    ],
    ids=["learning-rate", "grad-scaler"],
)
def test_unsupported_use_of_the_optimizer_is_refused_while_training(
    tmp_path: Path, script: str, parts: list[str]
) -> None:
    # In Full each round needs both ranks, so the one with the mistake takes part.
    code, output = train(tmp_path, script, "--set=spec.collective.mode=Full")
    assert code == 1
    error = final_error(output)
    assert error.startswith("error: rank ")
    for part in (*parts, "hint: "):
        assert part in error, error
    assert "Traceback" not in output
    assert no_restart(tmp_path)


@pytest.mark.parametrize(
    ("script", "parts", "words"),
    [
        (ANOTHER_MODEL, ["rank", "shape"], ()),
        (ANOTHER_MODEL, ["rank 0.1#0 has other parameters", "shape"], ONE_POD),
        (
            "if pl.rank() == 1: data = torch.utils.data.Subset(data, range(60))\n" + LOOP,
            ["rank", "60", "64"],
            (),
        ),
    ],
    ids=["model", "model, in one pod", "data"],
)
def test_a_rank_with_another_model_or_data_set_is_reported(
    tmp_path: Path, script: str, parts: list[str], words: tuple[str, ...]
) -> None:
    code, output = train(tmp_path, script, *words)
    assert code == 1
    error = final_error(output)
    for part in (*parts, "hint: "):
        assert part in error, error
    assert "Traceback" not in output


WIDE = HEAD.replace(
    "torch.nn.Linear(4, 1)",
    "torch.nn.Sequential(torch.nn.Linear(4, 1 << 17), torch.nn.Linear(1 << 17, 1))",
)
LITTLE_MEMORY = """\
import paceline.transport.shm.memory as memory
memory.cgroup_limits = lambda _: iter([1 << 20])
"""
NO_MEMFD = """\
import os
def memfd_create(*_): raise PermissionError(1, "Operation not permitted")
os.memfd_create = memfd_create
"""


@pytest.mark.parametrize(
    ("script", "parts"),
    [
        (
            LITTLE_MEMORY + WIDE,
            ["MiB of shared memory for one buffer", "is 1 MiB", "resources.limits.memory"],
        ),
        (NO_MEMFD + HEAD, ["shm needs memfd_create", "not permitted", "seccomp profile"]),
    ],
    ids=["a limit smaller than a buffer", "memfd refused"],
)
def test_missing_shared_memory_of_a_pod_is_reported(
    tmp_path: Path, script: str, parts: list[str]
) -> None:
    """The memory limit and the seccomp profile of the pod are simulated."""
    (tmp_path / "train.py").write_text(script + LOOP)
    code, output = ForkedRun(tmp_path, "[python, train.py]", "--quiet", *ONE_POD).wait()
    assert code == 1
    error = final_error(output)
    for part in (*parts, "(train.py, line ", "hint: "):
        assert part in error, error
    assert "Traceback" not in output
    assert no_restart(tmp_path)


def test_a_script_that_raises_before_the_first_round_ends_the_job_without_a_restart(
    tmp_path: Path,
) -> None:
    """The exception is raised by the user's data set, called by the loader, on one rank."""
    script = (
        """\
class Broken(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, number):
        raise KeyError("no label for sample") if pl.rank() == 1 else IndexError
data = Broken() if pl.rank() == 1 else data
"""
        + LOOP
    )
    code, output = train(tmp_path, script)
    assert code == 1
    error = final_error(output)
    assert error.startswith("error: rank 1.0#0")
    assert "KeyError: 'no label for sample'" in error
    assert "train.py" in error
    assert "hint: " in error
    assert is_clean(output)
    assert no_restart(tmp_path)


def test_a_loop_left_early_on_all_ranks_is_reported_as_ended_early(tmp_path: Path) -> None:
    code, output = train(tmp_path, LOOP.replace("optimizer.step()", "optimizer.step()\n    break"))
    assert code == 1
    error = final_error(output)
    assert "ScriptEndedEarly" in output
    assert "epochs" in error
    assert "pl.stop()" in output
    assert "Traceback" not in output


FAILING = """\
import os, sys, time, torch
import paceline as pl
torch.set_num_threads(1)
{before}pl.init()
WHO = int(os.environ["PACELINE_MEMBER"].split(".")[0])
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 240
    def __getitem__(self, i):
        time.sleep(0.001)
        {item}
        return torch.ones(4), torch.zeros(1)
model = torch.nn.Linear(4, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.001), model)
loader = pl.DataLoader(Data(), batch_size=4, num_workers={workers})
for epoch in loader.epochs({epochs}):
    for k, (x, y) in enumerate(loader):
        {body}
        (model(x) - y).square().mean().backward()
        optimizer.step()
{after}
"""


def failing_script(**parts: str) -> str:
    """Return `FAILING` with these parts, and default parts for the others."""
    script = FAILING
    for name in ("before", "item", "workers", "epochs", "body", "after"):
        usual = {"before": "", "workers": "0", "epochs": "6"}.get(name, "pass")
        script = script.replace(f"{{{name}}}", parts.get(name, usual))
    return script


def fail(folder: Path, *words: str, **parts: str) -> tuple[int, str, str]:
    """Run a failing script; return its exit code, output and explanation (first line first)."""
    (folder / "train.py").write_text(failing_script(**parts))
    words = words or ("--set=spec.replicas=3",)
    code, output = ForkedRun(folder, "[python, train.py]", "--quiet", *words).wait()
    _, explained = forked_paceline(folder, "explain", str(next((folder / "runs").iterdir())))
    return code, output, explained.splitlines()[0] + "\n" + explained


@pytest.mark.parametrize(
    ("parts", "cause"),
    [
        ({"item": "if i == 77: raise OSError(5, 'bad sector')"}, ["OSError: ", "line 11)", " 77"]),
        # In `make test`, test_explain_scripts covers these.
        exhaustive(
            {"item": "if i == 77: raise KeyError('label')", "workers": "1"},
            ["KeyError: 'label'", "line 11)"],
        ),
        ({"body": "if epoch == 3 and WHO > 0: {}['key']"}, ["KeyError: 'key'", "line 18)"]),
        exhaustive({"item": "if i == 77: os.kill(os.getpid(), 11)"}, ["SIGSEGV", " 77"]),
        exhaustive({"body": "if epoch == 2: os._exit(3)"}, ["exit code 3"]),
    ],
    ids=["item", "worker", "two ranks later", "crash", "exit code"],
)
def test_an_exception_that_fails_one_rank_after_another_is_reported_as_the_cause(
    tmp_path: Path, parts: dict[str, str], cause: list[str]
) -> None:
    code, output, explained = fail(tmp_path, **parts)
    assert code == 1
    assert "Failed (ScriptFailed)" in output
    first = final_error(output).splitlines()[0]
    for part in [*cause, " on ranks "]:
        assert part in first
        assert part in explained.splitlines()[0]


@pytest.mark.parametrize("how", exhaustive_except(["sys.exit(0)"], ["sys.exit(0)", "os._exit(0)"]))
def test_a_script_that_ends_early_on_one_rank_is_reported(tmp_path: Path, how: str) -> None:
    code, output, explained = fail(tmp_path, body=f"if epoch == 2 and WHO == 1: {how}")
    assert code == 1
    assert "Failed (ScriptEndedEarly)" in output
    assert "rank 1.0#0: ScriptEndedEarly" in final_error(output)
    assert "ScriptEndedEarly" in explained


def test_a_completed_job_reports_an_earlier_failure_of_its_script(tmp_path: Path) -> None:
    mark = tmp_path / "failed"
    body = (
        f"if WHO == 1 and k == 3 and not os.path.exists({str(mark)!r}): "
        f"open({str(mark)!r}, 'w').close(); {{}}['key']"
    )
    code, output, explained = fail(tmp_path, body=body)
    assert code == 0
    assert "SCRIPT FAILED" in output
    assert "KeyError: 'key'" in output
    assert "the script failed on the way: KeyError: 'key'" in explained


def test_a_batch_that_makes_the_script_fail_twice_can_be_skipped(tmp_path: Path) -> None:
    """Exactly its samples are missing, and the summary, events and `explain` name the exception."""
    words = ("--set=spec.replicas=4", "--set=spec.failurePolicy.maxSkippedBatches=1")
    item = "if i == 77: raise OSError(5, 'bad sector')"
    code, output, explained = fail(tmp_path, *words, item=item, epochs="1")
    assert code == 0
    assert "job job: Complete" in output
    status = json.loads((next((tmp_path / "runs").iterdir()) / "status.json").read_text())
    log = status["log"]
    assert {name: n for name, n in log["samples_dropped"].items() if n} == {"failed": 4}
    assert log["samples_applied"] == 240 - 4
    assert (log["epochs_exact"], log["epochs_short"]) == (0, 1)
    [event] = [one["message"] for one in status["happenings"] if one["reason"] == "BatchSkipped"]
    for text in (event, output, explained):
        for part in ("OSError: [Errno 5] bad sector", "line 11)", " 77"):
            assert part in text
    assert "4 samples were given up: the script failed twice with their batch" in output


def newest_checkpoint(folder: Path) -> int:
    names = [path.name[1:] for path in (folder / "saved").glob("v*")]
    return max((int(name) for name in names if name.isdecimal()), default=0)


@pytest.mark.exhaustive
def test_a_skipped_batch_stays_skipped_after_a_resume(tmp_path: Path) -> None:
    """The checkpoint records the skipped batch: it is not dealt again and counts once (R56)."""
    bad = tmp_path / "bad"
    bad.touch()
    checkpoint = json.dumps({"path": "saved", "everyRounds": 1})
    words = (
        *("--set=spec.replicas=3", "--set=spec.failurePolicy.maxSkippedBatches=1"),
        *("--quiet", f"--set=spec.checkpoint={checkpoint}"),
    )
    exists = f"os.path.exists({str(bad)!r})"
    script = failing_script(
        item=f"if i == 77 and {exists}: raise OSError(5, 'bad sector')",
        body=f"time.sleep(0.5 if {exists} else 0)",
        epochs="2",
    )
    (tmp_path / "train.py").write_text(script)
    first = ForkedRun(tmp_path, "[python, train.py]", "--run-dir=runs/first", *words)
    try:
        first.until("BatchSkipped")
        enough = newest_checkpoint(tmp_path) + 4
        end = time.monotonic() + LIMIT_S
        while newest_checkpoint(tmp_path) < enough:  # by then the rank has dropped the batch
            assert time.monotonic() < end
            time.sleep(0.05)
        first.process.send_signal(SIGINT)
        code, output = first.wait()
    finally:
        first.process.close()
    assert code == 130, output
    before = json.loads((tmp_path / "runs/first/status.json").read_text())["log"]
    assert before["samples_dropped"]["failed"] == 4
    assert before["samples_applied"] < 236, "the epoch with the batch was not over"
    bad.unlink()  # if the batch were dealt again, the script would not fail with it
    code, output = ForkedRun(tmp_path, "[python, train.py]", "--run-dir=runs/second", *words).wait()
    assert code == 0, output
    after = json.loads((tmp_path / "runs/second/status.json").read_text())["log"]
    assert {name: n for name, n in after["samples_dropped"].items() if n} == {"failed": 4}
    assert after["samples_applied"] == 2 * 240 - 4
    assert (after["epochs_exact"], after["epochs_short"]) == (1, 1)
