"""Members on virtual time: who is lost, who failed, who is behind, and that all come to know."""

import logging

import pytest

from slipstream.errors import FrameRefused, PeerFailed, PeerLost, RuntimeFault, WaitLimit
from slipstream.runtime.members.member import BEAT_S, HUB, Member
from slipstream.testing import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import Beat, Echo, Fault, Leave, Message, Push, encode_header

SILENCE_S = 5.0
NAMES = ("rank 0", "rank 1", "rank 2", "server 0")


class Company:
    """Four members that hear each other; ``pass_time`` lets all of them beat."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = MemoryNetwork(seed=1)
        self.members = {
            name: Member(name, self.network.endpoint(name), silence_s=SILENCE_S, clock=self.clock)
            for name in NAMES
        }
        for member in self.members.values():
            for name in NAMES:
                member.transport.connect(name, "")
            member.expect(*(NAMES if member.is_hub else [HUB]))

    def __getitem__(self, name: str) -> Member:
        return self.members[name]

    def pass_time(self, seconds: float, *, without: tuple[str, ...] = ()) -> None:
        for _ in range(round(seconds / BEAT_S)):
            self.clock.advance(BEAT_S)
            self.talk(without=without)

    def talk(self, *, without: tuple[str, ...] = ()) -> None:
        """Handle all there is to handle; those left out are as good as dead."""
        for _ in range(12):
            for name, member in self.members.items():
                if name not in without:
                    member.pump_once(0.0)


@pytest.fixture
def company() -> Company:
    return Company()


# ---- silence


def test_members_that_beat_are_never_lost(company: Company) -> None:
    company.pass_time(60)
    assert [member.fault for member in company.members.values()] == [None] * 4


@pytest.mark.parametrize("dead", ["rank 1", "rank 2", "server 0"])
def test_a_silent_member_is_named_to_everybody_by_the_hub(company: Company, dead: str) -> None:
    company.pass_time(3)
    company.pass_time(SILENCE_S + 2 * BEAT_S, without=(dead,))
    for name in NAMES:
        if name == dead:
            continue
        fault = company[name].fault
        assert isinstance(fault, PeerLost), name
        assert fault.peer == dead
        assert SILENCE_S < fault.silent_s <= SILENCE_S + 2 * BEAT_S
        with pytest.raises(PeerLost, match=rf"{dead} is lost: nothing heard .* for 5\.\d s"):
            company[name].check()


def test_a_loss_is_logged_with_its_fields(
    company: Company, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="slipstream")
    company.pass_time(SILENCE_S + 2 * BEAT_S, without=("rank 1",))
    (lost, *told) = [r.__dict__ for r in caplog.records if r.__dict__.get("event") == "member_lost"]
    assert lost["name"] == "slipstream.runtime.members.coordination"
    silent_s = lost["fields"]["silent_s"]
    assert lost["fields"] == {"at": HUB, "member": "rank 1", "silent_s": silent_s}
    assert lost["message"] == f'member_lost at="rank 0" member="rank 1" silent_s={silent_s:g}'
    assert {record["fields"]["at"] for record in told} == {"rank 2", "server 0"}


def test_a_refused_message_is_logged_for_debugging(
    company: Company, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="slipstream")
    company["rank 2"].send("rank 1", Echo(0))
    company.talk()
    assert caplog.messages == []
    caplog.set_level(logging.DEBUG, logger="slipstream")
    company["rank 2"].send("rank 1", Echo(0))
    company.talk()
    assert caplog.messages == [
        'message_refused member="rank 1" kind=Echo sender="rank 2" reason="rank 1 takes no Echo"'
    ]


def test_nobody_is_lost_before_the_limit(company: Company) -> None:
    company.pass_time(SILENCE_S - BEAT_S, without=("rank 1",))
    assert all(company[name].fault is None for name in NAMES)
    company.pass_time(1)
    assert all(company[name].fault is None for name in NAMES), "back in time"


def test_a_silent_hub_is_noticed_by_everybody(company: Company) -> None:
    company.pass_time(SILENCE_S + 2 * BEAT_S, without=(HUB,))
    for name in NAMES[1:]:
        fault = company[name].fault
        assert isinstance(fault, PeerLost)
        assert fault.peer == HUB


def test_who_was_away_itself_blames_nobody(company: Company) -> None:
    company.pass_time(3)
    company.clock.advance(60)  # the whole machine slept
    company.talk()
    company.pass_time(3)
    assert all(company[name].fault is None for name in NAMES)


def test_the_first_fault_is_the_one_that_counts(company: Company) -> None:
    company["rank 1"].fail(PeerFailed("rank 2", "out of memory"))
    company["rank 1"].fail(PeerLost("rank 0", 5.0))
    with pytest.raises(PeerFailed, match="rank 2 failed: out of memory"):
        company["rank 1"].check()


# ---- failing and leaving


@pytest.mark.parametrize("failing", ["rank 0", "rank 2", "server 0"])
def test_a_member_that_fails_is_quoted_by_everybody(company: Company, failing: str) -> None:
    company.pass_time(1)
    line = "train.py, line 7: mean = total / 0"
    company[failing].abandon("ZeroDivisionError: division by zero", where=line)
    company.talk(without=())
    for name in NAMES:
        if name != failing:
            fault = company[name].fault
            assert isinstance(fault, PeerFailed), name
            assert (fault.peer, fault.reason) == (failing, "ZeroDivisionError: division by zero")
            assert str(fault).endswith(f"division by zero\n  on {failing}, at {line}"), name
    assert company[failing].fault is None


def test_who_fails_of_anothers_fault_does_not_say_so_again(company: Company) -> None:
    company["rank 2"].abandon("boom")
    company.talk()
    company["rank 1"].abandon("rank 2 failed: boom")
    company.pass_time(1)
    fault = company[HUB].fault
    assert isinstance(fault, PeerFailed)
    assert fault.peer == "rank 2"


def test_leaving_in_order_is_no_fault_and_brings_the_summary(company: Company) -> None:
    company["rank 1"].send(HUB, Leave(), [b"figures"])
    company.talk()
    company.pass_time(2 * SILENCE_S, without=("rank 1",))
    assert company[HUB].exit_barrier.summaries == {"rank 1": b"figures"}
    assert company[HUB].fault is None
    assert not company[HUB].dismissed


def test_the_hubs_leave_dismisses(company: Company) -> None:
    company["rank 2"].send("rank 1", Leave())
    company.talk()
    assert not company["rank 1"].dismissed
    company[HUB].send("rank 1", Leave())
    company.talk()
    assert company["rank 1"].dismissed
    company.pass_time(2 * SILENCE_S, without=(HUB,))
    assert company["rank 1"].fault is None, "the hub may be gone after its leave"


def test_only_the_hub_declares_others_lost(company: Company) -> None:
    company["rank 2"].send("rank 1", Fault("rank 0", None, 9.0))
    company[HUB].send("rank 1", Fault("rank 1", None, 9.0))
    company.talk()
    assert company["rank 1"].fault is None
    company[HUB].send("rank 1", Fault("rank 2", None, 9.0))
    company.talk()
    assert isinstance(company["rank 1"].fault, PeerLost)


# ---- waiting


def test_a_wait_that_holds_returns_at_once(company: Company) -> None:
    company[HUB].wait_until(lambda: True, what="nothing", limit_s=0)


def test_a_wait_raises_the_jobs_fault_rather_than_its_limit(company: Company) -> None:
    company[HUB].fail(PeerLost("rank 1", 6.0))
    with pytest.raises(PeerLost):
        company[HUB].wait_until(lambda: False, what="results", limit_s=1000)


def test_a_wait_names_the_workers_behind_and_only_those(company: Company) -> None:
    company[HUB].round = company["rank 1"].round = 4
    company["rank 2"].round = 3
    company.pass_time(3 * BEAT_S)
    for waiting in (HUB, "rank 1"):
        with pytest.raises(WaitLimit, match=r"for the results; missing: rank 2$") as raised:
            company[waiting].wait_until(lambda: False, what="the results", limit_s=0)
        assert raised.value.missing == ("rank 2",)
        assert raised.value.what == "the results"


def test_a_worker_that_finished_early_is_named_to_all(company: Company) -> None:
    company["rank 2"].send(HUB, Leave(round=3), [b"done"])
    company[HUB].round = company["rank 1"].round = 3
    company.pass_time(3 * BEAT_S)
    assert company[HUB].fault is None, "all have done as much"
    company[HUB].round = 4
    company.pass_time(3 * BEAT_S)
    for name in ("rank 0", "rank 1", "server 0"):
        with pytest.raises(PeerFailed, match=r"rank 2 failed: it has finished, .*number of steps"):
            company[name].check()
    with pytest.raises(PeerFailed, match="rank 2 has finished, but rank 0 still trains"):
        company["rank 2"].check()


def test_at_the_end_of_one_worker_those_that_wait_for_it_are_named(company: Company) -> None:
    company[HUB].round = company["rank 1"].round = company["rank 2"].round = 2
    check = company["rank 1"].heartbeat.check_end(steps=8)
    company.pass_time(3 * BEAT_S)
    check([HUB, "rank 2"])  # which make their last steps
    company["rank 2"].round = 3
    company.pass_time(3 * BEAT_S)
    check([HUB])
    with pytest.raises(RuntimeFault) as raised:
        check([HUB, "rank 2"])
    assert str(raised.value).startswith(
        "rank 1 has finished after 8 steps, and others still train and wait for it (rank 2): every "
        "worker must run the same number of steps; give all ranks the same number of batches"
    )


def test_a_wait_may_name_others(company: Company) -> None:
    with pytest.raises(WaitLimit, match="missing: server 3"):
        company[HUB].wait_until(
            lambda: False, what="the plan", limit_s=0, missing=lambda: ["server 3"]
        )
    with pytest.raises(WaitLimit, match="missing: unknown"):
        company[HUB].wait_until(lambda: False, what="it", limit_s=0, missing=list)


# ---- messages


def test_messages_that_do_not_fit_are_counted_and_the_last_is_quoted(company: Company) -> None:
    def refuse(message: Message) -> None:
        raise FrameRefused("no such chunk")

    company["rank 1"].on(Push, refuse)
    company["rank 2"].send("rank 1", Push(0, 0, 0, [], 0))
    company["rank 2"].send("rank 1", Echo(0))
    company.talk()
    assert company["rank 1"].refused == 2
    assert company["rank 1"].last_refusal == "rank 2: rank 1 takes no Echo"
    company[HUB].send("rank 1", Push(0, 0, 0, [], 0))
    company.talk()
    with pytest.raises(WaitLimit, match="last message refused here, from rank 0: no such chunk"):
        company["rank 1"].wait_until(lambda: False, what="results", limit_s=0)
    assert company["rank 1"].fault is None


def test_the_hub_keeps_no_account_of_strangers(company: Company) -> None:
    company.network.post("x", HUB, encode_header("nobody", Beat({"nobody": 3})), (), 0)
    company.talk()
    assert company[HUB].refused == 1
    assert "nobody" not in company[HUB].roster.rounds


def test_what_cannot_even_be_read_stops_nobody(company: Company) -> None:
    company.network.post("rank 2", HUB, b"\xc1garbage", (), 0)
    company.network.post("rank 2", HUB, encode_header("rank 2", Leave("boom")), (), 0)
    company.talk()
    assert isinstance(company[HUB].fault, PeerFailed)
    assert company.network.endpoint(HUB).refused == {"FrameRefused": 1}


def test_a_message_to_oneself_needs_no_ticket(company: Company) -> None:
    seen: list[Message] = []
    company[HUB].on(Echo, seen.append)
    assert company[HUB].send(HUB, Echo(3), [b"frame"]) is None
    assert seen == [], "it waits for the pump, like any other"
    company[HUB].pump_once(0)
    assert seen == [Message(HUB, Echo(3), [b"frame"])]


def test_ticks_come_once_a_beat(company: Company) -> None:
    calls: list[float] = []
    company[HUB].on_tick(lambda: calls.append(company.clock.now))
    company.talk()
    company.pass_time(2)
    assert len(calls) == 5


def test_an_error_on_the_network_thread_becomes_the_jobs_fault(company: Company) -> None:
    def broken(message: Message) -> None:
        raise IndexError("oops")

    company[HUB].on(Echo, broken)
    company["rank 1"].send(HUB, Echo(0))
    company[HUB].run()
    with pytest.raises(RuntimeFault, match="network thread failed: IndexError: oops"):
        company[HUB].check()


def test_who_is_reported_hears_why(company: Company) -> None:
    company["rank 1"].report("rank 2", "its gradient was refused")
    company.talk()
    assert isinstance(company[HUB].fault, PeerFailed)
    assert company[HUB].fault.peer == "rank 2"
    assert str(company["rank 2"].fault) == "rank 2: its gradient was refused"
    assert not isinstance(company["rank 2"].fault, PeerFailed), "it is the one that failed"


def test_only_rank_0_says_who_has_failed(company: Company) -> None:
    company["rank 1"].send("rank 2", Fault("rank 2", "made up", 0.0))
    company["rank 1"].send("rank 2", Fault(HUB, "made up", 0.0))
    company.talk()
    assert company["rank 2"].fault is None
    assert company["rank 2"].refused == 2
