"""Escaping of control characters in text from pods, scripts, nodes and files."""

from __future__ import annotations

import io
import json
import logging
import re
import socket
import sys
import unicodedata
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from paceline.agent.rank_pipe import PipeMessage
from paceline.cli.output import Output, print_data, say
from paceline.cli.screen import Screen
from paceline.cli.table import line, table
from paceline.client.progress import ProgressBar
from paceline.core.messages import ScriptError
from paceline.jobs.core import explain, from_cluster, rendering
from paceline.jobs.interface import Explanation, JobEvent, JobStatus, LogLine
from paceline.local.rundir import RunDirError, make_run_dir
from paceline.local.timeline import Timeline
from paceline.logs import PrintableFormatter
from paceline.train.context import Context
from paceline.worker.agent_pipe import AgentPipe
from paceline_api.errors import InvalidJobError, PacelineError, printable, printable_lines
from paceline_api.ids import MemberId
from paceline_api.reading.load import parse_job
from paceline_api.status import RankPhase, RankStatus, Status
from paceline_operator.logs import JsonFormatter, TextFormatter
from rich.console import Console

HOSTILE = [
    "\x1b[2J\x1b]52;c;aGFjaw==\x07",
    "\x9b31mC1\x9d0;title\x9c",
    "\u202etxt.exe\u202c \u2066x\u2069 \u200b",
    "half \ud800 of a pair \udfff",
    "back\b\b\rover\x00\x7f\x0b\x0c\x85",
    "\u2028line\u2029",
]
BAD = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
COLORS = re.compile(r"\x1b\[[0-9;]*m")
"""The color sequences that Paceline itself writes."""


def is_shown(text: str) -> bool:
    """Return True if `text` can be encoded and has no control characters besides colors."""
    return text.encode() is not None and BAD.search(COLORS.sub("", text)) is None


def status_with(text: str, *, host: str = "") -> Status:
    rank = RankStatus(
        MemberId(0, 0, 0), RankPhase.DEAD, pid=1, host=host or text, why=f"{text}\nand more"
    )
    return Status("job", "", replicas=1, ranks=(rank,), transport="gloo", transport_why=text)


def job_with(text: str) -> JobStatus:
    return JobStatus(name=text, place=text, state=text, message=text, hint=text)


def shown(what: object) -> str:
    file = io.StringIO()
    Console(file=file, width=400, force_terminal=True, color_system=None).print(what)
    return file.getvalue()


@given(st.text() | st.text(alphabet=st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp", "Zs"])))
def test_escaped_text_is_encodable_and_contains_no_control_characters(text: str) -> None:
    for escaped in (printable(text), printable_lines(text)):
        assert escaped.encode() is not None
        kinds = {unicodedata.category(char) for char in escaped if char not in "\n\t"}
        assert not kinds & {"Cc", "Cf", "Cs", "Zl", "Zp"}
    assert "\n" not in printable(text)
    assert printable_lines(text).count("\n") == text.count("\n")


def test_plain_text_is_not_changed() -> None:
    for text in ("plain", "Grüße, 世界 ☕", "two\nlines\tand a tab", "a\xa0b\u3000c"):
        assert printable_lines(text) == text


@pytest.mark.parametrize("text", HOSTILE)
def test_the_status_table_and_its_line_escape_text_of_ranks(text: str) -> None:
    status = status_with(text)
    assert is_shown(shown(table(status, Timeline(), wide=True)))
    assert is_shown(shown(table(status, Timeline())))
    assert is_shown(line(replace(status, carrier=text), Timeline()))


@pytest.mark.parametrize("text", HOSTILE)
def test_events_and_conditions_of_a_cluster_job_are_escaped(text: str) -> None:
    """Other writers of the API server can put control characters into these fields."""
    meta = {"name": "job", "uid": "1", "labels": {}}
    condition = {"type": f"Odd{text}", "status": "True", "reason": text, "message": text}
    slow = {"replica": "job-0-1", "rank": 0, "slowdownPercent": 300, "action": text}
    job = {
        "metadata": meta,
        "spec": {"replicas": 1},
        "status": {
            "state": text,
            "conditions": [condition],
            "stragglers": [slow],
            "transport": {"kind": f"gloo over {text}", "message": text},
        },
    }
    labels = {"paceline.dev/role": "worker", "paceline.dev/slot": "0", "paceline.dev/attempt": "1"}
    pod = {
        "metadata": {"name": "job-0-1", "uid": "2", "labels": labels},
        "spec": {"nodeName": text},
        "status": {"phase": "Running", "message": text},
    }
    about = {"uid": "1", "kind": "TrainingJob", "name": "job"}
    event = {
        "metadata": {},
        "involvedObject": about,
        "reason": text,
        "message": text,
        "reportingComponent": text,
        "lastTimestamp": "2026-01-01T00:00:00Z",
    }
    status = from_cluster.job_status(job, [pod], 0.0)
    assert status.detail is not None
    assert status.detail.stragglers
    events = from_cluster.job_events([event], job, [pod])
    texts = [
        shown(table(status.detail, status, wide=True)),
        line(status.detail, status),
        *rendering.jobs([status], wide=True),
        *rendering.events(events, 1.0, wide=True),
        *rendering.explanation(explain.explain(status, events, flags="", cluster=True)),
    ]
    assert all(map(is_shown, texts))
    assert any(printable(text) in one for one in texts)


@pytest.mark.parametrize("host", ["[red]node[/red]", "[link=http://x]node[/link]", "[/]", "[bold"])
def test_a_host_name_is_not_interpreted_as_markup(host: str) -> None:
    assert host in shown(table(status_with("x", host=host), Timeline(), wide=True))


@pytest.mark.parametrize("text", HOSTILE)
def test_job_lists_events_and_explanations_are_escaped(text: str) -> None:
    event = JobEvent(wall_s=0.0, warning=True, reason=text, message=text, source=text)
    texts = [
        *rendering.jobs([job_with(text)], wide=True),
        *rendering.events([event], 1.0, wide=True),
        *rendering.explanation(Explanation(text, (text,), (text,))),
    ]
    assert all(map(is_shown, texts))
    assert len(rendering.events([event, event], 1.0, wide=True)) == 3


@pytest.mark.parametrize("colour", [True, False])
@pytest.mark.parametrize("text", HOSTILE)
def test_log_lines_are_escaped_unless_raw_is_requested(text: str, *, colour: bool) -> None:
    entry = LogLine(0, "agent-0-0", "0.0#0", 0, text)
    assert is_shown(rendering.log_line(entry, colour=colour, times=True))
    assert rendering.log_line(entry, colour=False, times=False, raw=True) == f"rank 0 | {text}"


@pytest.mark.parametrize("text", HOSTILE)
def test_the_screen_of_a_run_escapes_messages_and_printed_lines(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(quiet=True)
    screen.say(text)
    screen.write(f"[bold]:bomb:{text}")
    screen.on_line(text)
    captured = capsys.readouterr()
    assert is_shown(captured.out)
    assert is_shown(captured.err)
    assert "[bold]:bomb:" in captured.err


def test_a_raw_run_prints_lines_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    Screen(quiet=True, raw=True).on_line("\x1b[31mred")
    assert capsys.readouterr().out == "\x1b[31mred\n"


@pytest.mark.parametrize("text", HOSTILE)
def test_errors_and_messages_for_users_are_escaped(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert is_shown(PacelineError(text, hint=text).render())
    say(text)
    say(text, to_stderr=True)
    captured = capsys.readouterr()
    assert is_shown(captured.out)
    assert is_shown(captured.err)


@pytest.mark.parametrize("text", HOSTILE)
def test_json_and_yaml_output_is_escaped_and_decodes_to_the_same_text(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_data(job_with(text), Output.JSON)
    output = capsys.readouterr().out
    assert is_shown(output)
    assert json.loads(output)["message"] == text
    print_data(job_with(text), Output.YAML)
    output = capsys.readouterr().out
    assert is_shown(output)
    if output.isascii() and "\\uD800" not in output.upper():
        assert yaml.safe_load(output.removeprefix("---\n"))["message"] == text


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "formatter",
    [PrintableFormatter("%(message)s"), TextFormatter("%(message)s"), JsonFormatter()],
    ids=["runtime", "operator", "operator's JSON"],
)
def test_log_formatters_escape_messages_and_tracebacks(
    formatter: logging.Formatter, text: str
) -> None:
    try:
        raise ValueError(text)
    except ValueError:
        record = logging.LogRecord("x", 20, "f", 1, "%s", (text,), sys.exc_info())
    formatted = formatter.format(record)
    assert is_shown(formatted)
    assert "ValueError" in formatted


@pytest.mark.parametrize("text", HOSTILE)
def test_the_error_of_a_script_fits_into_one_message_after_escaping(text: str) -> None:
    """Escaping can make a text ten times as long."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, closing(AgentPipe(theirs.detach())) as pipe:
        error = ScriptError(text, text * 10_000, text, 3)
        assert pipe.tell("failed", text * 10_000, error=error)
        message = msgspec.json.decode(ours.recv(2**20), type=PipeMessage)
    assert message.error is not None
    assert message.error.type == printable(text)
    assert is_shown(
        message.message + message.error.type + message.error.message + message.error.file
    )


def test_a_plain_script_error_is_not_changed() -> None:
    error = ScriptError("ValueError", "bad: ü\n\tx", "train.py", 3)
    assert error.printable() == error


@pytest.mark.parametrize("text", ["[red]loss[/red]", "[/]", *HOSTILE])
def test_the_progress_bar_does_not_interpret_markup_of_a_script(text: str) -> None:
    file = io.StringIO()
    console = Console(file=file, width=300, force_terminal=True, color_system=None)
    with ProgressBar(console) as bar:
        bar.show(job_with(text))
    output = re.sub(r"\x1b\[\??[0-9;]*[a-zA-Z]", "", file.getvalue()).replace("\r", "")
    assert is_shown(output)
    assert printable(text) in output


@pytest.mark.parametrize(
    "place",
    [
        "command: [python, {}]",
        "command: [x], env: [{{name: A, value: {}}}]",
        "workingDir: {}",
        "{}: 1",
    ],
)
def test_a_job_with_a_lone_surrogate_is_refused(place: str) -> None:
    """Such a job used to be accepted, and its run then ended with a traceback."""
    trainer = place.format('"a\\ud800\\e[31m"')
    head = "{apiVersion: paceline.dev/v1alpha1, kind: TrainingJob, metadata: {name: job}, spec: "
    spec = "{replicas: 1, template: {spec: {containers: [{name: trainer, image: x, "
    text = f"{head}{spec}{trainer}" + "}]}}}}"
    with pytest.raises(InvalidJobError, match="half of a surrogate pair") as no:
        parse_job(text)
    assert is_shown(no.value.render())


def test_a_metric_name_is_escaped_when_it_is_logged() -> None:
    context = Context.__new__(Context)
    context._metrics = {}
    context.log("loss \ud800\x1b[31m", 1.0, 1.0)
    (taken,) = context.take_metrics()
    assert is_shown(taken.name)


def test_a_run_folder_whose_name_is_not_utf8_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run-\udcff"
    with pytest.raises(RunDirError, match="not UTF-8") as no:
        make_run_dir("job", folder)
    assert is_shown(no.value.render())
