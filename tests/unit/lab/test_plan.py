"""The lab's plan: names, addresses, buckets and commands, without root."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import LaunchError
from slipstream.lab import Lab
from slipstream.lab.plan import MOST_HOSTS, build, counters, plan, rate_per_host, shape
from slipstream.lab.removal import lab_of
from slipstream.lab.shaping import SUPER_PACKET_NBYTES, bits_per_second, bucket

tags = st.integers(0, 0xFFFFFF).map("{:06x}".format)
LONGEST_INTERFACE_NAME = 15


@pytest.mark.parametrize(
    ("text", "bps"),
    [("200mbit", 2e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("800kbit", 8e5), (1_000_000, 1e6)],
)
def test_rates_are_read_as_tc_writes_them(text: str | int, bps: float) -> None:
    assert bits_per_second(text) == bps


@pytest.mark.parametrize("rate", ["fast", "200", "200mbps", "-1gbit", "", 0, "1bit", "1000gbit"])
def test_a_rate_that_makes_no_sense_is_refused(rate: str | int) -> None:
    with pytest.raises(LaunchError):
        bits_per_second(rate)


@given(st.floats(1e5, 1e11))
def test_a_bucket_takes_super_packets_whole_and_the_queue_more_than_the_bucket(bps: float) -> None:
    shaped = bucket(bps)
    assert shaped.burst_nbytes > SUPER_PACKET_NBYTES
    assert shaped.limit_nbytes > shaped.burst_nbytes


def test_fast_links_get_deeper_buckets_and_queues() -> None:
    assert bucket("2gbit").burst_nbytes == 500_000
    assert bucket("2gbit").limit_nbytes == 12_500_000


@given(tag=tags, hosts=st.integers(1, MOST_HOSTS))
def test_names_are_short_unique_and_found_again(tag: str, hosts: int) -> None:
    lab = plan(tag, ("1gbit",) * hosts)
    interfaces = [lab.bridge, *(name for s in lab.sites for name in (s.interface, s.port))]
    assert len(set(interfaces)) == len(interfaces)
    assert max(map(len, interfaces)) <= LONGEST_INTERFACE_NAME
    assert len(set(lab.namespaces)) == hosts + 1
    assert {lab_of(name) for name in lab.namespaces} == {lab.name}


@given(tag=tags, hosts=st.integers(1, MOST_HOSTS))
def test_addresses_are_hosts_of_one_private_subnet(tag: str, hosts: int) -> None:
    addresses = [ipaddress.ip_address(s.address) for s in plan(tag, (None,) * hosts).sites]
    subnet = ipaddress.ip_network(f"{addresses[0]}/24", strict=False)
    assert subnet.is_private
    assert len(set(addresses)) == hosts
    assert set(addresses) <= set(subnet.hosts())


def test_two_labs_share_no_name() -> None:
    one, other = plan("00aa01", (None,) * 3), plan("00aa02", (None,) * 3)
    assert not {one.bridge, *one.namespaces} & {other.bridge, *other.namespaces}


@pytest.mark.parametrize("name", ["slip12345-sw", "slip1234567-sw", "slip12345g-h0", "slipway", ""])
def test_other_peoples_namespaces_are_left_alone(name: str) -> None:
    assert lab_of(name) is None


def test_every_command_works_inside_the_labs_own_namespaces() -> None:
    lab = plan("c0ffee", ("200mbit",) * 3)
    for command in build(lab, congestion="reno"):
        assert command[:3] == ("ip", "netns", "add") or set(command) & set(lab.namespaces)


def test_the_first_command_claims_the_name() -> None:
    first, *_ = build(plan("c0ffee", (None,)), congestion=None)
    assert first == ("ip", "netns", "add", "slipc0ffee-sw")


def test_a_link_is_shaped_out_of_the_host_and_towards_it() -> None:
    lab = plan("c0ffee", (None, "100mbit"))
    tbf = "tbf rate 100000000bit burst 131072b limit 1048576b"
    assert [" ".join(command) for command in shape(lab, 1, "100mbit")] == [
        f"tc -n slipc0ffee-h1 qdisc replace dev slipc0ffee-e1 root {tbf}",
        f"tc -n slipc0ffee-sw qdisc replace dev slipc0ffee-p1 root {tbf}",
    ]
    shaping = [command for command in build(lab, congestion=None) if command[0] == "tc"]
    assert shaping == list(shape(lab, 1, "100mbit"))


def test_a_rate_of_none_takes_the_shaping_away() -> None:
    lab = plan("c0ffee", ("1gbit",))
    assert all(command[-1] == "noqueue" for command in shape(lab, 0, None))


def test_counters_are_read_at_the_switch() -> None:
    assert "slipc0ffee-sw" in counters(plan("c0ffee", (None,)))


def test_one_rate_serves_all_hosts_and_a_sequence_one_each() -> None:
    assert rate_per_host(3, "1gbit") == ("1gbit",) * 3
    assert rate_per_host(2, ["1gbit", None]) == ("1gbit", None)
    with pytest.raises(LaunchError, match="2 rates for 3 hosts"):
        rate_per_host(3, ["1gbit", "2gbit"])


@pytest.mark.parametrize("hosts", [0, MOST_HOSTS + 1])
def test_a_lab_of_a_size_that_cannot_be_is_refused(hosts: int) -> None:
    with pytest.raises(LaunchError, match="hosts"):
        Lab(hosts=hosts, rate=None)


def test_a_bad_rate_is_refused_before_anything_is_made() -> None:
    with pytest.raises(LaunchError, match="200mbps"):
        Lab(hosts=2, rate="200mbps")
