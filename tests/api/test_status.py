"""The status of a job: decoding of other releases' answers, and rows of `status.ranks`."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paceline_api.ids import MemberId
from paceline_api.rank_rows import rank_row, read_rank_row
from paceline_api.rounds import RoundSettings
from paceline_api.status import (
    LAG_S,
    STEP_S,
    LogStatus,
    RankPhase,
    RankStatus,
    Status,
    StatusError,
    as_number,
    decode_status,
)
from paceline_api.types.enums import Mode


def test_a_status_decodes_to_what_was_encoded() -> None:
    status = Status("digits", "uid", ranks=(RankStatus(MemberId(1, 0, 1000), rank=0),))
    assert decode_status(msgspec.json.encode(status)) == status


def test_a_figure_that_is_not_finite_is_read_as_nan() -> None:
    """A script whose loss is NaN must not make its job unreadable."""
    log = LogStatus(metrics={"loss": math.nan}, metric_sums={"loss": (math.inf, 3.0)})
    decoded = decode_status(msgspec.json.encode(Status("digits", log=log))).log
    assert math.isnan(as_number(decoded.metrics["loss"]))
    assert decoded.metric_sums == {"loss": (None, 3.0)}


def test_settings_that_a_release_does_not_report_have_their_defaults() -> None:
    decoded = decode_status(b'{"settings":{"mode":"Quorum","of_a_newer_release":1}}')
    assert decoded.round_settings == RoundSettings(mode=Mode.QUORUM)


@pytest.mark.parametrize("raw", [b"", b"[]", b'{"ranks":[{}]}', b'{"ranks":' + b"[" * 10**5])
def test_bytes_that_are_no_status_raise_one_error(raw: bytes) -> None:
    with pytest.raises(StatusError):
        decode_status(raw)


microseconds = st.none() | st.integers(1, 10**12).map(lambda us: us / 1e6)


@given(st.sampled_from(RankPhase), st.integers(0, 2**22), microseconds, microseconds)
def test_a_rank_is_read_from_its_row(
    state: RankPhase, pid: int, step_s: float | None, lag_s: float | None
) -> None:
    facts = {name: s for name, s in ((STEP_S, step_s), (LAG_S, lag_s)) if s is not None}
    rank = RankStatus(MemberId(3, 1, 2001), state, pid=pid, version=7, facts=facts)
    assert read_rank_row(rank_row(rank, 0.25)) == (rank, 0.25)
    assert read_rank_row(rank_row(rank, None)) == (rank, None)
