"""`paceline plan`: forecasts of a job at other sizes and in other modes. It changes nothing.

The user decides what to do with the forecasts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

from paceline_api.errors import (
    EXIT_BAD_INPUT,
    PacelineError,
    printable,
    printable_lines,
    show_value,
)
from paceline_api.rounds import RoundSettings
from paceline_api.settings import ResolvedJob
from rich.table import Table
from rich.text import Text

from paceline.cli.choice import Where
from paceline.cli.output import Output, console, is_printed_as_data, say
from paceline.cli.planned import Planned, planned
from paceline.cli.run import EXIT_INTERRUPTED, working_dir_of
from paceline.cli.verbs import seconds
from paceline.clock import wall_s
from paceline.core.forecast import book as books
from paceline.core.forecast import plan as plans
from paceline.core.forecast.book import Book, Measurement
from paceline.jobs.errors import NoSamplesError
from paceline.local import measuring, plan_file
from paceline.local.measuring import Size
from paceline.local.room import MachineLimits, check_room

Value = TypeVar("Value", int, float)
MEASURED_MAX: Final = 4
"""Upper bound on the replicas of a measured run."""
WIDTH: Final = 160
"""Line width in characters where the output is not a terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """The arguments of `paceline plan`."""

    job: str
    """Path of a job file, or name of a job."""
    where: Where
    measure: bool
    ranks: str | None
    model: str | None
    batch: str | None
    speedups: Sequence[str]
    timeout: str
    overrides: Sequence[str]


def plan(wanted: PlanArguments, output: Output | None) -> int:
    """Forecast a job, measure it first if asked for, and print; return the exit code."""
    subject = planned(wanted.job, wanted.where, wanted.overrides)
    job, path = subject.job, subject.book
    limit_s = seconds(wanted.timeout)
    speedups = dict(map(_speedup, wanted.speedups))
    ranks = _numbers("--ranks", wanted.ranks, int)
    models = _numbers("--model", wanted.model, int)
    batches = _numbers("--batch", wanted.batch, float)
    _check_groups(ranks, models)
    book = plan_file.read(path)
    if wanted.measure:
        if subject.file is None:
            raise _not_of_a_file(subject)
        for measurement in _measure(job, working_dir_of(job, subject.file.parent), limit_s):
            if measurement is None:
                return EXIT_INTERRUPTED
            book = books.enter(book, [measurement])
            plan_file.write(path, book)
    book = books.enter(book, _measurements_of(subject, book))
    known = {row.setting.model for row in books.rows(book)} | speedups.keys()
    _check_known(subject, book, models, known)
    asked = plans.Asked(
        job=job.name,
        settings=RoundSettings.of(job.collective),
        members=job.world_size,
        model=job.model,
        ranks=ranks or _sizes(job.world_size * job.model),
        models=models or tuple(sorted(known | {job.model})),
        batches=batches,
        speedups=speedups,
    )
    made = plans.make(asked, book)
    plan_file.write(path, books.show(book, (line.forecast for line in made.lines), wall_s()))
    if not is_printed_as_data(made, output):
        _print(made, wide=output is Output.WIDE)
    return 0


# ---- what was asked for ------------------------------------------------------------------------


def _numbers(option: str, text: str | None, read: Callable[[str], Value]) -> tuple[Value, ...]:
    """Parse a comma-separated option; drop repeated numbers and keep the order.

    Args:
        option: Name of the option, for the error.
        text: Its value; None if it was not given.
        read: Parses one number.

    Returns:
        The numbers; empty without the option.

    Raises:
        PacelineError: A number is not above 0, or is not finite.
    """
    try:
        numbers = [read(part) for part in text.split(",")] if text is not None else []
        if all(0 < number < float("inf") for number in numbers):
            return tuple(dict.fromkeys(numbers))
    except ValueError:
        pass
    raise PacelineError(
        f"{option}: {show_value(text)} is not a list of numbers above 0",
        hint=f"write them with commas, such as {option} 1,2,4",
        exit_code=EXIT_BAD_INPUT,
    )


def _speedup(text: str) -> tuple[int, float]:
    model, _, speedup = text.partition("=")
    try:
        pair = int(model), float(speedup)
        if pair[0] > 1 and 0 < pair[1] < float("inf"):
            return pair
    except ValueError:
        pass
    raise PacelineError(
        f"--speedup: {show_value(text)} is not M=X with M of 2 or more and X above 0",
        hint="say for example --speedup 2=1.6: two ranks that share the model step 1.6 times as "
        "quick as one that has all of it",
        exit_code=EXIT_BAD_INPUT,
    )


def _check_groups(ranks: Sequence[int], models: Sequence[int]) -> None:
    for model in models:
        for size in ranks:
            if size % model:
                raise PacelineError(
                    f"--ranks {size} does not divide into groups of {model} (--model)",
                    hint=f"use multiples of {model}, such as {-(-size // model) * model}",
                    exit_code=EXIT_BAD_INPUT,
                )


def _measurements_of(subject: Planned, book: Book) -> Iterable[Measurement]:
    """Return what can be measured of the job now; nothing if it has ended or is suspended.

    Args:
        subject: The job.
        book: Earlier measurements.

    Returns:
        New measurements.

    Raises:
        NoSamplesError: The job has no samples, and there is no earlier measurement either.
    """
    try:
        return subject.measurements()
    except NoSamplesError as error:
        if not books.rows(book):
            raise
        _say(f"warning: {error.message}: only what was measured before is used")
        return ()


def _not_of_a_file(subject: Planned) -> PacelineError:
    return PacelineError(
        f"--measure runs the job of a file on this machine, and {subject.job.name} is a job",
        hint="change its size with `paceline scale`, and ask for its plan at each size",
        exit_code=EXIT_BAD_INPUT,
    )


def _check_known(subject: Planned, book: Book, models: Sequence[int], known: set[int]) -> None:
    if not books.rows(book):
        raise PacelineError(
            f"too little was measured of job {subject.job.name} as it is, and no run of it says "
            "more",
            hint=subject.hint,
            exit_code=EXIT_BAD_INPUT,
        )
    for model in models:
        if model not in known:
            listed = ", ".join(map(str, sorted(known)))
            raise PacelineError(
                f"--model {model}: nothing is known of {model} ranks that share the model, only of "
                f"{listed}",
                hint=f"say how quick a step is with --speedup {model}=X, or measure a job with "
                f"spec.parallelism.model: {model}",
                exit_code=EXIT_BAD_INPUT,
            )


def _sizes(own: int) -> tuple[int, ...]:
    powers = [1 << n for n in range((2 * own).bit_length())]
    return tuple(sorted({*powers, own}))


# ---- measuring ---------------------------------------------------------------------------------


def _measure(job: ResolvedJob, working_dir: Path, limit_s: float) -> Iterator[Measurement | None]:
    """Yield one measurement for each size; the run at the first size must succeed.

    Args:
        job: The job.
        working_dir: Folder in which its ranks run.
        limit_s: Upper bound in seconds on the measurement of one size.

    Yields:
        The measurement; None, and nothing more, if the user has interrupted it.

    Raises:
        PacelineError: The first size could not be measured.
    """
    if job.trainer.env_from_cluster:
        names = ", ".join(job.trainer.env_from_cluster)
        _say(f"warning: only a cluster can fill in {names}; left out here")
    for number, size in enumerate(_measured_sizes(job)):
        _say(f"measuring {size}")
        try:
            check_room(measuring.at_size(job, size), size.replicas, MachineLimits.of_this_machine())
            measurement = asyncio.run(
                measuring.measure(job, size, working_dir=working_dir, limit_s=limit_s)
            )
        except PacelineError as error:
            if not number:
                raise
            _say(f"warning: not measured: {error.message}")
            continue
        yield measurement
        if measurement is None:
            return


def _measured_sizes(job: ResolvedJob) -> list[Size]:
    replicas = sorted({1, 2, min(MEASURED_MAX, max(2, job.replicas))})
    sizes = [Size(n, job.procs_per_replica, job.model) for n in replicas]
    # The speedup of a group can be measured only against a rank with the whole model, and the noise
    # of a gradient only with two such ranks.
    return sizes + [Size(1, 1, 1), Size(1, 2, 1)] * (job.model > 1)


def _say(text: str) -> None:
    say(text, to_stderr=True)


# ---- what is printed ---------------------------------------------------------------------------


def _print(plan: plans.Plan, *, wide: bool) -> None:
    screen = console()
    if not screen.is_terminal:
        screen.width = WIDTH
    screen.print(Text(printable(f"job {plan.job}: measured"), style="bold"))
    screen.print(_compared(plan))
    for text in _known(plan):
        screen.print(Text(printable(text)))
    screen.print(Text("forecast", style="bold"))
    screen.print(_forecast(plan, wide=wide))
    for contest in plan.contests:
        screen.print(Text(printable(_contest(contest))))
    screen.print(Text(printable_lines(plan.advice)))


def _compared(plan: plans.Plan) -> Table:
    names = ("run", "when", "ranks", "M", "waits for", "spread", "step", "forecast", "error", "by")
    table = _table(names, left=("run", "when", "by"))
    for one in plan.compared:
        setting = one.setting
        table.add_row(
            Text(printable(one.source)),
            datetime.fromtimestamp(one.at_s).strftime("%m-%d %H:%M"),
            str(setting.ranks),
            str(setting.model),
            f"{setting.quorum} of {setting.members}",
            "" if one.spread_s is None else _ms(one.spread_s),
            _ms(one.step_s),
            "" if one.predicted_s is None else _ms(one.predicted_s),
            "" if one.error is None else f"{one.error:+.0%}",
            Text(printable(one.by)),
        )
    return table


def _known(plan: plans.Plan) -> Iterator[str]:
    if plan.alpha_s or plan.beta_s_per_byte:
        rate = f", {1e-6 / plan.beta_s_per_byte:,.0f} MB/s" if plan.beta_s_per_byte else ""
        yield f"link: {plan.alpha_s * 1e6:.0f} us a message{rate}"
    else:
        yield "link: not known, since no more than one rank was measured"
    if plan.noise_scale is None:
        yield "noise scale: not known, so every sample counts as progress"
    else:
        yield (
            f"noise scale: about {plan.noise_scale:,.0f} samples; of an update over so many, half "
            "is progress"
        )


def _forecast(plan: plans.Plan, *, wide: bool) -> Table:
    names = ["ranks", "M", "mode", "step", "gradients/s", "goodput", "cost", ""]
    if wide:
        names[3:3] = ["batch", "waits for"]
        names[-2:-2] = ["efficiency"]
    table = _table(names, left=("mode", ""))
    most = max(plan.lines, key=lambda line: line.forecast.goodput, default=None)
    cheapest = min(plan.lines, key=lambda line: line.forecast.cost, default=None)
    for line in plan.lines:
        forecast, setting = line.forecast, line.forecast.setting
        marks = [
            *(["the job as it is"] if line.own else []),
            *(["most goodput"] if line is most else []),
            *(["cheapest"] if line is cheapest else []),
        ]
        row = [str(setting.ranks), str(setting.model), line.mode]
        row += [f"{setting.batch:,.0f}", str(setting.quorum)] if wide else []
        row += [_ms(forecast.step_s), f"{forecast.gradients_per_s:,.1f}"]
        row += [f"{forecast.goodput:,.0f}"]
        row += [f"{forecast.efficiency:.0%}"] if wide else []
        row += [f"{forecast.cost:,.2f}", ", ".join(marks)]
        table.add_row(*row)
    return table


def _contest(contest: plans.Contest) -> str:
    m = contest.model
    head = f"groups of {m} against {m} times as many replicas: "
    if not contest.needed:
        return f"{head}not known, since no rank with the whole model was measured"
    needed = ", ".join(f"{each.groups}: {each.speedup:.2f}" for each in contest.needed)
    rule = f"SU({m}) from which so many groups win: {needed}"
    if contest.speedup is None:
        return f"{head}SU({m}) is not known (--speedup {m}=X); {rule}"
    if contest.groups is None:
        return f"{head}with SU({m}) = {contest.speedup:.2f} replicas always win; {rule}"
    return (
        f"{head}with SU({m}) = {contest.speedup:.2f} groups win from {contest.groups} on "
        f"({contest.gain:.2f} times); {rule}"
    )


def _table(names: Sequence[str], *, left: Sequence[str]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=True)
    return table


def _ms(seconds_: float) -> str:
    return f"{seconds_ * 1e3:.2f} ms"
