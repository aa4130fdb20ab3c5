"""The page and the trace of a job whose pods are on several hosts, some of them missing."""

from __future__ import annotations

import json
import re

from paceline.core.anatomy.job import analyse
from paceline.core.anatomy.samples import SilentPod
from paceline.report.page import page
from paceline.report.trace import trace

from testing.anatomy_samples import ROUNDS, asked_later, pods

KNOWN = range(ROUNDS)


def test_hosts_with_other_clocks_are_drawn_on_one() -> None:
    job = analyse(pods(shift_ms=12 * 3600 * 1000))
    text = page(job, KNOWN)
    assert "2 hosts with a clock each" in text
    assert "off by at most 10.0 ms" in text
    ticks = [float(ms) for ms in re.findall(r">([\d.]+) ms</text>", text)]
    assert max(ticks) < 100 * (ROUNDS + 1), "and not half a day"
    sums = [e for e in json.loads(trace(job, KNOWN))["traceEvents"] if e.get("tid") == 1]
    begun = {(e["pid"], e["args"]["what"]): e["ts"] for e in sums if e["ph"] == "X"}
    assert len(begun) == 3 * ROUNDS
    for (pid, what), at in begun.items():
        assert at == begun[0, what], (pid, what)


def test_one_host_needs_no_word_about_clocks() -> None:
    assert "clock" not in page(analyse(pods()[:2]), KNOWN)


def test_missing_pods_are_named() -> None:
    job = analyse(pods()[:2], [SilentPod("job-2-0", "no answer within 10 s <b>")])
    text = page(job, KNOWN)
    assert "<li>without job-2-0: no answer within 10 s &lt;b&gt;</li>" in text
    assert "it takes the arrivals of all ranks, and pods are missing" in text


def test_a_rank_whose_clock_is_not_known_is_named_and_not_drawn() -> None:
    first, second, third = pods(shift_ms=500)
    text = page(analyse([first, second, asked_later(third, ROUNDS)]), KNOWN)
    assert "no round is known of them that another host knows too: 2.0#0." in text
    assert len(re.findall(r'<text x="0"', text)) == 2
