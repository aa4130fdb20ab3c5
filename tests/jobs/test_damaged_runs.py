"""Damaged files of a run: every command gives an answer or an error that names the file."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from paceline.agent import targets
from paceline.cli.main import app
from paceline.cli.replay import _read_result
from paceline.client import EndUnknownError
from paceline.client.job import Job
from paceline.core.anatomy.samples import PodSamples
from paceline.core.replay.sequence import RESULT
from paceline.jobs.errors import AwayError, NoSamplesError, UnreadableRunError
from paceline.jobs.interface import ENDED, UNKNOWN
from paceline.jobs.local import LocalJobs
from paceline.local import control, index, plan_file, rundir, steps
from paceline.local.rundir import LOCK, PRINTED, STATUS
from paceline_api.errors import JobFileError, PacelineError
from paceline_api.jobfile import JOB_FILE
from paceline_api.status import Outcome, Status
from typer.testing import CliRunner

FIELDS = Status.__struct_fields__
LABELS = ("namespace", "paceline_dev_job_name", "pod", "node")
WHOLE = msgspec.json.encode(
    Status("job", "", replicas=2, version=3, outcome=Outcome(True, "Complete", "done"))
)
DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "zeros": bytes(4096),
    "cut": WHOLE[: len(WHOLE) // 2],
    "cut at its last byte": WHOLE[:-1],
    "a list": b"[]",
    "a number": b"5",
    "null": b"null",
    "wrong types": b'{"job": 1, "coordinator": [], "ranks": "all"}',
    "an outcome of another type": b'{"job": "job", "coordinator": "", "outcome": 5}',
    "no outcome": msgspec.json.encode(Status("job", "")),
    "deeply nested": b'{"job": ' + b"[" * 100_000,
    "not UTF-8": WHOLE.replace(b"done", b"\xff\xfe"),
    "half of a surrogate pair": WHOLE.replace(b"done", b"\\ud800"),
    "a number without end": b'{"job": ' + b"9" * 10_000,
    "words": b"Traceback (most recent call last):",
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "job-1"
    folder.mkdir(mode=0o700, parents=True)
    folder.parent.chmod(0o700)
    (folder / LOCK).touch()
    return folder


@pytest.fixture
def jobs(tmp_path: Path) -> LocalJobs:
    return LocalJobs({"XDG_RUNTIME_DIR": str(tmp_path / "user")}, tmp_path)


def assert_end_unknown(jobs: LocalJobs, run_dir: Path) -> None:
    """Assert that every verb reports the unknown outcome and names the file and a remedy."""
    status = jobs.status("job")
    assert (status.state, status.ended, status.name) == (ENDED, True, "job")
    assert str(run_dir / STATUS) in status.message
    assert "start the job again" in status.hint
    waited = jobs.wait("job")
    assert (waited.state, waited.message) == (status.state, status.message)
    assert [one.state for one in jobs.watch("job")] == [ENDED]
    explanation = jobs.explain("job")
    assert "has ended" in explanation.verdict
    assert str(run_dir / STATUS) in explanation.verdict
    assert status.hint in explanation.because
    assert any("logs" in command for command in explanation.commands)
    assert jobs.events("job") == []
    assert plan_file._status(run_dir) is None
    with pytest.raises(EndUnknownError, match="is not known") as no:
        Job(jobs, status).wait(timeout_s=60, progress=False)
    assert "start the job again" in no.value.hint


@pytest.mark.parametrize("data", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_last_status_reports_an_unknown_outcome(
    data: bytes, run_dir: Path, jobs: LocalJobs
) -> None:
    (run_dir / STATUS).write_bytes(data)
    if data == DAMAGE["no outcome"]:
        assert "has no outcome" in jobs.status("job").message
        (run_dir / STATUS).write_bytes(b"{}")
    assert_end_unknown(jobs, run_dir)


def test_a_last_status_that_is_not_a_file_reports_an_unknown_outcome(
    run_dir: Path, jobs: LocalJobs
) -> None:
    os.mkfifo(run_dir / STATUS)
    assert_end_unknown(jobs, run_dir)
    (run_dir / STATUS).unlink()
    (run_dir / STATUS).mkdir()
    assert_end_unknown(jobs, run_dir)


def test_a_last_status_over_the_size_limit_is_not_read(
    run_dir: Path, jobs: LocalJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (run_dir / STATUS).write_bytes(WHOLE)
    assert jobs.status("job").state == "Complete"
    monkeypatch.setattr(rundir, "STATUS_BYTES_MAX", len(WHOLE))
    assert jobs.status("job").state == "Complete"
    monkeypatch.setattr(rundir, "STATUS_BYTES_MAX", len(WHOLE) - 1)
    assert "larger than" in jobs.status("job").message
    assert_end_unknown(jobs, run_dir)


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner),
    max_leaves=10,
)


@pytest.mark.long
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    data=st.binary(max_size=200)
    | ANY_JSON.map(lambda value: json.dumps(value).encode())
    | st.dictionaries(st.sampled_from(FIELDS), ANY_JSON).map(
        lambda changed: json.dumps(json.loads(WHOLE) | changed).encode()
    )
)
def test_any_bytes_in_the_last_status_give_an_ended_job(
    data: bytes, run_dir: Path, jobs: LocalJobs
) -> None:
    (run_dir / STATUS).write_bytes(data)
    assert jobs.status("job").ended


@pytest.mark.parametrize("words", [["status"], ["status", "-o", "wide"], ["explain"], ["events"]])
@pytest.mark.parametrize("data", DAMAGE.values(), ids=DAMAGE)
def test_commands_on_a_damaged_run_succeed_and_name_file_and_remedy(
    data: bytes, words: list[str], run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_dir.parent / "user"))
    monkeypatch.setenv("HOME", str(run_dir.parent / "user"))
    (run_dir / STATUS).write_bytes(data)
    done = CliRunner().invoke(app, [words[0], str(run_dir), *words[1:]])
    assert done.exception is None, done.exception
    assert done.exit_code == 0
    if words[0] != "events":
        assert STATUS in done.output
        assert "start the job again" in done.output


def test_wait_on_a_damaged_run_exits_with_code_1(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run_dir.parent / "user"))
    (run_dir / STATUS).write_bytes(b"{")
    done = CliRunner().invoke(app, ["wait", str(run_dir)])
    assert done.exit_code == 1
    assert f"{ENDED}: how it ended is not known" in done.output


# ---- a runner of another version -----------------------------------------------------------------


@contextmanager
def answering(run_dir: Path, answer: bytes, job: str = "job") -> Iterator[index.RunEntry]:
    """Run a listener that answers each request with these bytes, like a live runner."""
    entry = index.RunEntry(job, str(run_dir), str(run_dir / "s"), os.getpid())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(entry.socket)
        listener.listen()

        def talk() -> None:
            while True:
                try:
                    line, _ = listener.accept()
                except OSError:
                    return
                with line:
                    if line.recv(1000):
                        line.sendall(answer)

        thread = threading.Thread(target=talk, daemon=True)
        thread.start()
        try:
            yield entry
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


VIEW = msgspec.json.encode(control.View("job", "/run", None, 2, 0.0, None))
ANSWERS: dict[str, bytes] = {
    **DAMAGE,
    "an answer to something else": b'{"type": "printed", "size": 1}',
    "an answer of a later version": VIEW.replace(b'"view"', b'"view2"'),
    "a view without its replicas": VIEW.replace(b'"replicas"', b'"wanted"'),
}
ASKS: list[Callable[[index.RunEntry], object]] = [
    control.look,
    lambda entry: control.scale(entry, 3),
    lambda entry: control.suspend(entry, True),
    control.end,
]


@pytest.mark.parametrize("data", ANSWERS.values(), ids=ANSWERS)
def test_an_invalid_answer_of_a_runner_names_its_process_and_a_remedy(
    data: bytes, run_dir: Path
) -> None:
    with answering(run_dir, data + b"\n") as entry:
        for ask in ASKS:
            with pytest.raises(control.ControlError, match="is not understood") as no:
                ask(entry)
            assert f"process {entry.pid}" in no.value.message
            assert "version of paceline" in no.value.hint
            assert not isinstance(no.value, control.EndedError)


@pytest.mark.parametrize("end", [0, 1, len(VIEW) // 2, len(VIEW)])
def test_a_truncated_answer_means_that_the_runner_has_ended(end: int, run_dir: Path) -> None:
    with answering(run_dir, VIEW[:end]) as entry, pytest.raises(control.EndedError):
        control.look(entry)


def test_a_runner_with_invalid_answers_does_not_hide_the_others(
    tmp_path: Path, jobs: LocalJobs
) -> None:
    env = {"XDG_RUNTIME_DIR": str(tmp_path / "user")}
    folders = [tmp_path / name for name in ("bad", "good")]
    for folder in folders:
        folder.mkdir(mode=0o700)
        (folder / LOCK).touch()
    view = VIEW.replace(b'"job":"job"', b'"job":"good"')
    with (
        answering(folders[0], b"{}\n", "bad") as bad,
        answering(folders[1], view + b"\n", "good") as good,
    ):
        index.publish(bad, env)
        index.publish(good, env)
        by_name = {one.name: one for one in jobs.all()}
        assert by_name["bad"].state == UNKNOWN
        assert not by_name["bad"].ended
        assert "is not understood" in by_name["bad"].message
        assert by_name["good"].state == "Starting"
        with pytest.raises(AwayError, match="is not understood"):
            jobs.status("bad")


# ---- other files of a run ------------------------------------------------------------------------

FILES: dict[str, bytes] = {
    **DAMAGE,
    "an empty list": b"[]",
    "two": b'[{"targets": ["a:1"]}, {"targets": ["a:1"]}]',
    "no targets": b'[{"targets": [], "labels": {"pod": "a"}}]',
    **{
        f"the address {address}": json.dumps(
            [{"targets": [address], "labels": dict.fromkeys(LABELS, "job-0-1")}]
        ).encode()
        for address in ("a b:1", "[::1", "host", "h:99999", "h:1/../x#", "user@h:1", "h:1\r\nX: y")
    },
}


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_a_damaged_target_file_is_named_and_its_pod_skipped(data: bytes, run_dir: Path) -> None:
    (run_dir / targets.FOLDER).mkdir()
    for name in ("0.json", "x.json"):
        (run_dir / targets.FOLDER / name).write_bytes(data)
    pods, silent = steps.of_run(run_dir)
    assert pods == []
    for pod, name in zip(silent, ("0.json", "x.json"), strict=True):
        assert pod.pod == name
        assert str(run_dir / targets.FOLDER / name) in pod.why
        assert pod.why.endswith("remove it")


@pytest.mark.parametrize("data", FILES.values(), ids=FILES)
def test_a_damaged_steps_file_is_named_and_its_pod_skipped(
    data: bytes, run_dir: Path, jobs: LocalJobs
) -> None:
    targets.leave_steps(run_dir, PodSamples("job", 0, "here", ()))
    (run_dir / targets.STEPS / "1.json").write_bytes(data)
    pods, (silent,) = steps.of_run(run_dir)
    assert [pod.slot for pod in pods] == [0]
    assert str(run_dir / targets.STEPS / "1.json") in silent.why
    with pytest.raises(NoSamplesError, match=r"1\.json"):
        jobs.samples("job")


@pytest.mark.parametrize("data", [b"\xff" * 64, b"a\r\nX: b", b"0" * 65, b"g" * 64], ids=repr)
def test_a_damaged_token_is_never_sent(data: bytes, run_dir: Path) -> None:
    targets.publish(run_dir, job="job", slot=0, attempt=0, address="127.0.0.1:1")
    (run_dir / targets.TOKEN_FILE).write_bytes(data)
    _, (silent,) = steps.of_run(run_dir)
    assert silent.pod == "job-0-1"
    assert str(run_dir / targets.TOKEN_FILE) in silent.why


@pytest.mark.parametrize("data", DAMAGE.values(), ids=DAMAGE)
def test_errors_for_other_damaged_files_name_the_file(
    data: bytes, run_dir: Path, jobs: LocalJobs
) -> None:
    for name in (JOB_FILE, RESULT, index.NOTE, PRINTED):
        (run_dir / name).write_bytes(data)
    with pytest.raises(JobFileError, match=JOB_FILE):
        jobs.resolved("job")
    with pytest.raises(PacelineError, match=RESULT):
        _read_result(run_dir / RESULT)
    assert index.of_run_dir(run_dir) is None
    assert list(jobs.logs("job")) == []
    plan = run_dir.parent / "job.plan-1.json"
    plan.write_bytes(data[:-1])
    with pytest.raises(plan_file.PlanFileError, match=plan.name) as no:
        plan_file.read(plan)
    assert no.value.hint == "remove it and measure again"


def test_an_unreadable_log_is_named_in_the_error(run_dir: Path, jobs: LocalJobs) -> None:
    (run_dir / PRINTED).mkdir()
    with pytest.raises(UnreadableRunError, match=PRINTED):
        list(jobs.logs("job"))


def test_log_lines_with_an_invalid_agent_name_are_skipped(run_dir: Path, jobs: LocalJobs) -> None:
    at = "2026-01-01T00:00:00.000000000Z"
    lines = [f"{at} agent-0-0 good", f"{at} agent-0-{'9' * 5000} bad", f"{at} agent-0-x bad"]
    (run_dir / PRINTED).write_text("\n".join([*lines, ""]))
    assert [line.text for line in jobs.logs("job")] == ["good"]
