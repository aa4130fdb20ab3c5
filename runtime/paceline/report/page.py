"""The page: what to change first, a step's anatomy, who cost the others what, the time line."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

from paceline.core.anatomy.dissect import Part
from paceline.core.anatomy.job import JobAnatomy, Rank
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
RANKS_DRAWN: Final = 32
WIDTH: Final = 1100
LEFT: Final = 70
LINE: Final = 30
BAR: Final = 130
STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 1180px; color: #222; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
table { border-collapse: collapse } td, th { padding: .25rem .8rem .25rem 0; text-align: left }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums }
tr + tr { border-top: 1px solid #ddd } .key { display: inline-block; margin-right: 1rem }
.key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem }
.note { color: #666 } svg text { font: 12px system-ui, sans-serif; fill: #222 }
"""


def page(job: JobAnatomy, rounds: range) -> str:
    """`rounds`: those that the time line shows."""
    title = f"Paceline: {job.job}"
    steps = sum(rank.anatomy.steps for rank in job.ranks)
    summary = (
        f"{len(job.ranks)} ranks, {steps} steps, {_ms(job.step_s)} a step in the mean. "
        f"If nobody were late: {_ms(job.if_nobody_were_late_s)}. "
        f"If the network were free: {_ms(job.if_the_network_were_free_s)}."
    )
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{summary}</p>",
        *_silent(job),
        *_advice(job),
        *_anatomy(job),
        *_blame(job),
        *_modes(job),
        *_time_line(job, rounds),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def advice_lines(job: JobAnatomy) -> list[str]:
    """What to change first, for a terminal too."""
    return [f"{_ms(a.seconds)} ({a.share:.0%}) {a.what}. {a.change}" for a in job.advice]


def silent_lines(job: JobAnatomy) -> list[str]:
    """The pods that are missing, for a terminal too."""
    return [f"without {one.pod}: {one.why}" for one in job.silent]


def _silent(job: JobAnatomy) -> Iterable[str]:
    if job.silent:
        yield "<p>Pods that run and have not answered are missing below:</p>"
        yield '<ul id="silent">'
        yield from (f"<li>{escape(line)}</li>" for line in silent_lines(job))
        yield "</ul>"


def _advice(job: JobAnatomy) -> Iterable[str]:
    yield "<h2>What to change first</h2>"
    if not job.advice:
        yield '<p id="advice">Nothing: no part beside forward and backward takes 5 % of a step.</p>'
        return
    yield '<ol id="advice">'
    yield from (f"<li>{escape(line)}</li>" for line in advice_lines(job))
    yield "</ol>"


def _anatomy(job: JobAnatomy) -> Iterable[str]:
    yield "<h2>What a step is made of</h2><p>"
    for part, colour in COLOURS.items():
        yield f'<span class="key"><i style="background:{colour}"></i>{part}</span>'
    yield "</p>"
    rows = []
    for rank in job.ranks:
        died = "" if rank.samples.alive else " (ended)"
        parts = rank.anatomy.parts
        hidden_s = sum(rank.anatomy.hidden.values())
        shown_s = [*(parts[part] for part in COLOURS), hidden_s, rank.anatomy.gap_s]
        cells = [f"{1e3 * seconds:.1f}" for seconds in (rank.anatomy.step_s, *shown_s)]
        rows.append([rank.samples.member + died, cells[0], _bar(rank, job), *cells[1:]])
    head = ["worker", "step", "", *map(str, COLOURS), "hidden", "gap"]
    yield from _table("anatomy", head, rows, left=(0, 2))
    yield (
        '<p class="note">Milliseconds. Loading to lease: the loop\'s own time; blocked to '
        "protocol: held in step(). The parts add up to the step. Hidden: reduction that ran beside "
        "them; gap: from the end of one update to the beginning of the next.</p>"
    )


def _bar(rank: Rank, job: JobAnatomy) -> str:
    longest_s = max(rank.anatomy.step_s for rank in job.ranks) or 1.0
    at, boxes = 0.0, []
    for part, colour in COLOURS.items():
        wide = BAR * rank.anatomy.parts[part] / longest_s
        boxes.append(f'<rect x="{at:.1f}" width="{wide:.1f}" height="14" fill="{colour}"/>')
        at += wide
    return f'<svg width="{BAR}" height="14">{"".join(boxes)}</svg>'


def _blame(job: JobAnatomy) -> Iterable[str]:
    yield "<h2>For whom the others waited</h2>"
    if not job.blame:
        yield '<p id="blame">Nobody waited for anybody.</p>'
        return
    rows = [
        [b.worker, f"{b.blocked_s:.3f} s", str(b.last), _ms(b.per_step_s)] for b in job.blame[:20]
    ]
    head = ["worker", "held the others, in all", "rounds it was last in", "each other rank, a step"]
    yield from _table("blame", head, rows, left=(0,))


def _modes(job: JobAnatomy) -> Iterable[str]:
    yield "<h2>What another mode would have saved</h2>"
    if not job.savings:
        why = "in no sampled round did all ranks arrive in time"
        if job.silent:
            why = "it takes the arrivals of all ranks, and pods are missing"
        yield f'<p id="modes">Not known: {why}.</p>'
        return
    rows = [[s.mode, _ms(s.saved_s), f"{s.late:.1%}"] for s in job.savings]
    yield from _table("modes", ["mode", "of each step", "gradients late"], rows, left=(0,))
    yield (
        f'<p class="note">From the arrivals in {job.rounds} rounds, against waiting for all; '
        "without grace. It cannot know when a rank that nobody waits for would arrive next.</p>"
    )


def _time_line(job: JobAnatomy, rounds: range) -> Iterable[str]:
    alike = [rank for rank in job.ranks if rank.clock is not None]
    ranks = alike[:RANKS_DRAWN]
    lines = [list(drawn(rank, rounds)) for rank in ranks]
    yield f"<h2>Rounds {rounds.start} to {rounds.stop - 1}</h2>"
    spans = [span for line in lines for span in line]
    if not spans:
        yield '<p id="timeline">No step of these rounds is known.</p>'
        return
    if len(ranks) < len(alike):
        yield f'<p class="note">The first {RANKS_DRAWN} of {len(alike)} ranks.</p>'
    yield from _clocks(job)
    yield (
        '<p class="note">Above: the loop of a rank; below: its sums. A line leads from whoever '
        "waited to the rank that came last. Hold the pointer over a box for its length.</p>"
    )
    begin_ns, end_ns = min(s.begin_ns for s in spans), max(s.end_ns for s in spans)
    scale = (WIDTH - LEFT) / max(1, end_ns - begin_ns)
    height = LINE * len(ranks) + 24
    yield f'<svg id="timeline" width="{WIDTH}" height="{height}" role="img">'
    rows = {rank.worker: number for number, rank in enumerate(ranks)}
    for number, (rank, line) in enumerate(zip(ranks, lines, strict=True)):
        top = number * LINE
        yield f'<text x="0" y="{top + 14}">{escape(rank.samples.member)}</text>'
        yield from (_box(span, top, begin_ns, scale) for span in line)
    for number, line in enumerate(lines):
        for span in line:
            if span.waits_for in rows and rows[span.waits_for] != number:
                x = LEFT + (span.end_ns - begin_ns) * scale
                y, to = number * LINE + 8, rows[span.waits_for] * LINE + 8
                yield (
                    f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y}" y2="{to}" stroke="#e15759" '
                    'stroke-dasharray="2 2"/>'
                )
    for tick in range(5):
        x = LEFT + (WIDTH - LEFT - 80) * tick / 4
        at_ms = (x - LEFT) / scale / 1e6
        yield f'<text x="{x:.0f}" y="{height - 4}">{at_ms:.1f} ms</text>'
    yield "</svg>"


def _clocks(job: JobAnatomy) -> Iterable[str]:
    if job.hosts == 1:
        return
    yield (
        f'<p class="note" id="clocks">{job.hosts} hosts with a clock each, brought to one by the '
        f"sums that they made together: a moment is off by at most {_ms(job.clocks_off_s)}.</p>"
    )
    if apart := [rank.samples.member for rank in job.ranks if rank.clock is None]:
        yield (
            f'<p class="note" id="apart">Not drawn, since no round is known of them that another '
            f"host knows too: {escape(', '.join(apart))}.</p>"
        )


def _box(span: Drawn, top: int, begin_ns: int, scale: float) -> str:
    x, wide = LEFT + (span.begin_ns - begin_ns) * scale, (span.end_ns - span.begin_ns) * scale
    y, high = (top + 18, 7) if span.in_transport else (top, 16)
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{max(wide, 0.3):.2f}" height="{high}" '
        f'fill="{COLOURS[span.part]}"><title>{escape(span.said)}</title></rect>'
    )


def _table(
    name: str, head: Sequence[str], rows: Iterable[Sequence[str]], left: tuple[int, ...]
) -> Iterable[str]:
    """Cells are HTML already."""

    def line(cells: Sequence[str], tag: str) -> str:
        shown = (
            f"<{tag}>{cell}</{tag}>" if place in left else f'<{tag} class="n">{cell}</{tag}>'
            for place, cell in enumerate(cells)
        )
        return f"<tr>{''.join(shown)}</tr>"

    yield f'<div style="overflow-x:auto"><table id="{name}">'
    yield line(head, "th")
    yield from (line(row, "td") for row in rows)
    yield "</table></div>"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
