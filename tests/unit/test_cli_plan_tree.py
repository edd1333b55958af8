"""``slipstream plan-tree``: what it draws, what it says, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SLOW_CORE = ("--hosts=12", "--racks=2", "--rate=100mbit", "--core-rate=50mbit", "--block-mib=1")

TOPOLOGY = """
rate = "100mbit"
core_rate = "25mbit"
[[hosts]]
name = "alpha[1]"
rack = "left"
workers = [0]
[[hosts]]
name = "beta"
rack = "left"
workers = [1]
[[hosts]]
name = "gamma"
rack = "right"
workers = [2]
[[hosts]]
name = "delta"
rack = "right"
workers = [3]
servers = [0]
"""


@pytest.fixture
def topology(tmp_path: Path) -> Path:
    file = tmp_path / "net.toml"
    file.write_text(TOPOLOGY)
    return file


def test_the_chosen_trees_the_times_and_the_egress(slipstream) -> None:
    code, out, _ = slipstream("plan-tree", *SLOW_CORE)
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == "server 0 on h0, rack r0"
    assert sum("rank " in line for line in lines) == 12
    assert sum("← across the core" in line for line in lines) == 1
    assert sum("on the same host" in line for line in lines) == 1
    (star,) = (line.split() for line in lines if line.startswith(" star "))
    # 100 MiB at 100 Mbit/s take 8.39 s; three of the model cross an uplink of half a link.
    assert float(star[1]) == pytest.approx(6 * 8.389, rel=0.01)
    (chosen,) = (line.split() for line in lines if line.rstrip().endswith("chosen"))
    assert chosen[0] == "trees"
    assert float(chosen[4]) == pytest.approx(1.03 * 8.389, rel=0.03)
    assert sum("91.7 MiB" in line for line in lines) == 12
    assert lines[-1].startswith("chosen: trees of degree ")
    assert "x as fast as a star; the other 11 have similar trees" in lines[-1]


def test_a_full_core_keeps_the_star(slipstream) -> None:
    code, out, _ = slipstream("plan-tree", "--hosts=6", "--rate=1gbit")
    assert code == 0
    assert out.endswith(
        "chosen: star; nothing else is 5 % faster, so servers send to every worker\n"
    )


def test_one_host_has_nothing_to_choose(slipstream) -> None:
    code, out, _ = slipstream("plan-tree", "--hosts=1")
    assert code == 0
    assert "chosen: star" in out


def test_a_dedicated_server_from_a_file(slipstream, topology: Path) -> None:
    code, out, _ = slipstream("plan-tree", "--topology", topology, "--block-mib=1")
    assert code == 0
    assert out.startswith("server 0 on delta, rack right\n")
    assert "on alpha[1], rack left" in out, "names are text, not markup"


def test_a_pinned_tree_is_drawn_whatever_is_chosen(slipstream) -> None:
    code, out, _ = slipstream("plan-tree", "--hosts=6", "--degree=2", "--depth=3", "--alpha=0.5")
    assert code == 0
    (pinned,) = (line.split() for line in out.splitlines() if line.rstrip().endswith("pinned"))
    assert pinned[:4] == ["trees", "2", "3", "0.5"]
    assert out.splitlines()[-1].startswith("pinned: trees of degree 2, depth 3, alpha 0.5, ")
    assert "soonest is star" in out


def test_another_servers_tree(slipstream) -> None:
    code, out, _ = slipstream("plan-tree", *SLOW_CORE, "--server=7")
    assert code == 0
    assert out.startswith("server 7 on h7, rack r1\n")


def test_json_has_all_trees(slipstream, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "tree.json"
    assert slipstream("plan-tree", *SLOW_CORE, "--json", file)[0] == 0
    report = json.loads(file.read_text())
    assert report["drawn"] == report["chosen"]
    assert report["chosen"]["overlay"] == "trees"
    assert len(report["children"]) == 12
    for tree in report["children"]:
        assert len(tree) == 13
        assert sorted(rank for given in tree for rank in given) == list(range(12))
    assert [one["overlay"] for one in report["candidates"][:3]] == ["star", "chain", "trees"]
    assert report["egress_bytes"]["h3"] == pytest.approx(11 / 12 * 100 * 2**20)


def test_the_picture(slipstream, tmp_path: Path) -> None:
    file = tmp_path / "tree.png"
    assert slipstream("plan-tree", *SLOW_CORE, "--plot", file)[0] == 0
    assert file.read_bytes().startswith(b"\x89PNG")


def refused(slipstream, *arguments: object) -> str:
    code, out, err = slipstream("plan-tree", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("slipstream: ")
    assert len(err.splitlines()) == 1
    return str(err)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "which network? name it with --topology FILE, or with options such as --hosts 12"),
        (("--hosts=2", "--racks=3"), "2 hosts in 3 racks: give every rack a host at least"),
        (("--hosts=2", "--rate=fast"), "--rate: a rate of 'fast' is not understood"),
        (("--hosts=2", "--core-rate=0mbit"), "--core-rate: a rate of 0.0 moves nothing"),
        (("--hosts=2", "--model-mib=0"), "--model-mib 0.0: give an amount above 0"),
        (("--hosts=2", "--block-mib=-1"), "--block-mib -1.0: give an amount above 0"),
        (("--hosts=2", "--server=2"), "--server 2: this network has servers 0 to 1"),
        (
            ("--hosts=12", "--degree=2", "--depth=2"),
            "reaches 6 hosts at most, not 11; allow a depth of 3 or a degree of 3",
        ),
        (("--hosts=2", "--plot=tree.txt"), "--plot tree.txt: a name ends in .png"),
        (("--topology=nowhere.toml",), "there is no topology file nowhere.toml"),
        (("--topology=.",), "cannot read the topology file .: Is a directory"),
    ],
)
def test_what_is_refused(slipstream, arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(slipstream, *arguments)


def test_a_file_and_options_that_say_the_same(slipstream, topology: Path) -> None:
    said = refused(slipstream, "--topology", topology, "--racks=2")
    assert f"--racks: --topology {topology} has that already; leave out one of them" in said


def test_a_mistake_in_the_file(slipstream, topology: Path) -> None:
    topology.write_text(TOPOLOGY.replace("workers = [3]", "workers = [4]"))
    said = refused(slipstream, "--topology", topology)
    assert f"{topology}: hosts: workers: 3 is on none; number them 0 to 3" in said


def test_what_is_no_text(slipstream, topology: Path) -> None:
    topology.write_bytes(b"\xff\xfe\x00")
    assert "is not text; a topology file is TOML" in refused(slipstream, "--topology", topology)
