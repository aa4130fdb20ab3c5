"""The page of the report: slow ranks, advice, the course of the job, and the anatomy of a step.

Its content comes from pods. So this module makes plain data, and `page.html.j2` makes the HTML and
escapes every value. If a value were taken for code nevertheless, the page's own policy would keep a
browser from running it.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from paceline_api.errors import printable

from paceline.core.anatomy.course import TimeSeries
from paceline.core.anatomy.dissect import Part
from paceline.core.anatomy.job import LOOK, JobAnatomy, RankRun, SlowRank
from paceline.report.spans import Drawn, drawn

COLOURS: Final = {
    Part.LOADING: "#b07aa1",
    Part.FORWARD: "#4e79a7",
    Part.BACKWARD: "#76b7b2",
    Part.SCRIPT: "#bab0ac",
    Part.LEASE: "#ff9da7",
    Part.BLOCKED: "#e15759",
    Part.REDUCTION: "#f28e2b",
    Part.UPDATE: "#59a14f",
    Part.COPY: "#8cd17d",
    Part.PROTOCOL: "#edc948",
}
"""Color of each part, in the order in which parts are drawn."""
RANKS_DRAWN: Final = 32
"""Upper bound on the ranks of the time line."""
WIDTH: Final = 1100
"""Width of the time line, in pixels."""
LEFT: Final = 70
"""Width of the rank names on the left, in pixels."""
LINE: Final = 30
"""Height of one rank in the time line, in pixels."""
BAR: Final = 130
"""Width of the longest bar of a step, in pixels."""
CHART_WIDTH, CHART_HEIGHT, CHART_LEFT, CHART_BOTTOM = 540, 150, 60, 20
"""Size of the drawing of one value over time, and the room for its labels, in pixels."""
CHARTS_MAX: Final = 6
"""Upper bound on the values that are drawn over time."""
STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; color: #222; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .25rem .8rem .25rem 0; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
#about tr { border: 0 } #verdict { font-size: 1.1rem }
.chart { display: inline-block; margin-right: 1.5rem }
tr + tr { border-top: 1px solid #ddd } .key { display: inline-block; margin-right: 1rem }
.key svg { margin-right: .3rem } .wide { overflow-x: auto }
.note { color: #666 } svg text { font: 12px system-ui, sans-serif; fill: #222 }
"""
"""Style sheet of the page; its hash is in the policy."""


TEMPLATE: Final = "page.html.j2"
"""File name of the template in this package."""


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of a drawing, in pixels; `title` is shown under the mouse pointer."""

    x: str
    y: str
    width: str
    height: str
    color: str
    title: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """A drawing in a cell of a table."""

    width: int
    height: int
    boxes: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A table. Cells are text or drawings."""

    id: str
    head: tuple[str, ...]
    rows: tuple[tuple[str | Bar, ...], ...]
    left: tuple[int, ...] = (0,)
    """Numbers of the columns that are aligned on the left."""


@dataclass(frozen=True, slots=True)
class Label:
    """A text in the time line."""

    x: str
    y: str
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One value over time."""

    name: str
    latest: str
    line: str
    """Points of the line, as SVG has them."""
    texts: tuple[Label, ...]


@dataclass(frozen=True, slots=True)
class About:
    """What the head of the page says of the job, as text for people."""

    written_s: float
    """Time at which the report is made: Unix time in seconds."""
    place: str
    """Namespace of the job, or its run folder."""
    state: str
    mode: str


@dataclass(frozen=True, slots=True)
class WaitLine:
    """A line in the time line, from a rank that waited to the rank that arrived last."""

    x: str
    y: int
    """Height of the rank that waited."""
    to: int
    """Height of the rank that arrived last."""


@dataclass(frozen=True, slots=True)
class TimeLine:
    """The steps and reductions of the ranks whose clock is known."""

    width: int
    height: int
    drawn: int
    """Number of ranks that are drawn."""
    alike: int
    """Number of ranks that could be drawn: those whose clock is known."""
    texts: tuple[Label, ...]
    boxes: tuple[Box, ...]
    lines: tuple[WaitLine, ...]


def page(job: JobAnatomy, about: About, course: Sequence[TimeSeries], rounds: range) -> str:
    """Return the page of a job as HTML.

    Args:
        job: The anatomy of the job. None of the text from its pods reaches the page unescaped.
        about: The job that it belongs to.
        course: Values over time; the first `CHARTS_MAX` are drawn.
        rounds: The rounds that the time line shows.

    Returns:
        A complete HTML document.
    """
    steps = sum(rank.anatomy.steps for rank in job.ranks)
    return _template().render(
        policy=_policy(),
        style=STYLE,
        title=f"Paceline: {job.job}",
        verdict=verdict(job),
        about=_about(job, about, course),
        charts=[_chart(line) for line in course[:CHARTS_MAX]],
        summary=(
            f"{len(job.ranks)} ranks, {steps} steps. Mean step: {_ms(job.step_s)}; without waiting "
            f"for late ranks {_ms(job.if_nobody_were_late_s)}, without exposed communication "
            f"{_ms(job.if_the_network_were_free_s)}."
        ),
        silent=silent_lines(job),
        advice=advice_lines(job),
        colors=[(str(part), color) for part, color in COLOURS.items()],
        anatomy=_anatomy(job),
        blame=_blame(job),
        modes=_modes(job),
        why_no_modes=(
            "it needs the arrivals of all ranks, and pods are missing"
            if job.silent
            else "in no sampled round did all ranks arrive in time"
        ),
        rounds_known=job.rounds,
        rounds=rounds,
        hosts=job.hosts,
        clocks_off=_ms(job.clocks_off_s),
        apart=[rank.samples.member for rank in job.ranks if rank.clock is None],
        timeline=_time_line(job, rounds),
    )


def verdict(job: JobAnatomy) -> str:
    """Return the first thing to know about the job: its slow ranks; also used in a terminal."""
    if not job.slow:
        return "No rank is slower than the others."
    first, *more = job.slow
    text = _slow(first, job)
    if more:
        text += f" Slow as well: {', '.join(slow.worker for slow in more)}."
    return printable(text)


def _slow(slow: SlowRank, job: JobAnatomy) -> str:
    costs = [blame.per_step_s for blame in job.blame if blame.worker == slow.worker]
    return (
        f"Worker {slow.worker} on {slow.host} is slow: it computes {_ms(slow.own_s)} per step, "
        f"the others {_ms(slow.others_s)}. It spends {_ms(slow.more_s)} more on {slow.part}: look "
        f"at {LOOK[slow.part]}. "
        + (
            f"Each other rank waited {_ms(costs[0])} per step for it."
            if costs
            else "No other rank waited for it."
        )
    )


def advice_lines(job: JobAnatomy) -> list[str]:
    """Return what to change first, one line each; also used in a terminal."""
    return [printable(f"{_ms(a.seconds)} ({a.share:.0%}) {a.what}. {a.change}") for a in job.advice]


def silent_lines(job: JobAnatomy) -> list[str]:
    """Return the pods that did not report, one line each; also used in a terminal."""
    return [printable(f"without {one.pod}: {one.why}") for one in job.silent]


def _template() -> Template:
    made = Environment(
        loader=PackageLoader("paceline", "report"),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    return made.get_template(TEMPLATE)


def _visible(value: object) -> object:
    """Remove control characters from text. Markup of the template is left as it is."""
    return printable(value) if type(value) is str else value


def _policy() -> str:
    """Return a content security policy that allows nothing but the page's own style."""
    digest = b64encode(sha256(STYLE.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _about(job: JobAnatomy, about: About, course: Sequence[TimeSeries]) -> Table:
    at = [point.at_s for line in course for point in line.points]
    rows = [
        ("written", _when(about.written_s)),
        ("job", f"{job.job} in {about.place}"),
        ("state", about.state),
        ("mode", about.mode),
    ]
    if at:
        rows.append(("trained", f"{_when(min(at))} to {_when(max(at))}"))
    return Table("about", (), tuple(rows), left=(0, 1))


def _chart(line: TimeSeries) -> Chart:
    values = [point.value for point in line.points]
    low, high = min(values), max(values)
    begin_s, end_s = line.points[0].at_s, line.points[-1].at_s
    wide = (CHART_WIDTH - CHART_LEFT - 10) / ((end_s - begin_s) or 1.0)
    top, high_px = 10, CHART_HEIGHT - CHART_BOTTOM - 20
    # Halves: the difference of two finite numbers may be infinite.
    scale = high_px / ((high / 2 - low / 2) or 1.0)
    line_px = (
        f"{CHART_LEFT + (point.at_s - begin_s) * wide:.1f},"
        f"{top + (high / 2 - point.value / 2) * scale:.1f}"
        for point in line.points
    )
    texts = (
        Label("2", str(top + 8), f"{high:.4g}"),
        Label("2", str(top + high_px), f"{low:.4g}"),
        Label(str(CHART_LEFT), str(CHART_HEIGHT - 4), _clock(begin_s)),
        Label(str(CHART_WIDTH - 60), str(CHART_HEIGHT - 4), _clock(end_s)),
    )
    return Chart(line.name, f"{values[-1]:.4g}", " ".join(line_px), texts)


def _when(wall_s: float) -> str:
    return f"{_utc(wall_s):%Y-%m-%d %H:%M:%S} UTC"


def _clock(wall_s: float) -> str:
    return f"{_utc(wall_s):%H:%M:%S}"


def _utc(wall_s: float) -> datetime:
    """Return the time; one that no calendar has, as a pod may report, is the last that it has."""
    try:
        return datetime.fromtimestamp(wall_s, UTC)
    except (OverflowError, ValueError, OSError):
        return datetime.max.replace(tzinfo=UTC)


def _anatomy(job: JobAnatomy) -> Table:
    rows: list[tuple[str | Bar, ...]] = []
    for rank in job.ranks:
        died = "" if rank.samples.alive else " (ended)"
        parts = rank.anatomy.parts
        hidden_s = sum(rank.anatomy.hidden.values())
        shown_s = [*(parts[part] for part in COLOURS), hidden_s, rank.anatomy.gap_s]
        cells = [f"{1e3 * seconds:.1f}" for seconds in (rank.anatomy.step_s, *shown_s)]
        rows.append((rank.samples.member + died, cells[0], _bar(rank, job), *cells[1:]))
    head = ("worker", "step", "", *map(str, COLOURS), "hidden", "gap")
    return Table("anatomy", head, tuple(rows), left=(0, 2))


def _bar(rank: RankRun, job: JobAnatomy) -> Bar:
    longest_s = max(rank.anatomy.step_s for rank in job.ranks) or 1.0
    at, boxes = 0.0, []
    for part, color in COLOURS.items():
        wide = BAR * rank.anatomy.parts[part] / longest_s
        boxes.append(Box(f"{at:.1f}", "0", f"{wide:.1f}", "14", color))
        at += wide
    return Bar(BAR, 14, tuple(boxes))


def _blame(job: JobAnatomy) -> Table:
    rows = (
        (b.worker, f"{b.blocked_s:.3f} s", str(b.last), _ms(b.per_step_s)) for b in job.blame[:20]
    )
    head = (
        "worker",
        "blocked the others, in all",
        "rounds it was last in",
        "each other rank, per step",
    )
    return Table("blame", head, tuple(rows))


def _modes(job: JobAnatomy) -> Table:
    rows = ((s.mode, _ms(s.saved_s), f"{s.late:.1%}") for s in job.savings)
    return Table("modes", ("mode", "saved per step", "gradients late"), tuple(rows))


def _time_line(job: JobAnatomy, rounds: range) -> TimeLine | None:
    alike = [rank for rank in job.ranks if rank.clock is not None]
    ranks = alike[:RANKS_DRAWN]
    loops = [list(drawn(rank, rounds)) for rank in ranks]
    spans = [span for loop in loops for span in loop]
    if not spans:
        return None
    begin_ns, end_ns = min(s.begin_ns for s in spans), max(s.end_ns for s in spans)
    scale = (WIDTH - LEFT) / max(1, end_ns - begin_ns)
    height = LINE * len(ranks) + 24
    rows = {rank.worker: number for number, rank in enumerate(ranks)}
    texts = [
        Label("0", str(number * LINE + 14), rank.samples.member)
        for number, rank in enumerate(ranks)
    ]
    for tick in range(5):
        x = LEFT + (WIDTH - LEFT - 80) * tick / 4
        at_ms = (x - LEFT) / scale / 1e6
        texts.append(Label(f"{x:.0f}", str(height - 4), f"{at_ms:.1f} ms"))
    return TimeLine(
        WIDTH,
        height,
        len(ranks),
        len(alike),
        tuple(texts),
        tuple(
            _box(span, number * LINE, begin_ns, scale)
            for number, loop in enumerate(loops)
            for span in loop
        ),
        tuple(
            WaitLine(
                f"{LEFT + (span.end_ns - begin_ns) * scale:.1f}",
                number * LINE + 8,
                rows[span.waits_for] * LINE + 8,
            )
            for number, loop in enumerate(loops)
            for span in loop
            if rows.get(span.waits_for, number) != number
        ),
    )


def _box(span: Drawn, top: int, begin_ns: int, scale: float) -> Box:
    x, wide = LEFT + (span.begin_ns - begin_ns) * scale, (span.end_ns - span.begin_ns) * scale
    y, high = (top + 18, 7) if span.in_transport else (top, 16)
    return Box(
        f"{x:.2f}", str(y), f"{max(wide, 0.3):.2f}", str(high), COLOURS[span.part], span.text
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
