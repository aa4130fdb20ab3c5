"""The page and the trace of a job: slow rank first, course, several hosts, missing pods."""

from __future__ import annotations

import json
import re
from base64 import b64encode
from dataclasses import replace as changed
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser

import pytest
from msgspec.structs import replace
from paceline.core.anatomy.course import SPEED, SeriesPoint, TimeSeries, course
from paceline.core.anatomy.job import JobAnatomy, analyse
from paceline.core.anatomy.samples import PodSamples, SilentPod
from paceline.report.page import About, page, verdict
from paceline.report.trace import trace

from testing.anatomy_samples import ROUNDS, asked_later, pods

KNOWN = range(ROUNDS)
WRITTEN_S = 1_795_831_200.0


def shown(job: JobAnatomy, text: str = "Full") -> str:
    """Return the page of a job in whose head every text is `text`."""
    lines = [changed(line, name=text) if line.name != SPEED else line for line in course(pods())]
    return page(job, About(WRITTEN_S, text, text, text), lines, KNOWN)


def test_the_page_begins_with_the_slow_rank() -> None:
    text = Tags(shown(analyse(pods()))).text
    begin = text.index("Worker 2.0 on other is slow: it computes 70.0 ms per step, the others 30.0")
    assert begin < text.index("What to change first")
    assert "It spends 40.0 ms more on backward: look at its processor" in text
    assert "Each other rank waited 40.0 ms per step for it." in text


def test_a_page_of_equal_ranks_says_that_no_rank_is_slower() -> None:
    assert "No rank is slower than the others." in shown(analyse(pods()[:2]))


def test_all_slow_ranks_are_named() -> None:
    first, second, third = pods()
    also = changed_slot(third, 3)
    job = analyse([first, second, changed_slot(second, 4), third, also])
    assert "Slow as well: " in verdict(job)


def changed_slot(pod: PodSamples, slot: int) -> PodSamples:
    (own,) = pod.ranks
    return replace(pod, slot=slot, ranks=(replace(own, member=f"{slot}.0#0"),))


def test_the_head_has_date_job_state_and_mode() -> None:
    about = About(WRITTEN_S, "team", "Training", "Quorum, quorum 2")
    text = Tags(page(analyse(pods()), about, course(pods()), KNOWN)).text
    for row in (
        "written 2026-11-28 02:00:00 UTC",
        "job job in team",
        "state Training",
        "mode Quorum, quorum 2",
        "trained 2026-11-28 01:58:55 UTC to 2026-11-28 01:59:34 UTC",
    ):
        assert row in text


def test_speed_and_figures_are_drawn_over_time() -> None:
    page_text = shown(analyse(pods()), "loss")
    assert page_text.count("<polyline") == 2
    text = Tags(page_text).text
    assert "rounds per second, latest 10" in text
    assert "loss, latest 0.025" in text


def test_a_job_without_a_course_has_no_chart() -> None:
    text = page(analyse(pods()), About(WRITTEN_S, "team", "Training", "Full"), (), KNOWN)
    assert "<polyline" not in text
    assert "the job has made too few rounds" in text


def test_times_and_values_beyond_any_calendar_are_drawn() -> None:
    line = TimeSeries("loss", (SeriesPoint(0.0, -1e308), SeriesPoint(2.0**63, 1e308)))
    text = page(analyse(pods()), About(WRITTEN_S, "", "", ""), [line], KNOWN)
    assert "nan" not in text
    assert "inf" not in text.replace("info", "")


def test_hosts_with_different_clocks_are_drawn_on_one_time_axis() -> None:
    job = analyse(pods(shift_ms=12 * 3600 * 1000))
    text = shown(job)
    assert "2 hosts with a clock each" in text
    assert "times are off by at most 10.0 ms" in text
    ticks = [float(ms) for ms in re.findall(r">([\d.]+) ms</text>", text)]
    assert max(ticks) < 100 * (ROUNDS + 1), "and not half a day"
    sums = [e for e in json.loads(trace(job, KNOWN))["traceEvents"] if e.get("tid") == 1]
    begun = {(e["pid"], e["args"]["what"]): e["ts"] for e in sums if e["ph"] == "X"}
    assert len(begun) == 3 * ROUNDS
    for (pid, what), at in begun.items():
        assert at == begun[0, what], (pid, what)


def test_a_page_of_one_host_does_not_mention_clocks() -> None:
    assert "clock" not in shown(analyse(pods()[:2]))


def test_missing_pods_are_listed() -> None:
    job = analyse(pods()[:2], [SilentPod("job-2-0", "no answer within 10 s <b>")])
    text = shown(job)
    assert "<li>without job-2-0: no answer within 10 s &lt;b&gt;</li>" in text
    assert "it needs the arrivals of all ranks, and pods are missing" in text


def test_a_rank_with_an_unknown_clock_offset_is_listed_and_not_drawn() -> None:
    first, second, third = pods(shift_ms=500)
    text = shown(analyse([first, second, asked_later(third, ROUNDS)]))
    assert "because they share no known round with another host:\n2.0#0." in text
    assert len(re.findall(r'<text x="0"', text)) == 2


HOSTILE = [
    "<img src=x onerror=alert(1)>",
    "<script>alert(1)</script>",
    "</title></text></svg><svg onload=alert(1)>",
    "\"'><iframe srcdoc=x>",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt;",
    "javascript:alert(1)",
    "\x1b]52;c;aGk=\x07\u202egnp\x9b31m\ud800",
]
"""Text that a browser, a template engine or a terminal would interpret."""


class Tags(HTMLParser):
    """The elements and attributes of a page, and its style sheet."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.style = ""
        self._words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.elements and self.elements[-1][0] == "style" and not self.style:
            self.style = data
        self._words += data.split()

    @property
    def text(self) -> str:
        """Return all text of the page, with single spaces."""
        return " ".join(self._words)

    @property
    def shape(self) -> list[tuple[str, tuple[str, ...]]]:
        return [(tag, tuple(attrs)) for tag, attrs in self.elements]


def told_as(text: str, place: str) -> JobAnatomy:
    """Return the analysis of a job in which every text is `text`, bypassing the decoder."""
    result = []
    for pod in pods(shift_ms=500):
        (own,) = pod.ranks
        rounds = tuple(replace(one, last=place if one.last else "") for one in own.rounds)
        member = f"{place}#0" if pod.slot == 2 else f"{pod.slot}{text}"
        result.append(replace(pod, job=text, ranks=(replace(own, member=member, rounds=rounds),)))
    return analyse(result, [SilentPod(text, text)])


@pytest.mark.parametrize("hostile", HOSTILE)
def test_text_of_a_pod_is_escaped_everywhere_on_the_page(hostile: str) -> None:
    harmless = Tags(shown(told_as("text", "text"), "text")).shape
    text = shown(told_as(hostile, hostile), hostile)
    assert Tags(text).shape == harmless, "no element and no attribute more"
    assert text.encode(), "nothing in it that cannot be written down"
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", text)
    if hostile.isprintable():
        assert hostile in unescape(text), "it is shown all the same"


def test_advice_and_modes_are_escaped() -> None:
    job = analyse(pods())
    assert job.advice
    assert job.savings
    bad = "<b onclick=x>"
    advice = tuple(changed(each, what=bad, change=bad) for each in job.advice)
    savings = tuple(changed(each, mode=bad) for each in job.savings)
    text = shown(changed(job, advice=advice, savings=savings))
    assert "<b " not in text
    assert text.count("&lt;b onclick=x&gt;") == 2 * len(advice) + len(savings)


def test_the_content_security_policy_forbids_scripts_and_requests() -> None:
    tags = Tags(shown(analyse(pods(shift_ms=500))))
    (policy,) = [
        attrs["content"] or ""
        for tag, attrs in tags.elements
        if tag == "meta" and attrs.get("http-equiv") == "Content-Security-Policy"
    ]
    digest = b64encode(sha256(tags.style.encode()).digest()).decode()
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules == {
        "default-src": "'none'",
        "style-src": f"'sha256-{digest}'",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    before = [tag for tag, _ in tags.elements[: tags.elements.index(("style", {}))]]
    assert before == ["html", "head", "meta", "meta", "title"], "the policy comes before the style"
    assert not any("style" in attrs for _, attrs in tags.elements), "which the policy forbids"
