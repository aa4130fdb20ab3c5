"""The SDK over an in-memory back end: its requests, its waits and its table of rounds."""

from __future__ import annotations

import asyncio
import io
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from paceline.client import AsyncJob, AsyncJobClient, JobClient, JobFailedError
from paceline.client.figures import ROWS_MAX, Figures
from paceline.client.job import Job
from paceline.client.progress import ProgressBar, words
from paceline.function.errors import FunctionError
from paceline.jobs.errors import NoSuchJobError, WaitTimeoutError
from paceline.jobs.interface import JobStatus, Until
from paceline_api.errors import InvalidJobError
from paceline_api.types.job import Metadata, TrainingJob, TrainingJobSpec
from paceline_api.types.template import PodTemplate
from rich.console import Console

from tests.client.fake_jobs import FakeJobs, at

TEMPLATE = {"spec": {"containers": [{"name": "trainer", "command": ["python", "x.py"]}]}}


def train(epochs: int = 1) -> int:
    return epochs


def test_train_sends_the_function_with_its_job() -> None:
    jobs = FakeJobs()
    job = JobClient(jobs).train(train, arguments={"epochs": 3}, replicas=4, packages=["x"])
    assert jobs.submitted is not None
    assert jobs.submitted.spec.replicas == 4
    assert jobs.submitted.metadata.name.startswith("train-")
    assert "train(**{'epochs': 3})" in jobs.function["function.py"]
    assert job.name == "job"


def test_a_function_that_cannot_be_sent_makes_no_job() -> None:
    jobs = FakeJobs()
    with pytest.raises(FunctionError):
        JobClient(jobs).train(lambda: None)
    assert jobs.submitted is None


def test_submit_validates_the_typed_model_before_sending_it() -> None:
    jobs = FakeJobs()
    spec = TrainingJobSpec(replicas=2, template=PodTemplate.model_validate(TEMPLATE))
    JobClient(jobs).submit(TrainingJob(metadata=Metadata(name="job"), spec=spec))
    assert jobs.submitted is not None
    wrong = spec.model_copy(update={"min_replicas": 3})
    with pytest.raises(InvalidJobError, match="minReplicas"):
        JobClient(jobs).submit(TrainingJob(metadata=Metadata(name="job"), spec=wrong))


@pytest.mark.long
def test_wait_returns_the_final_status_and_records_the_rounds() -> None:
    statuses = [at(0, "Starting"), at(3, loss=0.5), at(3, loss=0.4), at(10, "Complete", loss=0.1)]
    job = JobClient(FakeJobs(statuses)).get_job("job")
    assert job.wait(timeout_s=30, progress=False).state == "Complete"
    table = job.rounds()
    assert list(table["round"])[-3:] == [0, 3, 10]
    assert list(table["loss"])[-2:] == [0.4, 0.1]
    assert list(table["samples_applied"])[-1] == 1280


def test_a_script_metric_is_the_mean_since_the_previous_row() -> None:
    """A column holds the mean since the previous row, not over the whole run.

    An earlier version used the mean over the whole run, which made plots wrong. No value is given
    for a row after the coordinator restarted and lost sums.
    """

    def status_at(round_: int, last: float, **sums: tuple[float, float]) -> JobStatus:
        status = at(round_, loss=last)
        assert status.detail is not None
        log = msgspec.structs.replace(status.detail.log, metric_sums=sums)
        detail = msgspec.structs.replace(status.detail, log=log)
        return msgspec.structs.replace(status, detail=detail)

    figures = Figures()
    figures.add(status_at(10, 0.75, loss=(900.0, 1000.0)), 1.0)
    figures.add(status_at(20, 0.5, loss=(905.0, 1010.0)), 2.0)
    figures.add(status_at(20, 0.4, loss=(904.0, 1020.0)), 3.0)
    figures.add(at(25), 4.0)
    figures.add(status_at(30, 0.3, loss=(910.0, 1040.0)), 5.0)
    figures.add(status_at(40, 0.2, loss=(10.0, 20.0)), 6.0)
    rows = figures.rows()
    assert [row["round"] for row in rows] == [10, 20, 25, 30, 40]
    assert [row.get("loss") for row in rows] == [0.75, 0.2, None, 0.3, None]


def test_wait_for_training_returns_at_the_first_round() -> None:
    job = JobClient(FakeJobs([at(0, "Starting"), at(1)])).get_job("job")
    assert job.wait(Until.TRAINING, timeout_s=30).round == 1
    assert job.wait("training", timeout_s=30).round == 1


def test_a_wait_that_times_out_names_the_state_of_the_job() -> None:
    job = JobClient(FakeJobs([at(1)])).get_job("job")
    with pytest.raises(WaitTimeoutError, match=r"Training after 0\.2 s, and not yet ended"):
        job.wait(timeout_s=0.2)


def test_waiting_for_a_job_that_fails_raises_its_status_and_a_hint() -> None:
    failed = at(3, "Failed")
    with pytest.raises(JobFailedError, match="job job has failed") as caught:
        JobClient(FakeJobs([failed])).get_job("job").wait(timeout_s=30)
    assert caught.value.status == failed
    assert caught.value.__notes__ == ["hint: job.logs() has its last words"]


def test_waiting_for_a_job_that_is_deleted_raises_no_such_job_error() -> None:
    jobs = FakeJobs([at(1)])
    jobs.go.set()
    with pytest.raises(NoSuchJobError, match="deleted while"):
        JobClient(jobs).get_job("job").wait(timeout_s=30)


def test_verbs_of_a_job_call_the_back_end_with_its_name() -> None:
    jobs = FakeJobs()
    job = JobClient(jobs).get_job("job")
    assert job.scale(6) == 4
    job.suspend()
    job.resume()
    job.delete(wait_s=5)
    assert jobs.calls == [
        ("scale", "job", 6), ("suspend", "job"), ("resume", "job"), ("delete", "job", 5)
    ]  # fmt: skip
    assert [event.reason for event in job.events()] == ["Created"]
    assert [line.text for line in job.logs(rank=0)] == ["line 0", "line 1", "line 2"]


def test_methods_named_as_in_kubeflow_trainer_work() -> None:
    client = JobClient(FakeJobs([at(10, "Complete")]))
    assert [job.name for job in client.list_jobs()] == ["job"]
    assert list(client.get_job_logs("job")) == [f"rank 0 | line {n}" for n in range(3)]
    assert client.wait_for_job_status("job").state == "Complete"
    assert client.get_job_events("job")
    client.delete_job("job")
    with pytest.raises(NoSuchJobError):
        client.get_job("other")


def test_a_local_job_is_addressed_by_its_run_folder(tmp_path: Path) -> None:
    jobs = FakeJobs()
    Job(jobs, msgspec.structs.replace(at(1), place=str(tmp_path))).scale(1)
    assert jobs.calls == [("scale", str(tmp_path), 1)]


def test_progress_is_shown_as_a_bar_on_a_terminal_and_as_one_line_elsewhere() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    with ProgressBar(console) as bar:
        bar.show(at(3, loss=0.51234))
        bar.show(at(10, "Complete", loss=0.1))
    assert "job  Complete" in out.getvalue()
    assert "100%" in out.getvalue()
    assert words(at(3, loss=0.51234)) == "4/4 replicas  round 3  2.0/s  loss 0.5123  ETA 0:04"


@pytest.mark.long
def test_the_table_of_rounds_is_bounded_and_keeps_the_latest_row() -> None:
    figures = Figures()
    for number in range(ROWS_MAX + 10):
        figures.add(at(number), float(number))
    rows = figures.rows()
    assert len(rows) < ROWS_MAX
    assert rows[-1]["round"] == ROWS_MAX + 9
    assert [row["round"] for row in rows] == sorted(row["round"] for row in rows)


# ---- asyncio ------------------------------------------------------------------------------------


def test_the_asyncio_client_trains_waits_and_reads_logs() -> None:
    async def use() -> None:
        jobs = FakeJobs([at(0, "Starting"), at(10, "Complete")])
        client = AsyncJobClient(JobClient(jobs))
        job = await client.train(train)
        assert (await job.wait(timeout_s=30)).state == "Complete"
        assert [line.text async for line in job.logs()] == ["line 0", "line 1", "line 2"]
        assert (await job.scale(2)) == 4
        with pytest.raises(NoSuchJobError):
            await client.get_job("other")

    asyncio.run(use())


def test_concurrent_waits_do_not_block_the_event_loop_and_can_be_cancelled() -> None:
    async def use() -> None:
        job = await AsyncJobClient(JobClient(FakeJobs([at(1)]))).get_job("job")
        waits = [asyncio.create_task(job.wait()) for _ in range(2)]
        assert (await job.status()).round == 1, "nobody is held up"
        for wait in waits:
            wait.cancel()
        results = await asyncio.gather(*waits, return_exceptions=True)
        assert all(isinstance(one, asyncio.CancelledError) for one in results)

    asyncio.run(asyncio.wait_for(use(), 30))


def test_an_abandoned_log_iterator_is_closed_by_its_own_thread() -> None:
    async def use() -> FakeJobs:
        jobs = FakeJobs()
        job = await AsyncJobClient(JobClient(jobs)).get_job("job")
        lines = job.logs()
        assert (await anext(lines)).text == "line 0"
        await lines.aclose()
        return jobs

    jobs = asyncio.run(use())
    for thread in threading.enumerate():
        if thread.name == "paceline-items":
            thread.join(30)
    assert jobs.closed_by == "paceline-items"


def test_the_asyncio_and_blocking_clients_have_the_same_methods() -> None:
    def verbs(kind: Any) -> set[str]:
        return {name for name in vars(kind) if not name.startswith("_")}

    assert verbs(AsyncJob) - {"name"} == verbs(Job)
    made = {"from_kubeconfig", "local"}
    assert verbs(AsyncJobClient) == verbs(JobClient) - made
