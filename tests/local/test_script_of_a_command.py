"""The checks of a run before it starts a process: scripts, launchers and the network."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
from paceline.cli.choice import Where
from paceline.cli.validate import validate
from paceline.core.agent.exits import how_it_ended
from paceline.limits import LimitError
from paceline.local import room
from paceline.local.room import check_loopback
from paceline.local.script import check_script, missing_script
from paceline_api.errors import EXIT_BAD_INPUT, SpecError
from paceline_api.rules.launchers import launcher_in
from paceline_api.rules.template import TEMPLATE_RULES

from testing.processes.runs import JOB


@pytest.mark.parametrize(
    ("command", "missing"),
    [
        (["python", "train.py"], "train.py"),
        (["python3", "-u", "-X", "dev", "src/train.py", "--lr", "0.1"], "src/train.py"),
        (["/usr/bin/python3.11", "-W", "error", "train.py", "there.py"], "train.py"),
        (["python", "there.py", "missing.py"], ""),
        (["python", "-m", "missing"], ""),
        (["python", "-um", "missing.py"], ""),
        (["python", "-c", "import missing.py"], ""),
        (["python", "$(SCRIPT).py"], ""),
        (["python"], ""),
        (["sleep", "missing.py"], ""),
        (["bash", "missing.sh"], ""),
        ([], ""),
    ],
)
def test_a_missing_script_is_refused_by_name(
    tmp_path: Path, command: list[str], missing: str
) -> None:
    (tmp_path / "there.py").touch()
    assert missing_script(command, tmp_path) == missing
    if missing:
        with pytest.raises(SpecError) as refused:
            check_script(command, tmp_path)
        assert missing in refused.value.message
        assert str(tmp_path) in refused.value.message
        assert "workingDir" in refused.value.hint
        assert refused.value.exit_code == EXIT_BAD_INPUT


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["torchrun", "--nproc-per-node=2", "train.py"], "torchrun"),
        (["/opt/venv/bin/torchrun", "train.py"], "torchrun"),
        (["python", "-m", "torch.distributed.run", "train.py"], "-m torch.distributed.run"),
        (["python", "-u", "-m", "torch.distributed.launch", "t.py"], "-m torch.distributed.launch"),
        (["accelerate", "launch", "train.py"], "accelerate launch"),
        (["sh", "-c", "cd /app; torchrun train.py"], "torchrun"),
        (["bash", "-ec", "exec /usr/bin/mpirun -n 2 python train.py"], "mpirun"),
        (["deepspeed", "train.py"], "deepspeed"),
        (["python", "train.py", "torchrun"], ""),
        (["python", "-m", "train"], ""),
        (["accelerate", "env"], ""),
        (["sh", "-c", "python train.py"], ""),
        (["sh", "-c"], ""),
        (["nohup", "torchrun", "train.py"], "torchrun"),
        (["command", "-v", "torchrun"], ""),
        (["env", "-u", "HOME", "A=b", "timeout", "-k", "5", "1h", "srun", "python"], "srun"),
        (["bash", "-o", "pipefail", "-ec", "torchrun train.py"], "torchrun"),
        (["sh", "-c", 'exec "$@"', "sh", "torchrun", "train.py"], "torchrun"),
        (["python", "train.py", "-m", "torch.distributed.run"], ""),
        (["python", "-W", "error", "-um", "torch.distributed.run"], "-m torch.distributed.run"),
        (["python", "-Wonce", "-m", "torch.distributed.run"], "-m torch.distributed.run"),
        (["bash", "-euxo", "pipefail", "-c", "torchrun train.py"], "torchrun"),
        (["sh", "start.sh", "-c", "torchrun train.py"], ""),
        (["env", "LAUNCHER=srun", "python", "train.py"], ""),
        (["uv", "run", "torchrun", "train.py"], "torchrun"),
        (["uv", "--quiet", "run", "--with", "torch", "--", "torchrun", "train.py"], "torchrun"),
        (["uv", "run", "train.py", "torchrun"], ""),
        (["uv", "pip", "install", "torchrun"], ""),
        (["conda", "run", "--no-capture-output", "-n", "ml", "mpirun", "train.py"], "mpirun"),
        (["poetry", "run", "accelerate", "launch", "train.py"], "accelerate launch"),
        (["tini", "-g", "--", "torchrun", "train.py"], "torchrun"),
        (["/usr/bin/tini", "--", "sh", "-c", "exec torchrun train.py"], "torchrun"),
        (["gosu", "app:app", "dumb-init", "torchrun", "train.py"], "torchrun"),
        (["env", "-S", "A=b torchrun train.py"], "torchrun"),
        (["env", "-i", "-Storchrun train.py"], "torchrun"),
        (["env", "--split-string=python train.py", "torchrun"], ""),
        (["env", "-S", "torchrun 'train.py"], ""),
        (["env", "-S"], ""),
        (["env", "-u", "HOME", "-S", "A=b torchrun train.py"], "torchrun"),
        (["uv", "run", "-m", "torch.distributed.run", "t.py"], "-m torch.distributed.run"),
        (["uv", "run", "-m", "train", "torchrun"], ""),
        (["timeout"], ""),
        (["fabric", "run", "train.py"], "fabric run"),
        (["python", "-m", "accelerate.commands.launch", "t.py"], "-m accelerate.commands.launch"),
        (["colossalai", "run", "train.py"], "colossalai run"),
        (["mpiexec.hydra", "-n", "2", "python", "train.py"], "mpiexec.hydra"),
        ([], ""),
    ],
)
def test_a_launcher_in_a_command_is_found(command: list[str], launcher: str) -> None:
    assert launcher_in(command) == launcher


@pytest.mark.long
def test_a_long_command_takes_linear_time() -> None:
    """Nest 100,000 wrappers: a copy of the words for each would move 80 GB."""
    assert launcher_in(["nohup"] * 100_000 + ["torchrun"]) == "torchrun"


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("VAR=x OTHER='y z' torchrun train.py", "torchrun"),
        ("cd /app && exec env A=b nohup torchrun train.py", "torchrun"),
        ("cat hosts | mpirun -n 2 python train.py", "mpirun"),
        ("python prepare.py\ntorchrun train.py", "torchrun"),
        ("time -p srun python train.py > log 2>&1", "srun"),
        (">log 2>&1 /usr/bin/torchrun train.py", "torchrun"),
        ("if test -f x; then torchrun train.py; else python train.py; fi", "torchrun"),
        ("(cd /app; torchrun train.py)", "torchrun"),
        ("sh -c 'sh -c \"torchrun train.py\"'", "torchrun"),
        ("python -m deepspeed train.py", "-m deepspeed"),
        ("accelerate \\\n  launch train.py", "accelerate launch"),
        ('"torchrun" train.py', "torchrun"),
        ("# it's fine\ntorchrun train.py", "torchrun"),
        ("echo $(date); torchrun train.py", "torchrun"),
        ("export HOST=`hostname`;torchrun train.py", "torchrun"),
        ("python train.py --launcher srun", ""),
        ("echo srun; python train.py", ""),
        ("LAUNCHER=srun python train.py", ""),
        ("python train.py > torchrun", ""),
        ("echo ';' srun '&&' mpirun \\; torchrun; python train.py", ""),
        ("# torchrun train.py\npython train.py # ; srun", ""),
        ("which torchrun || command -v mpirun; python train.py", ""),
        ("V=$(torchrun --version; echo x) python train.py", ""),
        ("V=`which torchrun; echo x` python train.py", ""),
        ("cat <<END\ntorchrun train.py\nEND", ""),
        ("for x in torchrun srun; do echo $x; done", ""),
        ("python train.py --note 'cd x; torchrun'", ""),
        ("torchrun 'train.py", ""),
        ("", ""),
    ],
)
def test_a_launcher_in_a_shell_line_counts_only_in_command_position(
    line: str, launcher: str
) -> None:
    assert launcher_in(["bash", "-c", line]) == launcher


@pytest.mark.long
@pytest.mark.parametrize("line", ['"$@"', '"$@"; ' * 1_000, '"$@" "$@"; exec "$@"'])
def test_nested_shells_are_parsed_in_bounded_time(line: str) -> None:
    """Nest shells that run their arguments many times; the time used to be exponential."""
    assert launcher_in(["sh", "-c", line, "sh"] * 4_000 + ["torchrun"]) == ""
    assert launcher_in(["sh", "-c", line, "sh"] * 4 + ["torchrun"]) == "torchrun"


@pytest.mark.parametrize("word", ["torchrun", "/opt/venv/bin/torchrun", "mytorchrun", "python"])
def test_the_cluster_and_the_command_line_agree_on_the_first_word(word: str) -> None:
    """Compare only the first word, because the API server inspects no more of a command."""
    [rule] = [rule for rule in TEMPLATE_RULES if "starts ranks itself" in rule.problem]
    assert rule.cel is not None
    equal = re.findall(r"c\.command\[0\] == '(.*?)'", rule.cel)
    ends = re.findall(r"endsWith\('(.*?)'\)", rule.cel)
    assert (word in equal or word.endswith(tuple(ends))) == bool(launcher_in([word]))


def test_a_loopback_that_is_down_is_an_error_with_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable the loopback.

    The run used to wait for its coordinator for 30 s and then reported that it did not answer.
    """
    check_loopback()

    def unreachable(*_: Any) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr(socket, "create_connection", unreachable)
    with pytest.raises(LimitError) as refused:
        check_loopback()
    assert "127.0.0.1: network is unreachable" in refused.value.message
    assert "ip link set lo up" in refused.value.hint
    assert room.CONNECT_S < 30


def test_a_death_by_sigbus_hints_at_shared_memory() -> None:
    """Explain SIGBUS; seven ranks once died of it in turn, and nothing said why."""
    reason = how_it_ended(-7)
    assert "signal 7 (SIGBUS)" in reason
    assert "/dev/shm" in reason
    assert "--shm-size" in reason
    assert "/dev/shm" not in how_it_ended(-11)


def test_validate_warns_about_a_missing_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Expect a warning only, because in a cluster the script is in the image."""
    file = tmp_path / "job.yaml"
    file.write_text(JOB.format(name="job", command="[python, train.py]", mark=""))
    assert validate(file, [], None, where=Where()) == 0
    captured = capsys.readouterr()
    assert "job job is valid" in captured.out
    assert f"train.py is not in {tmp_path}" in captured.err
    assert "in the image" in captured.err
    (tmp_path / "train.py").touch()
    assert validate(file, [], None, where=Where()) == 0
    assert capsys.readouterr().err == ""
