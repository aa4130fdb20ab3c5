"""Defaults, durations, quorums, and the settings that the runtime receives."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline_api.defaults import QUEUE_LABEL, with_defaults
from paceline_api.errors import MISSING, InvalidJobError, show_value
from paceline_api.names import (
    JOB_NAME_MAX,
    coordinator_host,
    coordinator_name,
    is_reserved_env,
    secret_name,
    worker_name,
    worker_selector,
)
from paceline_api.reading.load import job_from_mapping, parse_job
from paceline_api.reasons import ConditionType, Reason
from paceline_api.resolve import expand, resolve
from paceline_api.settings import ResolvedJob
from paceline_api.types.durations import format_duration, parse_duration, parse_percent
from paceline_api.types.enums import Backend, MaxAgePolicy, Mode, Normalisation, Pacing
from paceline_api.types.job import TrainingJob

from testing.bad_specs import GOOD


def job(*overrides: str) -> TrainingJob:
    return parse_job(GOOD, overrides=overrides)


def settings(*overrides: str) -> ResolvedJob:
    return resolve(job(*overrides))


@given(st.integers(0, 9_999 * parse_duration("1h")))
def test_parse_duration_inverts_format_duration(ns: int) -> None:
    assert parse_duration(format_duration(ns)) == ns


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("0s", 0),
        ("50ms", 50_000_000),
        ("1.5s", 1_500_000_000),
        ("1h30m", 5_400_000_000_000),
        ("1m0.25s", 60_250_000_000),
        ("0.1us", 100),
        ("0.9ns", 0),
        ("9999h9999h9999h9999h9999h9999h", 6 * 9999 * 3_600_000_000_000),
    ],
)
def test_parse_duration_returns_nanoseconds(text: str, ns: int) -> None:
    assert parse_duration(text) == ns < 2**63


@pytest.mark.parametrize(
    "text",
    ["", "5", "5 ms", "-5ms", "+5ms", "5d", "ms", ".5s", "5.s", "1e3s", "٣s", "5ms\n", "10000h"],
)
def test_parse_duration_rejects_text_that_is_not_a_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration(text)


@given(st.text(max_size=40))
def test_random_text_is_a_duration_below_63_bits_or_rejected(text: str) -> None:
    try:
        assert 0 <= parse_duration(text) < 2**63
    except ValueError:
        return


@given(st.integers(0, 100))
def test_parse_percent_returns_the_number(percent: int) -> None:
    assert parse_percent(f"{percent}%") == percent


@pytest.mark.parametrize("text", ["", "%", "101%", "05%", "-1%", "5.5%", "5 %", "5", "5%\n", "٣%"])
def test_parse_percent_rejects_text_that_is_not_a_percentage(text: str) -> None:
    with pytest.raises(ValueError, match="not a percentage"):
        parse_percent(text)


@pytest.mark.long
@given(st.one_of(st.integers(), st.integers(-5, 105).map(lambda n: f"{n}%"), st.text(), st.none()))
def test_a_quorum_is_a_count_or_a_percentage_or_rejected(value: int | str | None) -> None:
    mapping = job("spec.replicas=1000").to_mapping()
    mapping["spec"]["collective"]["quorum"] = value
    try:
        given_job = job_from_mapping(mapping)
    except InvalidJobError as error:
        refused = error.errors
    else:
        refused = ()
    if refused:
        assert {fault.path for fault in refused} == {"spec.collective.quorum"}
        assert all(fault.hint for fault in refused)
        return
    resolved = resolve(given_job).collective
    if isinstance(value, int):
        assert (resolved.quorum_count, resolved.quorum_percent) == (value, None)
        assert 1 <= value <= 2000
    else:
        percent = 75 if value is None else int(value.removesuffix("%"))
        assert (resolved.quorum_count, resolved.quorum_percent) == (None, percent)
        assert 1 <= percent <= 100


def test_defaults_match_the_design() -> None:
    spec = with_defaults(job("spec.collective=")).spec
    assert (spec.min_replicas, spec.max_replicas, spec.backoff_limit) == (1, None, 6)
    collective = spec.collective
    assert collective is not None
    assert (collective.mode, collective.quorum, collective.backend) == (
        Mode.QUORUM,
        "75%",
        Backend.AUTO,
    )
    assert (collective.max_age, collective.max_age_policy) == (4, MaxAgePolicy.DROP)
    assert (collective.normalisation, collective.pacing) == (Normalisation.FIXED, Pacing.AUTO)
    assert (collective.grace, collective.bench_after) == ("5%", "auto")
    assert spec.checkpoint is None


OVERRIDES = (
    "spec.minReplicas=2",
    "spec.collective=",
    "spec.collective.grace=0s",
    "spec.collective.buffers.policy=Local",
    "spec.straggler.detect.windowRounds=7",
    "spec.checkpoint.path=out",
    "spec.elasticity.allowedSizes=[2, 4]",
    "spec.scheduling.provider=Kueue",
    "spec.suspend=true",
)


@pytest.mark.long
@given(st.lists(st.sampled_from(OVERRIDES), unique=True))
def test_with_defaults_is_idempotent_and_keeps_given_values(overrides: list[str]) -> None:
    if {"spec.minReplicas=2", "spec.scheduling.provider=Kueue"} <= set(overrides):
        return
    partial = job(*overrides)
    once = with_defaults(partial)
    assert with_defaults(once) == once
    assert resolve(once) == resolve(partial)
    assert_kept(partial.to_mapping(), once.to_mapping())


def assert_kept(before: object, after: object) -> None:
    if isinstance(before, dict):
        assert isinstance(after, dict)
        for key, value in before.items():
            assert_kept(value, after[key])
    else:
        assert after == before


def test_kueue_fixes_the_size() -> None:
    fixed = with_defaults(job("spec.scheduling.provider=Kueue")).spec
    assert (fixed.min_replicas, fixed.max_replicas) == (4, 4)
    label = f"metadata.labels={{{QUEUE_LABEL}: team}}"
    labelled = with_defaults(job(label)).spec
    assert (labelled.min_replicas, labelled.max_replicas) == (4, 4)
    with pytest.raises(InvalidJobError, match="admits a fixed size only"):
        job(label, "spec.maxReplicas=8")
    assert with_defaults(job(label, "spec.scheduling.provider=None")).spec.min_replicas == 1


def test_resolved_settings_survive_a_json_round_trip() -> None:
    resolved = settings(
        "spec.checkpoint.path=out",
        "spec.failurePolicy.rules=[{action: FailJob, onExitCodes: [2, 3]}]",
        "spec.elasticity.allowedSizes=[8, 4, 4]",
        "spec.activeDeadlineSeconds=60",
    )
    assert msgspec.json.decode(msgspec.json.encode(resolved), type=ResolvedJob) == resolved
    assert resolved.world_size == 8
    assert resolved.elasticity.allowed_sizes == (4, 8)
    assert resolved.active_deadline_ns == 60_000_000_000
    assert resolved.checkpoint is not None
    assert (resolved.checkpoint.path, resolved.checkpoint.keep) == ("out", 3)
    assert resolved.failure_rules[0].on_exit_codes == (2, 3)


@pytest.mark.parametrize(
    ("override", "name", "value"),
    [
        ("grace=20ms", "grace_ns", 20_000_000),
        ("grace=20ms", "grace_share", None),
        ("grace=12%", "grace_ns", None),
        ("grace=12%", "grace_share", 0.12),
        ("quorum=3", "quorum_count", 3),
        ("quorum=3", "quorum_percent", None),
        ("quorum=60%", "quorum_percent", 60),
        ("deadline=auto", "deadline_ns", None),
        ("deadline=50ms", "deadline_ns", 50_000_000),
        ("benchAfter=auto", "bench_after_ns", None),
        ("benchAfter=2m", "bench_after_ns", 120_000_000_000),
        ("freezeTimeout=5s", "freeze_timeout_ns", 5_000_000_000),
        ("buffers.policy=Local", "buffers_every", 0),
        ("buffers.everyRounds=7", "buffers_every", 7),
        ("hashEveryRounds=0", "hash_every", 0),
        ("mode=Solo", "mode", Mode.SOLO),
    ],
)
def test_collective_fields_resolve_to_settings(override: str, name: str, value: object) -> None:
    assert getattr(settings(f"spec.collective.{override}").collective, name) == value


def test_the_trainer_command_is_expanded_as_the_kubelet_does() -> None:
    trainer = settings(
        "spec.template.spec.containers[0].command=[python, $(HERE)/a.py]",
        "spec.template.spec.containers[0].args=[--n, $(N), $(UNKNOWN), $$(N)]",
        "spec.template.spec.containers[0].env=[{name: N, value: '3'}, {name: HERE, value: /x$(N)},"
        " {name: IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}, {name: E}]",
        "spec.template.spec.containers[0].workingDir=sub",
    ).trainer
    assert trainer.command == ("python", "/x3/a.py", "--n", "3", "$(UNKNOWN)", "$$(N)")
    assert trainer.env == {"N": "3", "HERE": "/x3", "E": ""}
    assert trainer.env_from_cluster == ("IP",)
    assert trainer.working_dir == "sub"


@given(st.text(alphabet="$()AB ", max_size=12))
def test_expand_leaves_plain_text_and_double_dollars(text: str) -> None:
    plain = text.replace("$", "")
    assert expand(plain, {"A": "1"}) == plain
    assert expand(text.replace("$", "$$"), {"A": "1", "B": "2"}) == text.replace("$", "$$")


def test_pod_names_fit_into_a_label() -> None:
    longest = "j" * JOB_NAME_MAX
    uid = "0f8fad5b-d9cb-469f-a165-70867728950e"
    names = (worker_name(longest, 9_999, 99_999), coordinator_name(longest, 99_999))
    assert max(map(len, names)) <= 63
    assert (
        len(secret_name(longest, uid, "0a0b0c0d", "01234567")) <= 253
    )  # A DNS subdomain, not a label.
    assert worker_name("a", 1, 2) == "a-1-2"
    assert secret_name("a", uid, "0a0b0c0d", "01234567") == "a-0f8fad5b-0a0b0c0d-2-01234567"
    assert coordinator_host("a", "ns") == "a-coordinator.paceline-jobs.ns"
    assert worker_selector("a") == "paceline.dev/job-name=a,paceline.dev/role=worker"


@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        ("RANK", True),
        ("PACELINE_X", True),
        ("PMI_FD", True),
        ("MY_RANK", False),
        ("NCCL_DEBUG", False),
    ],
)
def test_reserved_environment_variables_are_recognized(name: str, reserved: bool) -> None:
    assert is_reserved_env(name) is reserved


def test_each_reason_is_one_word_and_has_its_own_sentence() -> None:
    members = [*ConditionType, *Reason]
    for member in members:
        assert member.isalnum(), member
        assert member[0].isupper(), member
        assert member.sentence.endswith("."), member
        assert member.sentence.count(". ") == 0, member
    assert len({member.sentence for member in members}) == len(members)


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ("", "an empty text"),
        ("a\nb", '"a\\nb"'),
        ({"a": 1}, "a mapping"),
        ((1,), "a list"),
        ("x" * 100, '"' + "x" * 56 + "..."),
    ],
)
def test_show_value_gives_one_short_line(value: object, shown: str) -> None:
    assert show_value(value) == shown
    assert repr(MISSING) == "MISSING"


@pytest.mark.parametrize(
    ("written", "want"),
    [
        ("", 1),
        ("nvidia.com/gpu: 4", 4),
        ('nvidia.com/gpu: "8"', 8),
        ("nvidia.com/gpu: 0", 1),
        ("cpu: 0.5, memory: 4Gi", 1),
    ],
)
def test_each_gpu_of_a_worker_gets_a_rank(written: str, want: int) -> None:
    limits = f"          resources: {{limits: {{{written}}}}}\n          env:"
    text = GOOD.replace("          env:", limits)
    assert resolve(parse_job(text)).procs_per_replica == 2, "what the user says goes first"
    left_open = parse_job(
        text.replace("  procsPerReplica: 2\n", "").replace("quorum: 6", "quorum: 4")
    )
    assert left_open.spec.procs_per_replica is None
    assert resolve(left_open).procs_per_replica == want
    assert with_defaults(left_open).spec.procs_per_replica == want
    assert resolve(with_defaults(left_open)).procs_per_replica == want


def test_gpus_of_another_container_are_not_for_ranks() -> None:
    text = GOOD.replace("  procsPerReplica: 2\n", "").replace("quorum: 6", "quorum: 4")
    text += "        - name: logger\n          resources: {limits: {nvidia.com/gpu: 4}}\n"
    assert resolve(parse_job(text)).procs_per_replica == 1
