import math
import signal
from collections.abc import Sequence

import pytest

from slipstream.errors import EXIT_PEER_FAILED
from slipstream.runtime.launch.supervision import (
    JOB,
    CameBack,
    Ended,
    Limits,
    Signalled,
    Supervision,
    Verdict,
)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def watch(clock: Clock) -> Supervision:
    supervision = Supervision(Limits(grace_s=8, term_s=3, kill_s=5), clock)
    for rank in range(3):
        supervision.started(f"rank {rank}")
    return supervision


def test_all_well_is_zero_and_silent(watch: Supervision) -> None:
    for rank in (2, 0, 1):
        assert watch.take(Ended(f"rank {rank}", 0)) is None
    assert not watch.running
    assert watch.deadline == math.inf
    assert watch.verdict() == Verdict(0)


def test_failure_gives_the_rest_grace_then_presses_harder(watch: Supervision, clock: Clock) -> None:
    assert watch.take(Ended("rank 2", 1)) is None
    assert watch.deadline == 8
    clock.now = 8
    assert watch.escalate() is signal.SIGTERM
    assert watch.deadline == 11
    clock.now = 11
    assert watch.escalate() is signal.SIGKILL
    assert watch.deadline == 16
    watch.take(Ended("rank 0", -9))
    watch.take(Ended("rank 1", -9))
    assert watch.verdict() == Verdict(1, "rank 2 exited with code 1; the other ranks were stopped")


def test_a_second_failure_does_not_prolong_the_grace(watch: Supervision, clock: Clock) -> None:
    watch.take(Ended("rank 2", 1))
    clock.now = 5
    watch.take(Ended("rank 1", 1))
    assert watch.deadline == 8


def test_a_process_that_cannot_be_killed_does_not_hold_the_launcher(watch: Supervision) -> None:
    watch.take(Ended("rank 2", 1))
    assert [watch.escalate(), watch.escalate(), watch.escalate()] == [
        signal.SIGTERM,
        signal.SIGKILL,
        None,
    ]
    assert not watch.running


def test_ctrl_c_interrupts_first_and_a_second_one_kills(watch: Supervision) -> None:
    assert watch.take(Signalled(signal.SIGINT)) is signal.SIGINT
    assert watch.deadline == watch.limits.interrupt_s
    assert watch.take(Signalled(signal.SIGINT)) is signal.SIGKILL
    assert watch.verdict() == Verdict(130, "stopped by Ctrl-C")


def test_who_does_not_end_when_interrupted_is_terminated_then_killed(watch: Supervision) -> None:
    signals = [watch.take(Signalled(signal.SIGINT)), *(watch.escalate() for _ in range(3))]
    assert signals == [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None]
    assert not watch.running


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_terminate_first(watch: Supervision, signum: signal.Signals) -> None:
    assert watch.take(Signalled(signum)) is signal.SIGTERM
    assert watch.take(Signalled(signum)) is signal.SIGKILL


def test_ctrl_c_after_a_failure_does_not_begin_again(watch: Supervision) -> None:
    watch.take(Ended("rank 2", 1))
    assert watch.escalate() is signal.SIGTERM
    assert watch.take(Signalled(signal.SIGINT)) is signal.SIGKILL


def test_workers_ended_by_our_own_signal_are_no_failures(watch: Supervision) -> None:
    watch.take(Signalled(signal.SIGTERM))
    for rank in range(3):
        watch.take(Ended(f"rank {rank}", -15))
    assert watch.verdict() == Verdict(143, "stopped by SIGTERM")


def test_the_one_that_failed_is_named_even_if_it_goes_last(watch: Supervision) -> None:
    watch.take(Ended("rank 0", EXIT_PEER_FAILED))
    watch.take(Ended("rank 1", EXIT_PEER_FAILED))
    watch.take(Ended("rank 2", -11))
    assert watch.verdict() == Verdict(
        139, "rank 2 was killed by SIGSEGV; the other ranks ended with it"
    )


def test_nobody_is_blamed_if_each_has_ended_because_of_the_others(watch: Supervision) -> None:
    for rank in (1, 0):
        watch.take(Ended(f"rank {rank}", EXIT_PEER_FAILED))
    watch.take(Ended("rank 2", 0))
    verdict = Verdict(EXIT_PEER_FAILED, "rank 0, rank 1 ended with the error above")
    assert watch.verdict() == verdict


@pytest.mark.parametrize(
    ("ranks", "named"), [((10, 9, 2), "rank 2, rank 9, rank 10"), (range(64), "64 ranks")]
)
def test_many_ranks_are_counted(ranks: Sequence[int], named: str) -> None:
    job = Supervision(Limits(), clock=lambda: 0.0)
    for rank in ranks:
        job.started(f"rank {rank}")
    for rank in ranks:
        job.take(Ended(f"rank {rank}", EXIT_PEER_FAILED))
    assert job.verdict().line == f"{named} ended with the error above"


def test_a_launcher_that_gives_up_is_the_cause(watch: Supervision) -> None:
    watch.take(Ended(JOB, 1))
    assert watch.escalate() is signal.SIGTERM
    assert watch.verdict() == Verdict(1, "the job could not go on; the ranks were stopped")


def test_a_server_that_breaks_fails_the_job(watch: Supervision) -> None:
    watch.take(Ended("server 0", 1))
    for rank in range(3):
        watch.take(Ended(f"rank {rank}", EXIT_PEER_FAILED))
    assert watch.verdict() == Verdict(1, "server 0 exited with code 1; the ranks ended with it")


def test_a_dismissed_server_is_no_failure(watch: Supervision) -> None:
    watch.take(Ended("server 0", 0))
    for rank in range(3):
        watch.take(Ended(f"rank {rank}", 0))
    assert watch.verdict() == Verdict(0)


def test_a_server_that_follows_a_failing_rank_is_not_blamed(watch: Supervision) -> None:
    watch.take(Ended("server 0", 1))
    watch.take(Ended("rank 0", EXIT_PEER_FAILED))
    watch.take(Ended("rank 1", 3))
    watch.take(Ended("rank 2", EXIT_PEER_FAILED))
    assert watch.verdict() == Verdict(3, "rank 1 exited with code 3; the other ranks ended with it")


def test_ranks_that_finished_before_a_failure_are_not_mentioned(watch: Supervision) -> None:
    watch.take(Ended("rank 0", 0))
    watch.take(Ended("rank 1", 0))
    watch.take(Ended("rank 2", 7))
    assert watch.verdict() == Verdict(7, "rank 2 exited with code 7")


def test_signals_without_a_name_are_numbered() -> None:
    assert str(Ended("rank 0", -40)) == "rank 0 was killed by signal 40"


def test_a_worker_that_hangs_is_named_rather_than_those_that_gave_up_on_it() -> None:
    job = Supervision(Limits(), clock=lambda: 0.0)
    for rank in range(3):
        job.started(f"rank {rank}")
    job.take(Ended("rank 2", EXIT_PEER_FAILED))
    job.take(Ended("rank 0", EXIT_PEER_FAILED))
    job.escalate()
    job.take(Ended("rank 1", -signal.SIGTERM))
    verdict = job.verdict()
    assert verdict.code == EXIT_PEER_FAILED
    assert verdict.line.startswith("rank 1 hung")


def sparing(clock: Clock, may_lose: int) -> Supervision:
    supervision = Supervision(Limits(), clock, may_lose)
    for rank in range(4):
        supervision.started(f"rank {rank}")
    return supervision


@pytest.mark.parametrize("code", [-9, EXIT_PEER_FAILED])
def test_a_worker_that_may_be_lost_is(clock: Clock, code: int) -> None:
    watch = sparing(clock, 1)
    assert watch.take(Ended("rank 2", code)) is None
    assert watch.deadline == math.inf
    assert not watch.ending
    assert [ended.member for ended in watch.lost] == ["rank 2"]
    for rank in (0, 1, 3):
        watch.take(Ended(f"rank {rank}", 0))
    assert watch.verdict() == Verdict(0)


@pytest.mark.parametrize(
    ("may_lose", "ends"),
    [
        (0, [Ended("rank 2", -9)]),
        (1, [Ended("rank 2", -9), Ended("rank 3", -9)]),
        (2, [Ended("rank 0", -9)]),
        (2, [Ended("rank 2", 1)]),  # an error of its own, of which it has told the others
        (2, [Ended("server 0", -9)]),
    ],
)
def test_more_than_may_be_lost_ends_the_job(clock: Clock, may_lose: int, ends: list[Ended]) -> None:
    watch = sparing(clock, may_lose)
    for ended in ends:
        watch.take(ended)
    assert watch.deadline < math.inf
    assert watch.verdict().code
    assert ends[-1].member in watch.verdict().line


def test_code_0_in_the_middle_of_the_job_is_a_failure(clock: Clock) -> None:
    watch = sparing(clock, 2)
    watch.restarts = 2
    watch.take(Ended("rank 2", 0, "inside"))
    assert watch.deadline < math.inf
    assert watch.running == {"rank 0", "rank 1", "rank 3"}  # it is an error of its own
    for rank in (0, 1, 3):
        watch.take(Ended(f"rank {rank}", EXIT_PEER_FAILED))
    assert watch.verdict() == Verdict(
        1,
        "rank 2 exited with code 0 before it had left the job (the end of its `with` block); "
        "the other ranks ended with it",
    )


def test_workers_that_never_joined_may_end_as_they_like(watch: Supervision) -> None:
    for rank in range(3):
        watch.take(Ended(f"rank {rank}", 0, "outside"))
    assert watch.verdict() == Verdict(0)


def restarting(clock: Clock, restarts: int) -> Supervision:
    watch = sparing(clock, 0)
    watch.restarts = restarts
    return watch


def test_a_worker_that_was_killed_is_started_again_so_often(clock: Clock) -> None:
    watch = restarting(clock, 2)
    for _ in range(2):
        watch.take(Ended("rank 2", -9))
        assert not watch.ending
        watch.started("rank 2")
    assert [ended.member for ended in watch.replaced] == ["rank 2", "rank 2"]
    watch.take(Ended("rank 2", -9))
    assert watch.ending


@pytest.mark.parametrize(
    "ended", [Ended("rank 0", -9), Ended("rank 2", 1), Ended("rank 2", EXIT_PEER_FAILED)]
)
def test_who_leads_or_fails_by_itself_is_not_started_again(clock: Clock, ended: Ended) -> None:
    watch = restarting(clock, 2)
    watch.take(ended)
    assert watch.ending
    assert not watch.replaced


def test_who_comes_back_after_the_end_does_not_spoil_it(clock: Clock) -> None:
    watch = restarting(clock, 1)
    watch.take(Ended("rank 2", -9))
    watch.started("rank 2")
    for rank in (1, 3, 0):
        watch.take(Ended(f"rank {rank}", 0))
    assert watch.deadline < math.inf
    assert watch.escalate() == signal.SIGTERM
    assert watch.to_signal == {"rank 2"}
    watch.take(Ended("rank 2", -signal.SIGTERM))
    assert not watch.running
    assert watch.verdict() == Verdict(0)


def test_who_is_back_may_take_its_time_at_the_end_and_may_fail(clock: Clock) -> None:
    watch = restarting(clock, 1)
    watch.take(Ended("rank 2", -9))
    watch.started("rank 2")
    watch.take(CameBack("rank 2"))
    for rank in (1, 3, 0):
        watch.take(Ended(f"rank {rank}", 0))
    assert watch.deadline == math.inf
    assert watch.to_signal == set()
    watch.take(Ended("rank 2", 3))
    assert watch.verdict().code == 3


def test_who_was_never_away_may_take_its_time_at_the_end(clock: Clock) -> None:
    watch = restarting(clock, 1)
    watch.take(Ended("rank 2", -9))
    watch.started("rank 2")
    watch.take(Ended("rank 0", 0))
    assert watch.to_signal == {"rank 2"}
    watch.take(Ended("rank 2", 0))
    assert watch.deadline == math.inf
    assert watch.running == {"rank 1", "rank 3"}
    watch.take(Ended("rank 3", 7))
    assert watch.ending


def test_nobody_is_started_again_when_rank_0_has_ended(clock: Clock) -> None:
    watch = restarting(clock, 1)
    watch.take(Ended("rank 0", 0))
    watch.take(Ended("rank 1", -9))
    assert not watch.replaced
    assert watch.ending


def test_who_finds_that_the_others_have_finished_is_lost(clock: Clock) -> None:
    watch = restarting(clock, 1)
    watch.take(Ended("rank 2", -9))
    watch.started("rank 2")
    watch.take(Ended("rank 2", EXIT_PEER_FAILED))
    assert not watch.ending


def test_the_last_one_is_never_spared(clock: Clock) -> None:
    """However many may be lost: nobody would be left to finish the job."""
    watch = Supervision(Limits(), clock, may_lose=5, leader=None)
    for rank in range(2):
        watch.started(f"rank {rank}")
    watch.started("the server")
    watch.take(Ended("rank 1", -9))
    assert watch.verdict() == Verdict(0)
    watch.take(Ended("rank 0", -9))
    watch.take(Ended("the server", 0))
    assert watch.verdict().code == 128 + 9
