"""Reading a job file: what is accepted, what is rejected, and the errors that the user sees."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from paceline_api.defaults import with_defaults
from paceline_api.errors import InvalidJobError, JobFileError, PacelineError, SpecError
from paceline_api.reading.load import (
    job_from_mapping,
    load_job,
    parse_job,
    split_path,
    with_overrides,
)
from paceline_api.reading.yaml_text import show_path
from paceline_api.types.enums import Mode

from testing.bad_specs import BAD, GOOD, Bad


def errors_of(text: str, *overrides: str) -> tuple[SpecError, ...]:
    with pytest.raises(InvalidJobError) as caught:
        parse_job(text, source="job.yaml", overrides=overrides)
    return caught.value.errors


def test_a_valid_job_is_parsed() -> None:
    job = parse_job(GOOD)
    assert job.spec.collective is not None
    assert (job.spec.replicas, job.spec.collective.mode, job.spec.collective.quorum) == (
        4,
        Mode.QUORUM,
        6,
    )


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_each_invalid_spec_gives_one_error_with_its_field_and_a_hint(bad: Bad) -> None:
    errors = errors_of(bad.text)
    assert len(errors) == 1, [error.render() for error in errors]
    error = errors[0]
    assert error.path == bad.path
    assert error.message.startswith(f"{bad.path}: ")
    assert bad.problem in error.message
    assert bad.hint in error.hint
    assert error.exit_code == 2
    lines = error.render().splitlines()
    assert [line.split(": ")[0] for line in lines] == ["error", "hint"], lines


def test_the_table_of_invalid_specs_has_no_duplicates() -> None:
    assert len(BAD) >= 40
    assert len({bad.text for bad in BAD.values()}) == len(BAD)


def test_an_error_renders_as_two_lines() -> None:
    error = SpecError(
        "spec.collective.quorum",
        9,
        "is more than replicas x procsPerReplica = 8",
        hint="use 1 to 8, or a percentage such as 75%",
    )
    assert error.render() == (
        "error: spec.collective.quorum: 9 is more than replicas x procsPerReplica = 8\n"
        "hint: use 1 to 8, or a percentage such as 75%"
    )


def test_all_errors_are_reported_at_once_with_their_line_numbers() -> None:
    text = GOOD.replace("quorum: 6", "quorum: 9").replace(
        "  replicas: 4", "  replicas: 4\n  minReplicas: 6\n  maxReplicas: 3"
    )
    with pytest.raises(InvalidJobError) as caught:
        parse_job(text.replace("OMP_NUM_THREADS", "RANK"), source="job.yaml")
    assert caught.value.render() == GOLDEN
    assert caught.value.exit_code == 2


GOLDEN = """\
error: spec.minReplicas: 6 is more than replicas = 4 (job.yaml, line 7)
hint: use 1 to 4, or set spec.replicas to 6 or more
error: spec.maxReplicas: 3 is less than replicas = 4 (job.yaml, line 8)
hint: use 4 or more, or set spec.replicas to 3 or less
error: spec.collective.quorum: 9 is more than replicas x procsPerReplica = 8 (job.yaml, line 12)
hint: use 1 to 8, or a percentage such as 75%
error: spec.template.spec.containers[0].env[0].name: "RANK" is set in container trainer, but \
Paceline sets it for each rank (job.yaml, line 20)
hint: remove it from env; reserved are GROUP_RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, \
MASTER_PORT, RANK, ROLE_RANK, WORLD_SIZE and names that begin with OMPI_COMM_WORLD_, PACELINE_, \
PMIX_, PMI_, TORCHELASTIC_"""


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "job.yaml: is empty", "start with apiVersion"),
        ("# only a comment\n---\n", "job.yaml: is empty", "start with apiVersion"),
        ("- a\n- b\n", "job.yaml: is not a mapping but a list", "start with apiVersion"),
        ("hello", "job.yaml: is not a mapping but a single value", "start with apiVersion"),
        ("a: b: c", "job.yaml: is not YAML: mapping values are not allowed", "indentation"),
        ("a:\n\t- b", "job.yaml: is not YAML: found character '\\t'", "not with tabs"),
        ('{"a": 1', "job.yaml: is not YAML: expected ',' or '}'", "indentation"),
        ("a: \x00", "job.yaml: is not YAML: ", ""),
        ("{[1, 2]: 3}", "job.yaml: the key in line 1, below the top, is not a word", "quotes"),
        (f"{GOOD}---\n{GOOD}", "job.yaml: holds 2 documents, the second one from line 21", "own"),
        ("a: &x {b: *x}", "job.yaml: is nested too deeply", "levels"),
    ],
)
def test_a_file_that_is_not_a_job_is_rejected_with_a_hint(
    text: str, message: str, hint: str
) -> None:
    with pytest.raises(JobFileError) as caught:
        parse_job(text, source="job.yaml")
    assert caught.value.message.startswith(message), caught.value.message
    assert hint in caught.value.hint
    assert caught.value.exit_code == 2


def test_a_yaml_alias_bomb_is_rejected() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 12)]
    with pytest.raises(JobFileError, match="too deeply or too large"):
        parse_job("\n".join(lines))


def test_a_duplicate_key_is_rejected_with_both_line_numbers() -> None:
    (error,) = errors_of(GOOD.replace("quorum: 6", "quorum: 6\n    quorum: 7"))
    assert error.message == (
        "spec.collective.quorum: appears twice, in line 10 and in line 11 (job.yaml)"
    )


def test_an_empty_second_document_is_accepted() -> None:
    assert parse_job(f"---\n{GOOD}---\n").metadata.name == "digits"


def test_yaml_merge_keys_and_plain_scalars_are_read_as_kubectl_does() -> None:
    text = GOOD.replace(
        '            - name: OMP_NUM_THREADS\n              value: "1"\n',
        "            - &one {name: A, value: 2024-01-01}\n"
        "            - {<<: *one, name: B}\n"
        "            - {name: C, value: 12:30:45}\n",
    )
    trainer = parse_job(text).spec.trainer()
    assert trainer is not None
    assert trainer.env is not None
    assert [(v.name, v.value) for v in trainer.env] == [
        ("A", "2024-01-01"),
        ("B", "2024-01-01"),
        ("C", "12:30:45"),
    ]


def test_an_empty_field_counts_as_unset() -> None:
    job = parse_job(GOOD.replace("    quorum: 6", "    quorum:"))
    assert job.spec.collective is not None
    assert job.spec.collective.quorum is None


def test_control_characters_do_not_appear_in_error_messages() -> None:
    (error,) = errors_of(GOOD.replace("mode: Quorum", 'mode: "\\e[31mred"'))
    assert "\x1b" not in error.render()


def test_a_round_trip_preserves_every_field_of_the_pod() -> None:
    text = GOOD.replace(
        "      containers:\n",
        "      nodeSelector: {disk: ssd}\n"
        "      volumes: [{name: v, emptyDir: {}}]\n"
        "      containers:\n"
        "        - {name: side, image: busybox, securityContext: {runAsUser: 1}}\n",
    )
    job = parse_job(text)
    mapping = job.to_mapping()
    pod = mapping["spec"]["template"]["spec"]
    assert pod["volumes"] == [{"name": "v", "emptyDir": {}}]
    assert pod["containers"][0]["securityContext"] == {"runAsUser": 1}
    assert job_from_mapping(mapping) == job
    assert parse_job(yaml.safe_dump(with_defaults(job).to_mapping())) == with_defaults(job)


def test_unknown_fields_are_accepted_in_status_and_rejected_in_spec() -> None:
    mapping = parse_job(GOOD).to_mapping()
    status = {
        "round": 3,
        "fieldOfTomorrow": 1,
        "collective": {"mode": "ModeOfTomorrow"},
        "resolved": {"collective": {"knobOfTomorrow": 1}},
    }
    job = job_from_mapping({**mapping, "status": status})
    assert job.status is not None
    assert job.status.round == 3
    mapping["spec"]["fieldOfTomorrow"] = 1
    with pytest.raises(InvalidJobError, match="is not a field of spec"):
        job_from_mapping(mapping)


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    [
        (["spec.collective.mode=Full"], ("spec", "collective", "mode"), "Full"),
        (["spec.collective.quorum=75%"], ("spec", "collective", "quorum"), "75%"),
        (["spec.replicas=8", "spec.replicas=9"], ("spec", "replicas"), 9),
        (["spec.straggler.detect.windowRounds=9"], ("spec", "straggler", "detect"), None),
        (["spec.elasticity.allowedSizes=[4, 8]"], ("spec", "elasticity", "allowedSizes"), [4, 8]),
        (["metadata.labels.team=a=b"], ("metadata", "labels", "team"), "a=b"),
        (
            ["spec.template.spec.containers[0].env[0].value='2'"],
            ("spec", "template", "spec", "containers", 0, "env", 0, "value"),
            "2",
        ),
        (["spec.template.spec.hostNetwork=true"], ("spec", "template", "spec"), None),
    ],
)
def test_an_override_is_applied_to_a_copy(
    overrides: list[str], path: tuple[str | int, ...], value: object
) -> None:
    before = yaml.safe_load(GOOD)
    after = with_overrides(before, overrides)
    assert before == yaml.safe_load(GOOD), "the mapping that was given in has changed"
    result = after
    for part in path:
        result = result[part]  # type: ignore[index]
    if value is not None:
        assert result == value
    job_from_mapping(after)


def test_an_empty_override_removes_the_field() -> None:
    after = with_overrides(yaml.safe_load(GOOD), ["spec.collective.quorum=", "spec.checkpoint="])
    assert after["spec"]["collective"] == {"mode": "Quorum"}
    assert "checkpoint" not in after["spec"]


@pytest.mark.parametrize(
    ("override", "message", "hint"),
    [
        ("spec.replicas", "--set spec.replicas: has no =", "such as --set spec.collective.mode="),
        ("=3", "--set =3: has no =", "write path=value"),
        (
            "spec.colective.mode=Full",
            "spec.colective: is not a field",
            "did you mean spec.collective?",
        ),
        ("spec.collective.Mode=Full", "spec.collective.Mode: is not", "mean spec.collective.mode?"),
        ("sepc.replicas=3", "sepc: is not a field of a TrainingJob", "did you mean spec?"),
        ("spec..mode=Full", "spec..mode: is not a path", "names with dots between them"),
        ("spec.replicas.=3", "spec.replicas.: is not a path", "names with dots between them"),
        (
            "spec.replicas.x=3",
            "spec.replicas.x: does not exist: spec.replicas is a",
            "set spec.repl",
        ),
        (
            "spec.template.spec.containers[7].name=a",
            "spec.template.spec.containers[7]: does not exist: the list has 1 item",
            "counted from 0",
        ),
        (
            "spec.template.spec.containers.name=a",
            "spec.template.spec.containers.name: does not exist",
            "name a list item as [0]",
        ),
        ("spec.collective.quorum=[1", 'spec.collective.quorum: "[1" is not a YAML value', "quotes"),
    ],
)
def test_an_invalid_override_is_rejected_with_a_hint(
    override: str, message: str, hint: str
) -> None:
    with pytest.raises(InvalidJobError) as caught:
        with_overrides(yaml.safe_load(GOOD), [override])
    (error,) = caught.value.errors
    assert error.message.startswith(message), error.message
    assert hint in error.hint


def test_all_invalid_overrides_are_reported_at_once() -> None:
    with pytest.raises(InvalidJobError) as caught:
        with_overrides({}, ["a=1", "spec.b=2", "c"])
    assert [error.path for error in caught.value.errors] == ["a", "spec.b", "--set c"]


def test_an_error_in_an_overridden_value_names_the_command_line() -> None:
    (error,) = errors_of(GOOD, "spec.collective.quorum=99")
    assert error.message.endswith("= 8 (from the command line)")


def test_load_job_reads_a_file_and_names_it_in_errors(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(GOOD)
    assert load_job(file, ["spec.collective.mode=Full"]).spec.replicas == 4
    file.write_text(GOOD.replace("quorum: 6", "quorum: 9"))
    with pytest.raises(InvalidJobError, match=r"\(job.yaml, line 10\)"):
        load_job(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: no such file"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b"#" * 1_000_001, "is larger than"),
    ],
)
def test_an_unreadable_file_is_rejected_with_a_hint(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    file = tmp_path / "job.yaml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(JobFileError, match=message) as caught:
        load_job(file)
    assert caught.value.hint == "give the path of a YAML file with a TrainingJob"
    with pytest.raises(JobFileError, match="is a directory"):
        load_job(tmp_path)


def test_split_path_inverts_show_path() -> None:
    path = ("spec", "template", "containers", 0, "env", 12, "name")
    assert show_path(path) == "spec.template.containers[0].env[12].name"
    assert split_path(show_path(path)) == path


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("train.py", "import torch\nprint(torch)\n", "is a script, not a job file"),
        ("train.sh", "python train.py\n", "is a script, not a job file"),
        ("run", "#!/usr/bin/env python\nx = {\n", "is a script, not a job file"),
        ("web.yaml", "apiVersion: apps/v1\nkind: Deployment\n", '"Deployment" of apps/v1 is not'),
        ("pod.yaml", "apiVersion: v1\nkind: Pod\n", '"Pod" of v1 is not a TrainingJob'),
        ("other.yaml", "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\n", "of kubeflow.org/v1"),
    ],
)
def test_a_script_or_another_kubernetes_object_is_identified(
    tmp_path: Path, name: str, text: str, problem: str
) -> None:
    """The hint once advised rewriting apiVersion or checking the indentation (regression test)."""
    (tmp_path / name).write_text(text)
    with pytest.raises(PacelineError) as caught:
        load_job(tmp_path / name)
    message = caught.value.render()
    assert problem in message
    assert "write apiVersion" not in message
    assert message.count("error: ") == 1
    assert "command: [" in message or "kind: TrainingJob" in message


@pytest.mark.parametrize(
    ("old", "new", "path"),
    [
        ("name: digits", 'name: "di\\0gits"', "metadata.name"),
        ("train.py", '"a\\0b"', "spec.template.spec.containers[0].command[1]"),
        ('value: "1"', 'value: "\\0"', "spec.template.spec.containers[0].env[0].value"),
        ("  template:", '  checkpoint: {path: "c\\0d"}\n  template:', "spec.checkpoint.path"),
        ("image:", 'workingDir: "/\\0"\n          image:', "containers[0].workingDir"),
    ],
)
def test_a_zero_byte_is_rejected_with_its_field(old: str, new: str, path: str) -> None:
    (error,) = errors_of(GOOD.replace(old, new))
    assert path in error.message
    assert "holds a zero byte" in error.message
    assert "\0" not in error.render()


def test_a_misspelled_empty_section_is_reported_as_the_missing_section() -> None:
    with pytest.raises(InvalidJobError) as caught:
        parse_job(
            "apiVersion: paceline.dev/v1alpha1\nkind: TrainingJob\nmetadata: {name: a}\npec:\n"
        )
    assert [error.path for error in caught.value.errors] == ["spec"]
