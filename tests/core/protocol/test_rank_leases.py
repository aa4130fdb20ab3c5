"""The leases that a rank holds, and the order in which its loader draws them."""

from __future__ import annotations

from paceline.core.protocol.rank_leases import RankLeases


def drawn(leases: RankLeases) -> list[int]:
    numbers = []
    while (lease := leases.draw()) is not None:
        numbers.append(lease)
    return numbers


def test_each_lease_is_drawn_once_while_it_is_held() -> None:
    leases = RankLeases()
    leases.hold((3, 5))
    assert drawn(leases) == [3, 5]
    leases.hold((5, 8))
    assert drawn(leases) == [8]
    assert leases.held == (5, 8)


def test_a_returned_lease_can_be_drawn_again() -> None:
    leases = RankLeases()
    leases.hold((3,))
    assert drawn(leases) == [3]
    leases.hold(())
    leases.hold((3,))
    assert drawn(leases) == [3]


def test_a_lease_whose_gradient_was_lost_is_drawn_again() -> None:
    """Otherwise the loader would ask for leases without end.

    It would learn each time that it holds a lease, and find none.
    """
    leases = RankLeases()
    leases.hold((3,))
    assert not leases.wait()
    assert drawn(leases) == [3]
    assert leases.wait()
    assert drawn(leases) == [3]


def test_a_skipped_lease_is_not_drawn() -> None:
    leases = RankLeases()
    leases.hold((3, 5))
    leases.skip(3)
    assert drawn(leases) == [5]
    leases.skip(5)
    assert leases.wait()
    assert drawn(leases) == []
