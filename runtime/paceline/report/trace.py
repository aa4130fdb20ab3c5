"""The time line as a trace file, for https://ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

import json

from paceline_api.times import NS_PER_US

from paceline.core.anatomy.job import JobAnatomy
from paceline.report.spans import drawn


def trace(job: JobAnatomy, rounds: range) -> str:
    """Return the trace of a job. Each rank is a process with two threads: its loop and its sums.

    Args:
        job: The anatomy of the job.
        rounds: The rounds to include.

    Returns:
        JSON in the trace event format.
    """
    events: list[dict[str, object]] = []
    for number, rank in enumerate(job.ranks):
        worker = f"worker {rank.samples.member}"
        name = {"name": "process_name", "ph": "M", "pid": number, "args": {"name": worker}}
        events.append(name)
        for line, title in enumerate(("loop", "sums")):
            called = {"name": "thread_name", "ph": "M", "pid": number, "tid": line}
            events.append({**called, "args": {"name": title}})
        events += [
            {
                "name": str(span.part),
                "ph": "X",
                "pid": number,
                "tid": int(span.in_transport),
                "ts": span.begin_ns / NS_PER_US,
                "dur": (span.end_ns - span.begin_ns) / NS_PER_US,
                "args": {"what": span.text},
            }
            for span in drawn(rank, rounds)
        ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events})
