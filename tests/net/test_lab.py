"""The lab against the kernel: links carry what their rate says, and nothing stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from slipstream.apps.lab import Lab, bits_per_second, existing, find, remove, why_unavailable
from slipstream.errors import LaunchError

pytestmark = [
    pytest.mark.net,
    pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable())),
]

BLASTER = [sys.executable, "-I", "-S", str(Path(__file__).with_name("blaster.py"))]
LIMIT_S = 60.0

# TCP's payload gets 95.6% of a link, and a full bucket a little on top.
LEAST, MOST = 0.85, 1.02
# A link never carries more than its rate; it carries less whenever the machine is busy with other
# things, so the least is asked of the best of a few attempts.
ATTEMPTS = 5


@dataclass(frozen=True)
class Flow:
    nbytes: int
    begun_s: float
    last_s: float


def transfer(lab: Lab, senders: Sequence[int], receiver: int, nbytes: int) -> Callable[[], list]:
    """Start one transfer per sender; the result waits for them and says when the bytes came."""
    port = 7000 + receiver
    into = lab.hosts[receiver].popen(
        [*BLASTER, "receive", str(port), str(len(senders))], stdout=subprocess.PIPE
    )
    assert into.stdout is not None
    assert into.stdout.readline() == "ready\n"
    address = lab.hosts[receiver].address
    out = [
        lab.hosts[sender].popen([*BLASTER, "send", address, str(port), str(nbytes)])
        for sender in senders
    ]

    def finish() -> list[Flow]:
        printed, _ = into.communicate(timeout=LIMIT_S)
        assert [process.wait(timeout=LIMIT_S) for process in out] == [0] * len(out)
        fields = [line.split() for line in printed.splitlines()]
        return [Flow(int(n), float(begun), float(last)) for n, begun, last in fields]

    return finish


def share(flows: Sequence[Flow], rate: str) -> float:
    """Of the rate, what these flows had together."""
    seconds = max(flow.last_s for flow in flows) - min(flow.begun_s for flow in flows)
    return sum(flow.nbytes for flow in flows) * 8 / seconds / bits_per_second(rate)


def assert_full(rate: str, start: Callable[[], Sequence[Callable[[], list[Flow]]]]) -> None:
    """The transfers that start together fill links of this rate, each its own, and no more."""
    for _ in range(ATTEMPTS):
        shares = [share(finish(), rate) for finish in start()]
        assert max(shares) < MOST
        if min(shares) > LEAST:
            return
    pytest.fail(f"in {ATTEMPTS} attempts a link of {rate} was never full; the last: {shares}")


def nbytes_for(rate: str, seconds: float) -> int:
    return int(bits_per_second(rate) / 8 * seconds)


@pytest.fixture(scope="module", params=["100mbit", "200mbit", "1gbit", "2gbit"])
def shaped(request: pytest.FixtureRequest) -> Iterator[tuple[Lab, str]]:
    with Lab(hosts=4, rate=request.param) as lab:
        yield lab, request.param


def test_one_transfer_gets_the_rate(shaped: tuple[Lab, str]) -> None:
    lab, rate = shaped
    assert_full(rate, lambda: [transfer(lab, [0], 1, nbytes_for(rate, 1.0))])


def test_four_at_once_get_the_rate_each(shaped: tuple[Lab, str]) -> None:
    lab, rate = shaped
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert_full(rate, lambda: [transfer(lab, [a], b, nbytes_for(rate, 1.0)) for a, b in pairs])


def test_three_senders_to_one_host_share_its_link(shaped: tuple[Lab, str]) -> None:
    lab, rate = shaped
    assert_full(rate, lambda: [transfer(lab, [1, 2, 3], 0, nbytes_for(rate, 0.4))])


def test_the_kernels_counters_show_what_was_sent() -> None:
    nbytes = 20_000_000
    with Lab(hosts=3, rate="1gbit") as lab:
        before = lab.bytes()
        transfer(lab, [0], 2, nbytes)()
        sender, idle, receiver = (b - a for a, b in zip(before, lab.bytes(), strict=True))
    assert nbytes < sender.sent < 1.05 * nbytes
    assert nbytes < receiver.received < 1.05 * nbytes
    assert max(sender.received, receiver.sent) < 0.05 * nbytes  # acknowledgements
    assert max(idle.sent, idle.received) < 10_000


def test_rates_differ_per_host_and_change_while_running() -> None:
    with Lab(hosts=3, rate=["100mbit", "400mbit", None]) as lab:
        assert_full("100mbit", lambda: [transfer(lab, [1], 0, 6_000_000)])
        assert_full("400mbit", lambda: [transfer(lab, [2], 1, 24_000_000)])
        lab.set_rate(0, "400mbit")
        assert lab.rates == (4e8, 4e8, None)
        assert_full("400mbit", lambda: [transfer(lab, [1], 0, 24_000_000)])
        lab.set_rate(0, None)
        lab.set_rate(1, None)
        unshaped = (share(transfer(lab, [1], 0, 50_000_000)(), "400mbit") for _ in range(ATTEMPTS))
        assert any(found > 2 for found in unshaped)


def test_racks_share_their_cable_to_the_core() -> None:
    with Lab(hosts=4, rate="400mbit", racks=2, core_rate="100mbit") as lab:
        assert [host.rack for host in lab.hosts] == [0, 0, 1, 1]
        assert lab.core_rate == 1e8

        def share_within() -> float:
            """Of the cable's rate, what two of a rack have while others use the cable."""
            within = transfer(lab, [0], 1, 24_000_000)
            before = lab.core_bytes()
            transfer(lab, [2, 3], 0, 3_000_000)()
            into, out = (b - a for a, b in zip(before, lab.core_bytes(), strict=True))
            assert 6_000_000 < into.received < 6_600_000
            assert 6_000_000 < out.sent < 6_600_000
            return share(within(), "100mbit")

        # It does not pass the cable; a busy machine may hold it up as much.
        assert any(share_within() > 1.0 for _ in range(ATTEMPTS))
        assert_full("100mbit", lambda: [transfer(lab, [2, 3], 0, 3_000_000)])
        lab.set_core_rate("400mbit")
        assert_full("400mbit", lambda: [transfer(lab, [3], 1, 24_000_000)])


def test_somebody_elses_traffic_takes_what_it_is_given() -> None:
    with Lab(hosts=3, rate="100mbit") as lab, lab.traffic(1, 0, "60mbit") as sender:

        def left_for_another() -> float:
            before = lab.bytes()
            flows = transfer(lab, [2], 0, 4_000_000)()
            moved = [b - a for a, b in zip(before, lab.bytes(), strict=True)]
            # A busy machine may hold the traffic up, which then takes less than it is given.
            return share(flows, "100mbit") if moved[1].sent > 2_000_000 else 1.0

        found = (left_for_another() for _ in range(ATTEMPTS))
        assert any(share_left < 0.65 for share_left in found)  # alone it would get 0.95
        assert sender.poll() is None
    assert sender.returncode == -signal.SIGTERM


def test_a_pulled_cable_stops_a_transfer_and_plugged_in_it_goes_on() -> None:
    # So slow a link that the transfer is under way for as long as a busy machine may need.
    with Lab(hosts=2, rate="10mbit") as lab:
        nbytes = 60_000_000
        finish = transfer(lab, [0], 1, nbytes)
        wait_until(lambda: lab.bytes()[1].received > 100_000, "the transfer to begin")
        lab.set_link(1, up=False)
        assert lab.links_up() == (True, False)
        time.sleep(0.2)  # for what the kernel has taken in and not counted yet
        still = lab.bytes()[1].received
        assert still < nbytes
        time.sleep(0.5)
        assert lab.bytes()[1].received == still
        lab.set_rate(0, None)
        lab.set_rate(1, None)
        lab.set_link(1, up=True)
        assert sum(flow.nbytes for flow in finish()) == nbytes


def test_a_frozen_host_does_nothing_until_it_thaws() -> None:
    counting = "import time\nwhile True: print(flush=True); time.sleep(0.01)"
    with Lab(hosts=1, rate=None) as lab:
        process = lab.hosts[0].popen([sys.executable, "-c", counting], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        lab.freeze(0)
        # A busy kernel stops it a moment later.
        wait_until(lambda: state_of(process.pid) == "T", "the process to be stopped")
        lab.thaw(0)
        for _ in range(200):
            process.stdout.readline()
        process.kill()
        process.stdout.close()


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S:.0f} s for {what}"
        time.sleep(0.01)


def state_of(pid: int) -> str:
    """One letter, as the kernel says it: T for stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def has_netem() -> bool:
    try:
        with Lab(hosts=1, rate=None, delay_ms=1):
            return True
    except LaunchError:
        return False


def test_delay_is_there_or_refused_with_the_reason() -> None:
    lab = Lab(hosts=2, rate="100mbit", delay_ms=30)
    if has_netem():
        with lab:
            begun = time.monotonic()
            transfer(lab, [0], 1, 1)()
            assert time.monotonic() - begun > 0.06
    else:
        with pytest.raises(LaunchError, match="no netem"), lab:
            pass
    assert lab.name not in existing()


def test_a_kept_lab_is_found_again_and_removed_by_name() -> None:
    kept = Lab(hosts=4, rate=["100mbit", None, "1gbit", "1gbit"], racks=2).keep()
    try:
        found = find(kept.name)
        assert found.rates == (1e8, None, 1e9, 1e9)
        assert found.core_rate is None
        assert [(host.address, host.rack) for host in found.hosts] == [
            (host.address, host.rack) for host in kept.hosts
        ]
        with pytest.raises(LaunchError, match="no lab 'slip000000'"):
            find("slip000000")
    finally:
        remove(kept.name)
    assert kept.name not in existing()


def test_two_labs_do_not_meet() -> None:
    with Lab(hosts=2, rate=None) as one, Lab(hosts=2, rate=None) as other:
        assert {host.name for host in one.hosts}.isdisjoint(host.name for host in other.hosts)
        outside = other.hosts[0].popen(
            [*BLASTER, "send", one.hosts[0].address, "7000", "1"], stderr=subprocess.PIPE
        )
        _, said = outside.communicate(timeout=LIMIT_S)
        assert outside.returncode != 0
        assert "unreachable" in said


def test_nothing_appears_in_the_root_namespace() -> None:
    with Lab(hosts=2) as lab:
        assert lab.name in existing()
        assert not [name for name in os.listdir("/sys/class/net") if lab.name in name]


def test_the_environment_is_added_to() -> None:
    program = "import os; print(os.environ['GIVEN'], 'PATH' in os.environ)"
    with Lab(hosts=1, rate=None) as lab:
        process = lab.hosts[0].popen(
            [sys.executable, "-c", program], env={"GIVEN": "yes"}, stdout=subprocess.PIPE
        )
        assert process.communicate(timeout=LIMIT_S)[0] == "yes True\n"


def test_the_end_takes_lab_and_processes_away() -> None:
    with Lab(hosts=2) as lab:
        sleeper = lab.hosts[1].popen(["sleep", "1000"])
        wait_until(lambda: sleeper.pid in lab.hosts[1].pids(), "the process to be in its namespace")
    assert sleeper.returncode == -signal.SIGTERM
    assert lab.name not in existing()


def test_an_exception_takes_the_lab_away() -> None:
    with pytest.raises(RuntimeError, match="on purpose"), Lab(hosts=2) as lab:
        raise RuntimeError("on purpose")
    assert lab.name not in existing()


def test_a_lab_that_cannot_be_made_leaves_nothing() -> None:
    lab = Lab(hosts=2, congestion="no-such-algorithm")
    with pytest.raises(LaunchError, match="no-such-algorithm"), lab:
        pass
    assert lab.name not in existing()


def test_a_lab_cannot_be_entered_twice() -> None:
    with Lab(hosts=1) as lab:
        with pytest.raises(LaunchError, match="already"), lab:
            pass
        assert lab.name in existing()


MAKER = """
import os, subprocess, sys, time
from slipstream.apps.lab import Lab
with Lab(hosts=2) as lab:
    if os.fork() == 0:  # holds a copy of every pipe, in the root namespace
        time.sleep(5)
        os._exit(0)
    inside = lab.hosts[0].popen(["sleep", "1000"])
    print(lab.name, inside.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_the_lab_goes_with_its_maker(number: signal.Signals) -> None:
    maker = subprocess.Popen(
        [sys.executable, "-c", MAKER],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert maker.stdout is not None
    name, inside = maker.stdout.readline().split()
    assert name in existing()
    maker.send_signal(number)
    maker.wait(timeout=LIMIT_S)
    maker.stdout.close()
    wait_until(lambda: name not in existing(), "the lab to go")
    wait_until(lambda: not Path("/proc", inside).exists(), "what ran in it to go")


def test_leftovers_are_found_by_name() -> None:
    subprocess.run(["ip", "netns", "add", "slip00beef-sw"], check=True)
    subprocess.run(["ip", "netns", "add", "slip00beef-h0"], check=True)
    assert "slip00beef" in existing()
    remove("slip00beef")
    assert "slip00beef" not in existing()
    remove("slip00beef")
