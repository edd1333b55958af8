"""Who is silent, who is lost and who is behind, from times and links that are passed in."""

import pytest

from slipstream.runtime.members.failure_detector import SILENCE_FACTOR_IF_LINK_ALIVE, Roster


def test_only_who_is_expected_can_be_silent() -> None:
    roster = Roster(silence_s=5)
    roster.expect("rank 1", now=10)
    roster.heard_from("stranger", now=10)
    assert roster.silent(now=15) == []
    assert roster.silent(now=15.5) == [("rank 1", 5.5)]
    roster.heard_from("rank 1", now=15.5)
    assert roster.silent(now=20.5) == []


def test_expecting_again_does_not_excuse_a_silence() -> None:
    roster = Roster(silence_s=5)
    roster.expect("rank 1", now=0)
    roster.expect("rank 1", now=4)
    assert roster.silent(now=6) == [("rank 1", 6)]


def test_who_has_left_is_not_missed_and_not_expected_again() -> None:
    roster = Roster(silence_s=5)
    roster.expect("rank 1", now=0)
    roster.leave("rank 1")
    roster.expect("rank 1", now=1)
    assert roster.silent(now=100) == []


def test_those_behind_are_named_in_order() -> None:
    roster = Roster(silence_s=5)
    roster.rounds = {"rank 2": 3, "rank 1": 4, "rank 0": 3}
    assert roster.behind(4) == ["rank 0", "rank 2"]
    assert roster.behind(3) == []


def test_a_silent_member_whose_link_answers_is_given_longer() -> None:
    roster = Roster(silence_s=5)
    roster.expect("rank 1", now=0)
    longest_s = 5 * SILENCE_FACTOR_IF_LINK_ALIVE
    assert roster.lost(now=5, link_alive=lambda name: False) == []
    assert roster.lost(now=6, link_alive=lambda name: False) == [("rank 1", 6)]
    assert roster.lost(now=longest_s, link_alive=lambda name: True) == []
    over = longest_s + 1
    assert roster.lost(now=over, link_alive=lambda name: True) == [("rank 1", over)]


def test_workers_may_be_given_longer_than_servers() -> None:
    roster = Roster(silence_s=5)
    roster.worker_silence_s = 50
    for name in ("rank 1", "server 0"):
        roster.expect(name, now=0)
    assert roster.silent(now=6) == [("server 0", 6)]
    assert roster.silent(now=51) == [("rank 1", 51), ("server 0", 51)]


def test_a_worker_whose_link_is_refused_is_dead_at_once_and_a_server_is_not() -> None:
    roster = Roster(silence_s=5)
    for name in ("rank 1", "rank 2", "server 0"):
        roster.expect(name, now=0)
    refused = {"rank 2", "server 0"}
    assert roster.dead_workers(now=1, link_refused=refused.__contains__) == [("rank 2", 1)]


def test_one_that_returned_may_be_expected_again() -> None:
    roster = Roster(silence_s=5)
    roster.expect("rank 1", now=0)
    roster.leave("rank 1")
    roster.returned("rank 1")
    roster.expect("rank 1", now=10)
    assert roster.silent(now=16) == [("rank 1", 6)]


@pytest.mark.parametrize("lockstep", [True, False])
def test_only_in_lockstep_must_workers_be_at_the_same_round(lockstep: bool) -> None:
    roster = Roster(silence_s=5)
    roster.lockstep, roster.round = lockstep, 4
    roster.rounds = {"rank 1": 5, "rank 2": 4}
    roster.finished = {"rank 3": 3, "rank 4": 4}
    assert roster.ahead(4) == (["rank 1"] if lockstep else [])
    assert roster.finished_early() == (["rank 3"] if lockstep else [])
