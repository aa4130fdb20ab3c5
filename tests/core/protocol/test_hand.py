"""The leases in a rank's hand."""

from __future__ import annotations

from paceline.core.protocol.hand import Hand


def drawn(hand: Hand) -> list[int]:
    found = []
    while (lease := hand.draw()) is not None:
        found.append(lease)
    return found


def test_each_lease_is_drawn_once_while_it_is_held() -> None:
    hand = Hand()
    hand.hold((3, 5))
    assert drawn(hand) == [3, 5]
    hand.hold((5, 8))
    assert drawn(hand) == [8]
    assert hand.held == (5, 8)


def test_one_that_was_given_back_may_come_again() -> None:
    hand = Hand()
    hand.hold((3,))
    assert drawn(hand) == [3]
    hand.hold(())
    hand.hold((3,))
    assert drawn(hand) == [3]


def test_one_whose_gradient_came_to_nothing_is_worked_off_again() -> None:
    """Else the loader asks, is told that it has a lease, finds none, and asks again without end."""
    hand = Hand()
    hand.hold((3,))
    assert not hand.wait()
    assert drawn(hand) == [3]
    assert hand.wait()
    assert drawn(hand) == [3]


def test_a_skipped_one_is_no_longer_held() -> None:
    hand = Hand()
    hand.hold((3, 5))
    hand.skip(3)
    assert drawn(hand) == [5]
    hand.skip(5)
    assert hand.wait()
    assert drawn(hand) == []
