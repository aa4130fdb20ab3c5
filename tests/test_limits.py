"""Limits of the machine are checked before they are hit, and raised where that is allowed."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline import limits
from paceline.limits import (
    MIB,
    LimitError,
    check_files,
    ensure_callers,
    ensure_files,
    ensure_memory,
)


@pytest.fixture(autouse=True)
def soft_limit() -> Iterator[tuple[int, int]]:
    """Set a low soft limit, as in a shell, and keep the hard one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 1024 if soft == resource.RLIM_INFINITY else min(soft, 1024)
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    yield low, hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_is_raised_as_far_as_needed() -> None:
    ensure_files("a rank", 2_000)
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert 2_000 + limits.SPARE_FILES < soft < 4_000
    ensure_files("a rank", 10)
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == soft, "and never lowered"


def test_a_process_that_runs_no_user_code_raises_its_limit_to_the_maximum(
    soft_limit: tuple[int, int],
) -> None:
    ensure_files("the coordinator", 10, all_that_is_allowed=True)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft_limit[1], soft_limit[1])


def test_a_hard_limit_that_is_too_low_is_an_error_with_number_and_hint(
    monkeypatch: pytest.MonkeyPatch, soft_limit: tuple[int, int]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft_limit[0], 4096))
    with pytest.raises(
        LimitError, match=r"a rank needs up to 9\d{3} open .* limit is 4096"
    ) as caught:
        ensure_files("a rank", 9_000)
    assert "ulimit -n" in caught.value.hint
    assert caught.value.exit_code == 2
    check_files("a rank", 4096)


def test_more_callers_than_the_listen_backlog_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = tmp_path / "somaxconn"
    allowed.write_text("128\n")
    monkeypatch.setattr(limits, "SOMAXCONN", allowed)
    ensure_callers("a rank", 128)
    with pytest.raises(LimitError, match=r"up to 129 connect to a rank .* 128 of them") as caught:
        ensure_callers("a rank", 129)
    assert "sysctl net.core.somaxconn=129" in caught.value.hint


def test_a_memory_limit_too_low_in_any_control_group_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control group of the pod is above that of the container.

    A group without a limit contains "max".
    """
    monkeypatch.setattr(limits, "CGROUPS", tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    ensure_memory("the coordinator", 1 << 40, hint="")
    (tmp_path / "memory.max").write_text(f"{1024 * MIB}\n")
    ensure_memory("the coordinator", 100 * MIB, hint="")
    with pytest.raises(LimitError, match=r"needs 1\d{3} MiB .* the limit is 1024 MiB") as caught:
        ensure_memory("the coordinator", 1024 * MIB, hint="raise it")
    assert caught.value.hint == "raise it"


def test_a_backlog_above_the_kernel_limit_is_not_an_error() -> None:
    """The kernel truncates a backlog that is too large."""
    with socket.create_server(("127.0.0.1", 0), backlog=limits.LISTEN_BACKLOG) as listener:
        address = listener.getsockname()
        callers = [socket.create_connection(address, timeout=5) for _ in range(200)]
        for caller in callers:
            caller.close()
