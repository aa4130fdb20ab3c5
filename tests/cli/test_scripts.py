"""Scripts for torchrun as arguments of `paceline`: run, launch, init, submit, and every mistake."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import yaml
from paceline.cli import program, run
from paceline.cli.main import main
from paceline.function.packed import BYTES_MAX
from paceline.jobs.core.script_job import default_image
from paceline_api.errors import EXIT_BAD_INPUT
from paceline_api.rules.launchers import LAUNCH_MODULE, launched_script

from testing.jobs.scripted_server import JOBS, ScriptedServer
from testing.jobs.terminal import LIMIT_S, Terminal
from testing.processes.runs import forked_paceline

SCRIPT = """\
import os, sys
import torch
import torch.distributed as dist
from torch import nn

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.randn(4, 2)).sum().backward()
optimizer.step()
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], "got", sys.argv[1:])
dist.destroy_process_group()
"""
Call = Callable[..., tuple[int, str]]
CONFIG_MAPS = "/api/v1/namespaces/team/configmaps"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


@pytest.fixture
def paceline(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    def call(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["paceline", *words])
        with pytest.raises(SystemExit) as end:
            main()
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return int(end.value.code or 0), out + err

    return call


@pytest.fixture
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    made = ScriptedServer()
    monkeypatch.setenv("KUBECONFIG", str(made.kubeconfig(folder)))
    created = {"metadata": {"name": "train", "namespace": "team", "uid": "u"}, "spec": {}}
    made.answers["POST", JOBS] = 201, created
    made.answers["POST", CONFIG_MAPS] = 201, {}
    yield made
    made.close()


@pytest.mark.processes
def test_a_script_gets_all_words_after_it_and_the_ranks_of_torchrun(folder: Path) -> None:
    words = ["--replicas", "7", "--set", "a=b", "--", "-o", "$(HOME)", "a b"]
    options = ["--nproc-per-node", "2", "--standalone", "--nnodes=1", "--name", "mine"]
    code, output = forked_paceline(folder, "run", *options, "--quiet", "train.py", *words)
    assert code == 0, output
    assert "job mine: Complete" in output
    for rank in (0, 1):
        assert f"rank {rank} of 2 got {words}" in output
    assert "hint:" not in output
    job = json.loads((folder / "runs/mine-1/job.json").read_text())
    assert job["command"][:3] == [sys.executable, "-m", LAUNCH_MODULE]


@pytest.mark.processes
def test_a_module_runs_detached_and_the_other_verbs_know_its_job(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = {"XDG_RUNTIME_DIR": str(folder), "XDG_STATE_HOME": "", "HOME": str(folder)}
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    say = Terminal(folder, {**os.environ, **own})
    try:
        output = say.call("run", "--detach", "--replicas", "1", "-m", "train", "--lr", "3")
        assert "job train runs as process" in output
        say.call("wait", "runs/train-1", "--timeout", f"{LIMIT_S:.0f}s")
        assert "rank 0 of 1 got ['--lr', '3']" in say.call("logs", "runs/train-1")
        assert "It is complete" in say.call("explain", "runs/train-1")
    finally:
        say.close()


@pytest.mark.processes
def test_a_job_file_made_by_init_runs_and_options_may_follow_it(folder: Path) -> None:
    code, output = forked_paceline(folder, "init", "--replicas", "3", "train.py", "--lr", "3")
    assert code == 0, output
    code, output = forked_paceline(folder, "run", "job.yaml", "--replicas", "2", "--quiet")
    assert code == 0, output
    assert "rank 1 of 2 got ['--lr', '3']" in output


MISTAKES = {
    "a missing script": (["run", "none.py"], "there is no script none.py in", "relative to"),
    "a script without suffix": (["run", "train"], "there is no script train", "train.py"),
    "a job file without suffix": (["run", "job"], "a job file without the suffix", "job.yaml"),
    "a folder": (["run", "src"], "src in {here} is a folder", "src/a.py"),
    "a script for a shell": (["run", "a.sh"], "for a shell", "command"),
    "a notebook": (["run", "a.ipynb"], "a notebook", "nbconvert"),
    "options of the script before it": (
        ["run", "--lr", "3", "train.py"],
        "--lr is not an option of `paceline run`",
        "come after it",
    ),
    "options of torchrun": (
        ["run", "--master_port=29501", "train.py"],
        "--master_port is an option of torchrun",
        "leave it out",
    ),
    "several machines": (["run", "--nnodes", "2", "train.py"], "--nnodes 2", "paceline submit"),
    "another mode": (
        ["run", "--mode", "Shadow", "train.py"],
        'spec.collective.mode: "Shadow"',
        "docs/porting.md",
    ),
    "a pipeline": (
        ["run", "--set", "spec.collective.pipeline=1", "train.py"],
        "spec.collective.pipeline: 1",
        "docs/porting.md",
    ),
    "a shared model": (
        [*("run", "--procs", "2", "--set", "spec.parallelism.model=2"), "train.py"],
        "spec.parallelism.model: 2",
        "docs/porting.md",
    ),
    "a size without a number": (
        ["run", "--nproc-per-node", "four", "train.py"],
        "--nproc-per-node four is no number, and none of gpu",
        "give the number of ranks",
    ),
    "no rank": (["run", "--nproc-per-node=0", "train.py"], "0 is 0 ranks", "1 or a larger number"),
    "less than none": (["run", "train.py", "--nproc_per_node", "-1"], "is -1 ranks", "give 1 or"),
    "two sizes": (
        ["run", "--nproc-per-node", "2", "--replicas", "2", "train.py"],
        "--replicas 2 and --nproc-per-node 2 are both the number of replicas",
        "leave out one",
    ),
    "a size of several ranks each": (
        ["run", "--nproc-per-node", "cpu", "--procs", "2", "train.py"],
        "--nproc-per-node cpu counts ranks, and --procs 2 makes several of each",
        "--replicas N",
    ),
    "a size of one rank": (
        ["launch", "--nproc-per-node", "gpu", "train.py"],
        "--nproc-per-node is not an option of `paceline launch`: it runs one rank",
        "`paceline run --nproc-per-node N train.py` starts N ranks",
    ),
    "a size of other machines": (
        ["submit", "--image", "i", "--nproc-per-node=gpu", "train.py"],
        "the ranks of this job run in pods",
        "--gpus N gives each N GPUs",
    ),
    "a size in a job file": (
        ["init", "--nproc_per_node", "auto", "train.py"],
        "the ranks of this job run in pods",
        "--gpus N gives each N GPUs",
    ),
    "a record": (["run", "--record", "train.py"], "--record", "leave --record out"),
    "a missing module": (["run", "-m", "none.such"], "there is no module none", "python -m"),
    "a path as module": (["run", "-m", "train.py"], "is a path", "leave out -m"),
    "words after a job file": (["run", "job.yaml", "x"], "'x' after the job file", "command"),
    "a rank of a job file": (["launch", "job.yaml"], "is a job file", "paceline run job.yaml"),
    "a rank without script": (["launch", "none.py"], "there is no script", "relative to"),
    "a job file of a job file": (["init", "job.yaml"], "is a job file already", "script"),
    "a script elsewhere": (["init", "/bin/true"], "is not below", "folder of the script"),
    "a cluster without image": (["submit", "train.py"], "no image is named", "--with-script"),
    "an image for a job file": (["submit", "--image", "x", "job.yaml"], "--image", "--set"),
    "a module in a ConfigMap": (["submit", "--with-script", "-m", "train"], "a module", "--image"),
    "a script of two files": (["submit", "--with-script", "two.py"], "imports train", "image"),
    "a large script": (["submit", "--with-script", "large.py"], f"{BYTES_MAX:,}", "image"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_refused_by_name(mistake: str, folder: Path, paceline: Call) -> None:
    (folder / "src").mkdir()
    (folder / "src/a.py").touch()
    (folder / "job").write_text("apiVersion: paceline.dev/v1alpha1\n")
    (folder / "job.yaml").touch()
    (folder / "two.py").write_text("import train\n")
    (folder / "large.py").write_text("#" * (BYTES_MAX + 1))
    for name in ("a.sh", "a.ipynb"):
        (folder / name).touch()
    words, problem, hint = MISTAKES[mistake]
    code, output = paceline(*words)
    assert code == 2, output
    error, _, rest = output.partition("\nhint: ")
    assert error.startswith("error: ")
    assert problem.format(here=folder) in error
    assert hint in rest
    assert not (folder / "runs").exists()


def test_a_command_without_a_mode_is_refused(folder: Path, paceline: Call) -> None:
    paceline("init", "train.py")
    job = yaml.safe_load((folder / "job.yaml").read_text())
    del job["spec"]["collective"]
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    code, output = paceline("validate", "job.yaml")
    assert code == 2
    assert "spec.collective.mode: is missing" in output


def test_a_size_after_the_script_is_warned_of(
    folder: Path, paceline: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.local.detached.start", _not_started)
    _, output = paceline("run", "--detach", "train.py", "3", "--replicas=4")
    assert "warning: --replicas stands after train.py, so the script gets it" in output
    _, output = paceline("run", "--detach", "train.py")
    assert "hint: one rank" in output
    _, output = paceline("run", "--detach", "--replicas", "1", "train.py")
    assert "hint: " not in output


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--mode", "Quorum"], "--mode Quorum"),
        (["--lr", "3", "--mode=Quorum"], "--mode Quorum"),
        (["--quorum", "75%"], "--quorum 75%"),
        (["--inject", "kill:rank=1,at=round:9"], "--inject kill:rank=1,at=round:9"),
        (["--set=spec.stepDeadlineSeconds=9"], "--set spec.stepDeadlineSeconds=9"),
        (["--mode", "eval"], ""),
        (["Quorum"], ""),
        (["--mode"], ""),
        (["--inject", "noise"], ""),
        (["--set", "train"], ""),
    ],
)
def test_an_option_with_a_value_of_paceline_after_the_script_is_warned_of(
    folder: Path, paceline: Call, monkeypatch: pytest.MonkeyPatch, words: list[str], named: str
) -> None:
    """A script may have an option of that name; its values are others."""
    monkeypatch.setattr("paceline.local.detached.start", _not_started)
    _, output = paceline("run", "--detach", "train.py", "--replicas", "2", "x", *words)
    assert ("warning" in output) == bool(named)
    if named:
        assert f"warning: {named} stands after train.py, so the script gets it" in output
        assert f"come before the script: paceline run {named} train.py" in output


def test_a_mode_before_the_script_is_the_mode_of_the_job(
    folder: Path, paceline: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.local.detached.start", _not_started)
    _, output = paceline("run", "--detach", "--mode", "Full", "train.py", "--mode", "Quorum")
    assert "warning" not in output


@pytest.mark.parametrize(
    ("behind", "moved"),
    [
        (["--replicas", "4", "--lr", "3", "--replicas", "9"], 2),
        (["--nproc-per-node=4", "--replicas", "9"], 1),
        (["--mode", "Quorum", "--quorum=3", "--replicas", "4", "--epochs", "2"], 5),
        (
            [
                "--inject",
                "kill:rank=1",
                "--inject=join:at=round:9",
                "--set",
                "spec.x=1",
                "--set",
                "x",
            ],
            5,
        ),
        (["--image", "i:1", "--gpus", "8", "--image", "cat.png"], 4),
        (["--mode", "eval", "--replicas", "4"], 0),
        (["x", "--replicas", "4"], 0),
        (["--replicas"], 1),
        ([], 0),
    ],
)
def test_options_directly_behind_the_script_are_those_of_the_job(
    behind: list[str], moved: int
) -> None:
    known = {*program._OWN, *program._VALUES}
    words = program._with_own_options_first(["--quiet", "train.py", *behind], "train.py", known)
    assert words == ["--quiet", *behind[:moved], "train.py", *behind[moved:]]


def test_options_given_before_the_script_are_the_scripts_behind_it() -> None:
    words = ["--replicas", "2", "--image=i:1", "train.py"]
    for behind in (["--nproc-per-node", "4"], ["--image", "cat.png"]):
        known = program._OWN
        assert program._with_own_options_first(words + behind, "train.py", known) == words + behind


@pytest.mark.exhaustive
@pytest.mark.parametrize("size", ["cpu", "auto"])
def test_a_size_in_the_words_of_torchrun_is_counted_on_this_machine(size: str) -> None:
    ranks = torch._utils.cpu_count()
    if size == "auto" and torch.accelerator.is_available():
        ranks = torch.accelerator.device_count()
    assert run.replicas_of(size, None, None) == ranks


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_size_by_gpus_is_refused_where_there_is_none(paceline: Call) -> None:
    code, output = paceline("run", "--nproc-per-node", "gpu", "train.py")
    assert code == EXIT_BAD_INPUT
    assert "--nproc-per-node gpu: torch does not find them on this machine: Cuda" in output
    assert "hint: give the number of ranks; `auto` takes the CPUs if there is no GPU" in output


def test_a_size_behind_a_script_belongs_to_it_if_the_command_has_none(
    folder: Path, paceline: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, argv: became.append(argv))
    assert paceline("launch", "train.py", "--replicas", "4") == (0, "")
    assert became[0][3:] == ["train.py", "--replicas", "4"]


def _not_started(*_: object) -> None:
    raise SystemExit(0)


def test_launch_becomes_the_launcher_with_all_words(
    folder: Path, paceline: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda _, argv: became.append(argv))
    assert paceline("launch", "train.py", "--lr", "3", "-h") == (0, "")
    assert paceline("launch", "-m", "train", "--help") == (0, "")
    begin = [sys.executable, "-m", LAUNCH_MODULE]
    assert became[0] == [*begin, "train.py", "--lr", "3", "-h"]
    assert became[1] == [*begin, "-m", "train", "--help"]


def test_init_writes_a_job_and_a_dockerfile_and_replaces_nothing(
    folder: Path, paceline: Call
) -> None:
    (folder / "requirements.txt").write_text("numpy\n")
    words = ["init", "--replicas", "4", "--gpus", "2", "--dockerfile", "train.py", "--lr", "3"]
    code, output = paceline(*words)
    assert code == 0, output
    spec = yaml.safe_load((folder / "job.yaml").read_text())["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert (spec["replicas"], spec["collective"]) == (4, {"mode": "Full"})
    assert container["command"] == ["paceline", "launch", "train.py", "--lr", "3"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert f"docker build -t {container['image']} ." in output
    dockerfile = (folder / "Dockerfile").read_text()
    assert f"ARG WORKER={default_image()}" in dockerfile
    assert "requirements.txt" in dockerfile
    assert paceline("validate", "job.yaml") == (0, "job.yaml: job train is valid\n")

    (folder / "job.yaml").unlink()
    code, output = paceline(*words)
    assert (code, "Dockerfile exists already" in output) == (2, True)
    assert not (folder / "job.yaml").exists()
    assert paceline("init", "--force", *words[1:])[0] == 0
    code, output = paceline("init", "--file", "other.yaml", "train.py")
    assert code == 0
    assert "name yours with --image" in output


def test_submit_makes_the_job_of_a_script(
    folder: Path, paceline: Call, server: ScriptedServer
) -> None:
    words = ["--image", "x", "--gpus", "8", "--replicas", "4", "train.py", "--lr", "3"]
    code, output = paceline("submit", *words)
    assert code == 0, output
    (body,) = server.bodies["POST", JOBS]
    (container,) = body["spec"]["template"]["spec"]["containers"]
    assert body["metadata"]["name"] == "train"
    assert body["spec"]["replicas"] == 4
    assert container["image"] == "x"
    assert container["command"] == ["paceline", "launch", "train.py", "--lr", "3"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}


def test_submit_sends_a_script_in_a_config_map(
    folder: Path, paceline: Call, server: ScriptedServer
) -> None:
    code, output = paceline("submit", "--with-script", "train.py", "--lr", "3")
    assert code == 0, output
    (config_map,) = server.bodies["POST", CONFIG_MAPS]
    (job,) = server.bodies["POST", JOBS]
    assert config_map["data"] == {"train.py": SCRIPT}
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]
    assert container["image"] == default_image()
    place = f"{mount['mountPath']}/train.py"
    assert container["command"] == ["paceline", "launch", place, "--lr", "3"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["paceline", "launch", "train.py", "-x"], ("train.py", "-x")),
        (["/opt/bin/paceline", "launch", "-m", "a.b"], ("-m", "a.b")),
        (["python3", "-m", "paceline", "launch", "train.py"], ("train.py",)),
        (["python", "-m", "paceline", "train.py"], ("train.py",)),
        (["python", "-u", "-m", LAUNCH_MODULE, "train.py", "1"], ("train.py", "1")),
        (["python", "-m", "paceline", "run", "job.yaml"], ()),
        (["paceline", "run", "train.py"], ()),
        (["paceline"], ()),
        (["python", "train.py"], ()),
        (["python"], ()),
        ([], ()),
    ],
)
def test_a_command_that_launches_a_script_is_recognized(
    command: list[str], words: tuple[str, ...]
) -> None:
    assert launched_script(command) == words
