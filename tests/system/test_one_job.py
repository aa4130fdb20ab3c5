"""One real job of two ranks, one of them slow now and then: its metrics, and how it ends.

The agents' pages are read over HTTP when the last round is committed. Then the coordinator is
killed and both ranks end at once, so that only the agents still know that the job is complete.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from testing.processes.runs import ForkedRun

pytestmark = pytest.mark.processes

SAMPLES, EPOCHS, BATCH = 256, 2, 4
SLOW_S = 0.05
SCRIPT = f"""\
import os, signal, time, torch, urllib.request
import paceline as pl
from pathlib import Path

def my_agents_port():
    agent = os.getppid()
    mine = {{os.readlink(p) for p in Path(f"/proc/{{agent}}/fd").iterdir() if p.is_symlink()}}
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, _, state, *_, = line.split()
        if state == "0A" and f"socket:[{{line.split()[9]}}]" in mine:
            return int(local.split(":")[1], 16)

def kill_the_coordinator():
    log = os.path.join(os.environ["PACELINE_RUN_DIR"], "coordinator.log")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if os.path.samefile(entry / "fd/1", log):
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            pass

torch.set_num_threads(1)
began = time.monotonic()
pl.init()
model = torch.nn.Linear(4, 1)
optimizer = pl.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model)
data = torch.utils.data.TensorDataset(torch.randn({SAMPLES}, 4), torch.randn({SAMPLES}, 1))
loader = pl.DataLoader(data, batch_size={BATCH})
steps = slow = 0
for epoch in loader.epochs({EPOCHS}):
    for x, y in loader:
        if pl.rank() == 1 and steps % 5 == 0:
            slow += 1
            time.sleep({SLOW_S})
        time.sleep(0.005)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        steps += 1
took_s = time.monotonic() - began
page = urllib.request.urlopen(f"http://127.0.0.1:{{my_agents_port()}}/metrics", timeout=60).read()
Path(f"page-{{pl.rank()}}").write_bytes(page)
Path(f"steps-{{pl.rank()}}").write_text(f"{{steps}} {{slow}} {{took_s}}")
deadline = time.monotonic() + 60
while not Path(f"steps-{{1 - pl.rank()}}").exists() and time.monotonic() < deadline:
    time.sleep(0.01)
kill_the_coordinator()
os._exit(0)
"""


class Page:
    """One scrape: metric name without prefix -> value, summed over labels."""

    def __init__(self, text: str) -> None:
        self._sums: defaultdict[str, float] = defaultdict(float)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self._sums[sample.name.removeprefix("paceline_")] += sample.value

    def __getitem__(self, name: str) -> float:
        assert name in self._sums, f"no {name} on the page: {sorted(self._sums)}"
        return self._sums[name]

    def get(self, name: str) -> float:
        """Return the value of a metric, or 0 if it was never written."""
        return self._sums[name]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, str]:
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").write_text(SCRIPT)
    words = ("--quiet", "--set", "spec.collective.mode=Quorum", "--set", "spec.collective.quorum=1")
    return folder, *ForkedRun(folder, "[python, train.py]", *words).wait()


@pytest.fixture(scope="module")
def pages(job: tuple[Path, int, str]) -> list[Page]:
    return [Page((job[0] / f"page-{rank}").read_text()) for rank in range(2)]


@pytest.mark.exhaustive
def test_a_coordinator_restarted_after_the_release_learns_that_the_job_is_complete(
    job: tuple[Path, int, str],
) -> None:
    """The ranks have ended, so only their agents can report that they were released (R17)."""
    folder, code, output = job
    assert code == 0, output
    assert "job job: Complete" in output
    log = next(folder.glob("runs/*/coordinator.log")).read_text()
    assert log.count("GenerationFormed") == 1, log
    agents = "".join(path.read_text() for path in folder.glob("runs/*/agent-*.log"))
    assert agents.count("started with pid") == 2, "a rank was started again"


def test_all_ranks_export_the_same_number_of_rounds(pages: list[Page]) -> None:
    rounds = pages[0]["committed_rounds"]
    assert rounds >= SAMPLES * EPOCHS / BATCH / 2
    for page in pages:
        assert page["committed_rounds"] == page["rounds_total"] == rounds
        assert page["round_transfer_seconds_count"] == page["participation_ratio_count"] == rounds
        assert page["round_duration_seconds_count"] == rounds - 1
        assert page["world_size_ranks"] == 4, "2 members, 2 active"
        assert page["payload_bytes_total"] == pages[0]["payload_bytes_total"]
        assert page["payload_bytes_total"] >= rounds * (4 + 1) * 4
        assert page["payload_bytes_total"] % rounds == 0
        assert 0 < page["transfer_seconds_total"] <= page["round_transfer_seconds_sum"]
    assert pages[0]["participation_ratio_sum"] == pages[1]["participation_ratio_sum"]


def test_every_sample_is_counted_on_exactly_one_page(pages: list[Page]) -> None:
    applied = sum(page["samples_total"] for page in pages)
    dropped = sum(page.get("samples_dropped_total") for page in pages)  # older than maxAge
    assert applied + dropped == SAMPLES * EPOCHS
    assert applied > dropped
    contributions = sum(page["contribution_age_rounds_count"] for page in pages)
    assert contributions == 2 * pages[0]["participation_ratio_sum"]


def test_the_parts_of_the_loop_time_add_up(job: tuple[Path, int, str], pages: list[Page]) -> None:
    for rank, page in enumerate(pages):
        steps, slow, _ = map(float, (job[0] / f"steps-{rank}").read_text().split())
        assert page["steps_total"] == page["step_duration_seconds_count"] == steps
        parts = page["compute_seconds_total"] + page["exposed_seconds_total"]
        whole = page["step_duration_seconds_sum"]
        assert parts <= whole + 1e-6
        assert whole <= parts + page["data_wait_seconds_total"] + 1e-6
        assert page["compute_seconds_total"] >= 0.005 * steps + SLOW_S * slow
        assert page["weight_copies_total"] >= steps


def test_the_fast_rank_waits_less_than_in_full_mode(
    job: tuple[Path, int, str], pages: list[Page]
) -> None:
    _, slow, took_s = map(float, (job[0] / "steps-1").read_text().split())
    avoided = pages[0]["wait_avoided_seconds_total"]
    assert 0.1 * slow * SLOW_S < avoided
    assert avoided < took_s, "each wait ends with an announcement of the slow rank"
    assert pages[1]["jumps_total"] >= 1
    assert pages[1]["steps_total"] < pages[0]["steps_total"]


def test_the_overhead_of_telemetry_is_exported(pages: list[Page]) -> None:
    """`python -m benchmarks telemetry` measures the overhead on an idle machine."""
    for page in pages:
        assert 0 < page["telemetry_seconds_total"] < page["step_duration_seconds_sum"]
