"""The lab's plan: names, addresses, buckets and commands, without root."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.lab import Lab
from slipstream.apps.lab.plan import (
    MOST_HOSTS,
    Command,
    Plan,
    build,
    counters,
    new_rate,
    plan,
    rate_per_host,
    set_link,
    shape,
)
from slipstream.apps.lab.removal import lab_of
from slipstream.apps.lab.shaping import SUPER_PACKET_NBYTES, Rate, Trouble, bits_per_second, bucket
from slipstream.errors import ConfigError, LaunchError

names = st.integers(0, 0xFFFFFF).map("slip{:06x}".format)
LONGEST_INTERFACE_NAME = 15


@pytest.mark.parametrize(
    ("text", "bps"),
    [("200mbit", 2e8), ("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("800kbit", 8e5), (1_000_000, 1e6)],
)
def test_rates_are_read_as_tc_writes_them(text: str | int, bps: float) -> None:
    assert bits_per_second(text) == bps


@pytest.mark.parametrize("rate", ["fast", "200", "200mbps", "-1gbit", "", 0, "1bit", "1000gbit"])
def test_a_rate_that_makes_no_sense_is_refused(rate: str | int) -> None:
    with pytest.raises(ConfigError):
        bucket(rate)


@given(st.floats(1e5, 1e11))
def test_a_bucket_takes_super_packets_whole_and_the_queue_more_than_the_bucket(bps: float) -> None:
    shaped = bucket(bps)
    assert shaped.burst_nbytes > SUPER_PACKET_NBYTES
    assert shaped.limit_nbytes > shaped.burst_nbytes


def test_fast_links_get_deeper_buckets_and_queues() -> None:
    assert bucket("2gbit").burst_nbytes == 500_000
    assert bucket("2gbit").limit_nbytes == 12_500_000


@given(name=names, hosts=st.integers(1, MOST_HOSTS))
def test_names_are_short_unique_and_found_again(name: str, hosts: int) -> None:
    lab = plan(name, hosts, racks=hosts)
    devices = [device for site in lab.sites for device in (site.interface, site.port)]
    racks = [(lab.bridge(rack), *lab.uplink(rack)) for rack in range(lab.racks)]
    interfaces = {lab.core, *devices, *(device for rack in racks for device in rack)}
    assert len(interfaces) == 1 + 2 * hosts + (3 * hosts if hosts > 1 else 2)
    assert max(map(len, interfaces)) <= LONGEST_INTERFACE_NAME
    assert len(set(lab.namespaces)) == hosts + 1
    assert {lab_of(namespace) for namespace in lab.namespaces} == {lab.name}


@given(name=names, hosts=st.integers(1, MOST_HOSTS))
def test_addresses_are_hosts_of_one_private_subnet(name: str, hosts: int) -> None:
    addresses = [ipaddress.ip_address(s.address) for s in plan(name, hosts).sites]
    subnet = ipaddress.ip_network(f"{addresses[0]}/24", strict=False)
    assert subnet.is_private
    assert len(set(addresses)) == hosts
    assert set(addresses) <= set(subnet.hosts())


def test_two_labs_share_no_name() -> None:
    one, other = plan("slip00aa01", 3), plan("slip00aa02", 3)
    assert not {one.core, *one.namespaces} & {other.core, *other.namespaces}


@pytest.mark.parametrize("name", ["slip12345-sw", "slip1234567-sw", "slip12345g-h0", "slipway", ""])
def test_other_peoples_namespaces_are_left_alone(name: str) -> None:
    assert lab_of(name) is None


def commands(lab: Plan, rate: Rate = None, core_rate: Rate = None) -> list[Command]:
    return list(build(lab, (rate,) * len(lab.sites), core_rate, Trouble(), congestion="reno"))


def test_every_command_works_inside_the_labs_own_namespaces() -> None:
    lab = plan("slipc0ffee", 4, racks=2)
    for command in commands(lab, "200mbit", "100mbit"):
        assert command[:3] == ("ip", "netns", "add") or set(command) & set(lab.namespaces)


def test_the_first_command_claims_the_name() -> None:
    first, *_ = commands(plan("slipc0ffee", 1))
    assert first == ("ip", "netns", "add", "slipc0ffee-sw")


TBF = "tbf rate 100000000bit burst 131072b limit 1048576b"


def test_a_link_is_shaped_out_of_the_host_and_towards_it() -> None:
    lab = plan("slipc0ffee", 2)
    assert [" ".join(command) for command in shape(lab, 1, "100mbit", Trouble())] == [
        f"tc -n slipc0ffee-h1 qdisc replace dev slipc0ffee-e1 root {TBF}",
        f"tc -n slipc0ffee-sw qdisc replace dev slipc0ffee-p1 root {TBF}",
    ]
    assert set(shape(lab, 1, "100mbit", Trouble())) <= set(commands(lab, "100mbit"))


def test_a_rate_of_none_takes_the_shaping_away() -> None:
    lab = plan("slipc0ffee", 1)
    taken_away = new_rate(lab, 0, None, in_netem=False)
    assert all(command[-2:] == ("root", "noqueue") for command in taken_away)


def test_delay_and_loss_go_around_the_bucket_and_a_new_rate_leaves_them_alone() -> None:
    lab, trouble = plan("slipc0ffee", 1), Trouble(delay_ms=20, loss_percent=0.5)
    netem = "netem limit 1000 delay 20ms loss 0.5%"
    on_host = "tc -n slipc0ffee-h0 qdisc replace dev slipc0ffee-e0"
    troubled = [" ".join(command) for command in shape(lab, 0, "100mbit", trouble)]
    assert troubled[:2] == [
        f"{on_host} root handle 1: {netem}",
        f"{on_host} parent 1:1 handle 10: {TBF}",
    ]
    changed = [" ".join(command) for command in new_rate(lab, 0, "100mbit", in_netem=True)]
    assert changed == [troubled[1], troubled[3]]


@pytest.mark.parametrize("trouble", [(-1, 0), (1e9, 0), (0, -1), (0, 100)])
def test_trouble_that_makes_no_sense_is_refused(trouble: tuple[float, float]) -> None:
    with pytest.raises(LaunchError, match=r"a (delay|loss) of"):
        Trouble(*trouble)


def test_racks_have_a_switch_each_and_a_shaped_cable_to_the_core() -> None:
    lab = plan("slipc0ffee", 4, racks=2)
    assert [site.rack for site in lab.sites] == [0, 0, 1, 1]
    made = [" ".join(command) for command in commands(lab, None, "100mbit")]
    assert "ip -n slipc0ffee-sw link add slipc0ffee-u1 type veth peer name slipc0ffee-d1" in made
    for device, bridge in (("u0", "b0"), ("d0", "br"), ("u1", "b1"), ("p1", "b0"), ("p2", "b1")):
        assert any(f"set slipc0ffee-{device} master slipc0ffee-{bridge} " in line for line in made)
    for device in ("u0", "d0", "u1", "d1"):
        assert f"tc -n slipc0ffee-sw qdisc replace dev slipc0ffee-{device} root {TBF}" in made


def test_racks_that_hosts_do_not_fill_are_refused() -> None:
    with pytest.raises(LaunchError, match="5 hosts cannot fill 2 racks"):
        Lab(hosts=5, racks=2)
    with pytest.raises(LaunchError, match="needs racks"):
        Lab(hosts=4, core_rate="100mbit")


def test_a_cable_is_pulled_at_the_switch() -> None:
    command = set_link(plan("slipc0ffee", 2), 1, up=False)
    assert " ".join(command) == "ip -n slipc0ffee-sw link set slipc0ffee-p1 down"


def test_counters_are_read_at_the_switch() -> None:
    assert "slipc0ffee-sw" in counters(plan("slipc0ffee", 1))


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
    with pytest.raises(ConfigError, match="200mbps"):
        Lab(hosts=2, rate="200mbps")
