"""Leader election: at most one leads, another one follows soon, and a deposed leader knows it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from paceline_api.access.access import Access
from paceline_api.access.login import Login
from paceline_operator.cluster.lease import MARGIN, NAME, Election, Terms

from testing.fake_cluster.http_api import HttpApi, VirtualApi
from testing.fake_cluster.server import Server
from testing.fake_cluster.virtual import VirtualLoop
from testing.loop_end import close_server

HOST = "10.255.0.1"
NAMESPACE = "paceline"
DURATION_S, RENEW_S = 10.0, 3.0


class Candidate:
    """An election in the loop of a test instead of a thread; `fast` is the rate of its clock."""

    def __init__(
        self, house: House, identity: str, *, token_file: Path | None, fast: float
    ) -> None:
        self._loop, self._fast, self._stopped_s = house.loop, fast, 0.0
        self.changes: list[bool] = []
        self.election = Election(
            Access(lambda: Login(house.api.url, token_file=token_file)),
            Terms(NAMESPACE, identity, DURATION_S, RENEW_S),
            clock=lambda: fast * house.loop.time(),
            changed=self.changes.append,
        )
        self._task = house.loop.create_task(self.election._elect())

    @property
    def leads(self) -> bool:
        return self.election.leads()

    def dies(self) -> None:
        self._task.cancel()

    def ends(self) -> None:
        """End the election in order."""
        self.election._ended.set()


class House:
    def __init__(self) -> None:
        self.loop = VirtualLoop()
        self.server = Server(self.loop.time)
        self.api = VirtualApi(self.loop, self.server, HOST, lambda: None)
        self.candidates: list[Candidate] = []

    def candidate(
        self, identity: str, *, token_file: Path | None = None, fast: float = 1.0
    ) -> Candidate:
        candidate = Candidate(self, identity, token_file=token_file, fast=fast)
        self.candidates.append(candidate)
        return candidate

    def spend(self, seconds: float) -> None:
        """Let time pass, and check that two never lead at once."""
        until_s = self.loop.time() + seconds
        while self.loop.time() < until_s:
            self.loop.spend(0.05)
            leading = [one for one in self.candidates if one.leads]
            assert len(leading) <= 1

    def until_leads(self, candidate: Candidate, within_s: float) -> float:
        began_s = self.loop.time()
        while not candidate.leads:
            assert self.loop.time() - began_s < within_s, "it does not lead"
            self.spend(0.05)
        return self.loop.time() - began_s

    @property
    def holder(self) -> str:
        return str(self.server.find("leases", NAMESPACE, NAME)["spec"]["holderIdentity"])

    def close(self) -> None:
        for candidate in self.candidates:
            candidate.dies()
        self.loop.spend(0.1)
        self.loop.close()


@pytest.fixture
def house() -> Iterator[House]:
    house = House()
    yield house
    house.close()


def test_the_first_candidate_leads_and_keeps_the_lead(house: House) -> None:
    one = house.candidate("one")
    house.until_leads(one, 0.2)
    two = house.candidate("two")
    house.spend(60)
    assert one.changes == [True]
    assert two.changes == []
    assert house.holder == "one"
    assert one.election.epoch == 1


def test_two_candidates_that_start_together_elect_one(house: House) -> None:
    both = [house.candidate("one"), house.candidate("two")]
    house.spend(20)
    assert sum(one.leads for one in both) == 1


def test_a_dead_leader_is_replaced_within_the_lease_duration_plus_2_s(house: House) -> None:
    one, two = house.candidate("one"), house.candidate("two")
    house.spend(20)
    first, second = (one, two) if one.leads else (two, one)
    epoch = first.election.epoch
    first.dies()
    took_s = house.until_leads(second, DURATION_S + 2)
    assert took_s > DURATION_S - RENEW_S - 0.5, "before its Lease is over nobody may take it"
    assert second.election.epoch == epoch + 1


def test_a_leader_that_ends_in_order_is_replaced_at_once(house: House) -> None:
    one = house.candidate("one")
    house.spend(5)
    two = house.candidate("two")
    house.spend(5)
    one.ends()
    house.until_leads(two, 2.0)
    assert one.changes == [True, False]


def test_a_returning_holder_leads_at_once_in_a_new_epoch(house: House) -> None:
    before = house.candidate("one")
    house.spend(5)
    before.dies()
    house.candidates.clear()
    after = house.candidate("one")
    house.until_leads(after, 0.2)
    assert after.election.epoch == before.election.epoch + 1


def test_without_an_api_server_the_lead_ends_before_the_lease_does(house: House) -> None:
    one = house.candidate("one")
    house.spend(5)
    house.api.away(True)
    house.spend(DURATION_S * (1 - MARGIN))
    assert not one.leads
    house.spend(0.2)  # the election checks ten times a second
    assert one.changes == [True, False]
    house.api.away(False)
    house.until_leads(one, RENEW_S)
    assert one.changes == [True, False, True]
    assert one.election.epoch == 2, "what it had told before is older"


def test_a_short_outage_of_the_api_server_does_not_cost_the_lead(house: House) -> None:
    one = house.candidate("one")
    house.spend(5)
    house.api.away(True)
    house.spend(4)
    house.api.away(False)
    house.spend(20)
    assert one.changes == [True]


def test_an_api_server_that_drops_all_packets_ends_the_lead_too(house: House) -> None:
    one = house.candidate("one")
    house.spend(5)
    house.loop.network.swallow(HOST, True)
    house.spend(DURATION_S)
    assert not one.leads
    house.loop.network.swallow(HOST, False)
    house.until_leads(one, 2 * RENEW_S)


def test_a_late_renewal_counts_from_its_request(house: House) -> None:
    """Otherwise a leader would trust a Lease that is over for all others."""
    one = house.candidate("one")
    house.spend(5)
    house.api.late, house.api.late_s = 1, RENEW_S - 0.5
    house.spend(RENEW_S)
    renewed_s = one.election._renewed_s
    assert house.loop.time() - renewed_s >= 0.0
    house.api.away(True)
    house.spend(DURATION_S * (1 - MARGIN) - (house.loop.time() - renewed_s) + 0.1)
    assert not one.leads


def test_concurrent_candidates_for_an_expired_lease_elect_one(house: House) -> None:
    """Both read the Lease when it is over, and the API server accepts one of the writes."""
    one = house.candidate("one")
    house.spend(5)
    one.dies()
    late = [house.candidate("two"), house.candidate("three")]
    house.spend(DURATION_S + RENEW_S)
    assert sum(candidate.leads for candidate in late) == 1
    assert house.server.find("leases", NAMESPACE, NAME)["spec"]["leaseTransitions"] == 2


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_the_timestamp_in_the_lease_is_not_trusted(house: House, ahead_s: int) -> None:
    """Clocks of two machines differ; only the time without a change counts."""
    one = house.candidate("one")
    house.spend(5)
    one.dies()
    house.spend(0.1)
    lease = house.server.find("leases", NAMESPACE, NAME)
    year = 2020 if ahead_s < 0 else 2099
    house.server.change(
        "leases", NAMESPACE, NAME, spec={**lease["spec"], "renewTime": f"{year}-01-01T00:00:00Z"}
    )
    two = house.candidate("two")
    took_s = house.until_leads(two, DURATION_S + 2)
    assert took_s >= DURATION_S


@pytest.mark.parametrize("fast", [0.9, 1.1])
def test_clock_rates_that_differ_by_a_tenth_are_harmless(house: House, fast: float) -> None:
    one = house.candidate("one")
    house.spend(5)
    two = house.candidate("two", fast=fast)
    house.spend(30)
    assert one.changes == [True]
    house.loop.network.cut(HOST)
    house.api.away(True)
    house.spend(DURATION_S)
    house.api.away(False)
    house.spend(DURATION_S + 2)
    assert one.leads != two.leads


def test_a_missing_token_file_counts_as_a_failed_request(house: House, tmp_path: Path) -> None:
    """The thread that renews must survive, or the loss of the lead would go unnoticed."""
    token = tmp_path / "token"
    token.write_text("abc")
    one = house.candidate("one", token_file=token)
    house.spend(5)
    token.unlink()
    house.spend(DURATION_S)
    assert one.changes == [True, False]
    token.write_text("abc")
    house.until_leads(one, RENEW_S)


@pytest.mark.long
def test_the_lease_is_renewed_while_the_operators_loop_is_blocked() -> None:
    """The election has its own thread and loop, so the operator's work does not cost the lead."""

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        api = HttpApi(loop, Server(time.monotonic), lambda: None)
        site = await loop.create_server(api.web, "127.0.0.1", 0)
        try:
            await asyncio.to_thread(stand_still, site.sockets[0].getsockname()[1])
        finally:
            await close_server(site)
            await api.web.shutdown()

    def stand_still(port: int) -> None:
        """Block the thread that began the election for longer than the Lease lasts."""
        reported, began = list[bool](), threading.Event()

        def changed(leads: bool) -> None:
            reported.append(leads)
            began.set()

        access = Access(lambda: Login(f"http://127.0.0.1:{port}"))
        terms = Terms(NAMESPACE, "one", duration_s=3.0, renew_s=0.5)
        election = Election(access, terms, changed=changed)

        async def operator() -> None:
            election.start()
            assert began.wait(30)
            renewed_s = election._renewed_s
            time.sleep(4.0)  # noqa: ASYNC251
            assert election.leads()
            assert election._renewed_s > renewed_s + terms.renew_s
            assert reported == [True]

        try:
            asyncio.run(operator())
        finally:
            election.stop()

    asyncio.run(scenario())
