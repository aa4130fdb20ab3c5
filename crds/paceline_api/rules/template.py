"""Rules about `spec.template`: the container `trainer`, and what Paceline sets in pods itself."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Final

from paceline_api.names import PREFIX, RESERVED_ENV, RESERVED_ENV_PREFIXES, is_reserved_env
from paceline_api.rules.launchers import LAUNCHERS, PROGRAM, launched_script, launcher_in
from paceline_api.rules.rule import Rule, Violation
from paceline_api.types.enums import Mode
from paceline_api.types.job import TrainingJob
from paceline_api.types.template import TRAINER

_POD: Final = "spec.template.spec"
_CONTAINERS: Final = f"{_POD}.containers"
_NAMES_CEL: Final = ", ".join(f"'{name}'" for name in RESERVED_ENV)
_PREFIXES_CEL: Final = " && ".join(f"!e.name.startsWith('{p}')" for p in RESERVED_ENV_PREFIXES)


def _has_a_template(job: TrainingJob) -> Iterator[Violation]:
    if job.spec.template is None:
        yield Violation()


def _trainer_exists(job: TrainingJob) -> Iterator[Violation]:
    if job.spec.template and job.spec.trainer() is None:
        names = [container.name for container in job.spec.containers]
        close = difflib.get_close_matches(TRAINER, names, n=1)
        listed = ", ".join(names)
        yield Violation(
            problem=f"has no container named {TRAINER} (found: {listed})",
            hint=f"rename container {close[0] if close else names[0]} to {TRAINER}, "
            "or add one that runs a rank",
        )


def _trainer_command(job: TrainingJob) -> Iterator[Violation]:
    for index, container in enumerate(job.spec.containers):
        if container.name == TRAINER and not (container.command and container.command[0]):
            extra = difflib.get_close_matches("command", container.model_extra or {}, n=1)
            yield Violation(
                path=f"{_CONTAINERS}[{index}].command",
                problem="is empty" if container.command else "is missing",
                hint=f"did you mean command instead of {extra[0]}?" if extra else "",
            )


_LAUNCHED_CEL: Final = " || ".join(
    f"c.command[0] == '{name}' || c.command[0].endsWith('/{name}')" for name in LAUNCHERS
)
"""The API server detects a launcher that is the first word, which most are. CEL cannot parse a
shell's line; `launcher_in` can, and it runs wherever a job is validated or submitted."""


def _starts_no_ranks(job: TrainingJob) -> Iterator[Violation]:
    for index, container in enumerate(job.spec.containers):
        command = (*(container.command or ()), *(container.args or ()))
        if container.name == TRAINER and (name := launcher_in(command)):
            yield Violation(
                name,
                f"{_CONTAINERS}[{index}].command",
                "starts ranks itself, which would train without each other",
            )


_RUNS_A_SCRIPT_CEL: Final = (
    f"(c.name == '{TRAINER}' && has(c.command) && size(c.command) > 1 && "
    f"(c.command[0] == '{PROGRAM}' || c.command[0].endsWith('/{PROGRAM}')) && "
    "c.command[1] == 'launch')"
)


def runs_unchanged_script(job: TrainingJob) -> bool:
    """Return True if the ranks run a training script unchanged, by `paceline launch`."""
    trainer = job.spec.trainer()
    command = (*(trainer.command or ()), *(trainer.args or ())) if trainer else ()
    return bool(launched_script(command))


def _scripts_name_their_mode(job: TrainingJob) -> Iterator[Violation]:
    collective = job.spec.collective
    mode = collective.mode if collective else None
    if mode in (None, Mode.SHADOW) and runs_unchanged_script(job):
        if mode is None:
            yield Violation(
                problem="is missing; without it the mode is Quorum, in which a script that "
                "`paceline launch` runs unchanged does not compute what torchrun does"
            )
        else:
            yield Violation(str(mode))


def _scripts_have_no_pipeline(job: TrainingJob) -> Iterator[Violation]:
    collective = job.spec.collective
    if collective and collective.pipeline and runs_unchanged_script(job):
        yield Violation(collective.pipeline)


def _scripts_have_whole_models(job: TrainingJob) -> Iterator[Violation]:
    model = job.spec.parallelism.model if job.spec.parallelism else None
    if (model or 1) > 1 and runs_unchanged_script(job):
        yield Violation(model)


def _names_differ(job: TrainingJob) -> Iterator[Violation]:
    names: set[str] = set()
    for index, container in enumerate(job.spec.containers):
        if container.name in names:
            yield Violation(
                container.name, f"{_CONTAINERS}[{index}].name", "is the name of two containers"
            )
        names.add(container.name)


def _env_is_not_reserved(job: TrainingJob) -> Iterator[Violation]:
    for c, container in enumerate(job.spec.containers):
        if container.name != TRAINER:
            continue
        for e, variable in enumerate(container.env or ()):
            if is_reserved_env(variable.name):
                yield Violation(
                    variable.name,
                    f"{_CONTAINERS}[{c}].env[{e}].name",
                    f"is set in container {TRAINER}, but Paceline sets it for each rank",
                )


def _never_restarts(job: TrainingJob) -> Iterator[Violation]:
    template = job.spec.template
    policy = template.spec.restart_policy if template else None
    if policy not in (None, "Never"):
        yield Violation(policy)


def _labels_are_free(job: TrainingJob) -> Iterator[Violation]:
    metadata = job.spec.template.metadata if job.spec.template else None
    for label in (metadata.labels if metadata else None) or {}:
        if label.startswith(PREFIX):
            yield Violation(label, problem=f"begins with {PREFIX}, which Paceline sets itself")


def _annotations_are_free(job: TrainingJob) -> Iterator[Violation]:
    metadata = job.spec.template.metadata if job.spec.template else None
    for note in (metadata.annotations if metadata else None) or {}:
        if note.startswith(PREFIX):
            yield Violation(note, problem=f"begins with {PREFIX}, which Paceline sets itself")


TEMPLATE_RULES: Final = (
    Rule(
        path="spec.template",
        problem="is missing",
        hint="add template to spec, or name a runtime that has one in spec.runtimeRef",
        check=_has_a_template,
        cel="has(self.template)",
    ),
    Rule(
        path=_CONTAINERS,
        problem=f"has no container named {TRAINER}",
        hint=f"name the container that runs a rank {TRAINER}",
        check=_trainer_exists,
        cel=f"self.template.spec.containers.exists(c, c.name == '{TRAINER}')",
        of_template=True,
    ),
    Rule(
        path=_CONTAINERS,
        problem=f"gives container {TRAINER} no command",
        hint='set command, such as ["python", "train.py"]; the image\'s entrypoint is not used, '
        "because the agent starts the command once for each rank",
        check=_trainer_command,
        cel=f"self.template.spec.containers.all(c, c.name != '{TRAINER}' || "
        "(has(c.command) && size(c.command) > 0 && size(c.command[0]) > 0))",
        of_template=True,
    ),
    Rule(
        path=_CONTAINERS,
        problem=f"gives container {TRAINER} a command that starts ranks itself",
        hint='name the script itself, such as ["paceline", "launch", "train.py"] for a script that '
        "torchrun starts: Paceline starts it once for each rank, procsPerReplica times in each "
        "worker",
        check=_starts_no_ranks,
        cel=f"self.template.spec.containers.all(c, c.name != '{TRAINER}' || !has(c.command) || "
        f"size(c.command) == 0 || !({_LAUNCHED_CEL}))",
        of_parts=True,
        of_template=True,
    ),
    Rule(
        path="spec.collective.mode",
        problem="does not go with a script that `paceline launch` runs unchanged",
        hint="set it to Full, as under torchrun, or to Quorum, Majority, Solo or Deadline; Shadow "
        "needs Paceline's own optimizer in the script (docs/porting.md)",
        check=_scripts_name_their_mode,
        cel="(has(self.collective) && has(self.collective.mode) && self.collective.mode != "
        f"'Shadow') || !self.template.spec.containers.exists(c, {_RUNS_A_SCRIPT_CEL})",
        of_template=True,
    ),
    Rule(
        path="spec.collective.pipeline",
        problem="does not go with a script that `paceline launch` runs unchanged: after backward() "
        "its gradients are the average of all ranks",
        hint="set it to 0, or use Paceline's own optimizer in the script and start it with python "
        "(docs/porting.md)",
        check=_scripts_have_no_pipeline,
        cel="!has(self.collective) || !has(self.collective.pipeline) || "
        "self.collective.pipeline == 0 || "
        f"!self.template.spec.containers.exists(c, {_RUNS_A_SCRIPT_CEL})",
        of_template=True,
    ),
    Rule(
        path="spec.parallelism.model",
        problem="does not go with a script that `paceline launch` runs unchanged",
        hint="remove it, or use Paceline's own API in the script and start it with python "
        "(docs/porting.md)",
        check=_scripts_have_whole_models,
        cel="!has(self.parallelism) || !has(self.parallelism.model) || self.parallelism.model == 1 "
        f"|| !self.template.spec.containers.exists(c, {_RUNS_A_SCRIPT_CEL})",
        of_template=True,
    ),
    Rule(
        path=_CONTAINERS,
        problem="has two containers of one name",
        hint="give each container its own name",
        check=_names_differ,
        cel="self.template.spec.containers.all(c, "
        "self.template.spec.containers.exists_one(d, d.name == c.name))",
        of_parts=True,
        of_template=True,
    ),
    Rule(
        path=_CONTAINERS,
        problem=f"gives container {TRAINER} a variable that Paceline sets for each rank",
        hint="remove it from env; reserved are "
        + ", ".join(RESERVED_ENV)
        + " and names that begin "
        "with " + ", ".join(RESERVED_ENV_PREFIXES),
        check=_env_is_not_reserved,
        cel=f"self.template.spec.containers.all(c, c.name != '{TRAINER}' || !has(c.env) || "
        f"c.env.all(e, !(e.name in [{_NAMES_CEL}]) && {_PREFIXES_CEL}))",
        of_parts=True,
        of_template=True,
    ),
    Rule(
        path=f"{_POD}.restartPolicy",
        problem="is not Never",
        hint="remove it: a rank is restarted by its agent, a pod is replaced by the operator",
        check=_never_restarts,
        cel="!has(self.template.spec.restartPolicy) || self.template.spec.restartPolicy == 'Never'",
        of_parts=True,
        of_template=True,
    ),
    Rule(
        path="spec.template.metadata.labels",
        problem=f"has a key that begins with {PREFIX}, which Paceline sets itself",
        hint="use a prefix of your own",
        check=_labels_are_free,
        cel="!has(self.template.metadata) || !has(self.template.metadata.labels) || "
        f"self.template.metadata.labels.all(k, !k.startsWith('{PREFIX}'))",
        of_parts=True,
        of_template=True,
    ),
    Rule(
        path="spec.template.metadata.annotations",
        problem=f"has a key that begins with {PREFIX}, by which Paceline remembers what it did",
        hint="use a prefix of your own",
        check=_annotations_are_free,
        cel="!has(self.template.metadata) || !has(self.template.metadata.annotations) || "
        f"self.template.metadata.annotations.all(k, !k.startsWith('{PREFIX}'))",
        of_parts=True,
        of_template=True,
    ),
)
