"""``slipstream lab`` and ``run --lab`` without a lab: what is refused, what would be removed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slipstream.apps.cli import lab as lab_command
from slipstream.apps.lab import network, removal

LABS = ["slip00000a", "slip00000b"]


@pytest.fixture
def two_labs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Labs by name only; what is removed is noted, and nothing happens."""
    removed: list[str] = []
    monkeypatch.setattr(network, "missing_tools", lambda: None)
    monkeypatch.setattr(lab_command, "missing_tools", lambda: None)
    for module in (lab_command, network, removal):
        monkeypatch.setattr(module, "existing", lambda: LABS)
    for module in (lab_command, removal):
        monkeypatch.setattr(module, "remove", removed.append)
    return removed


@pytest.fixture
def no_tools(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def test_all_means_all(slipstream, two_labs: list[str]) -> None:
    assert slipstream("lab", "down", "--all")[:2] == (0, f"removed {', '.join(LABS)}\n")
    assert two_labs == LABS


def test_one_by_name(slipstream, two_labs: list[str]) -> None:
    assert slipstream("lab", "down", LABS[1])[:2] == (0, f"removed {LABS[1]}\n")
    assert two_labs == LABS[1:]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["down"], "several labs, slip00000a, slip00000b"),
        (["down", "slip123456"], "no lab 'slip123456'"),
        (["status", "--lab=slip123456"], "no lab 'slip123456'"),
        (["exec", "0", "--", "true"], "several labs"),
        (["exec", "0", "--"], "give the command to run on host 0"),
        (["rate", "0", "1gbit"], "several labs"),
        (["freeze", "0"], "several labs"),
        (["thaw", "0"], "several labs"),
        (["link", "0", "out"], "up or down, not 'out'"),
        (["traffic", "0", "1", "1gbit"], "several labs"),
        (["up", "--tiers=2"], "such as 2x4"),
        (["up", "--tiers=2xfour"], "such as 2x4"),
        (["up", "--tiers=2x4", "--hosts=6"], "leave --hosts out"),
        (["up", "--tiers=0x4"], "1 to 250 hosts"),
        (["up", "--hosts=251"], "1 to 250 hosts"),
        (["up", "--rate=1gbit,none"], "2 rates for 4 hosts"),
        (["up", "--rate=fast"], "'fast' is not understood"),
        (["up", "--core-rate=1gbit"], "needs racks"),
        (["up", "--loss-percent=100"], "a loss of 100%"),
    ],
)
def test_what_makes_no_sense_is_one_line(
    slipstream, two_labs: list[str], arguments: list[str], says: str
) -> None:
    code, out, err = slipstream("lab", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert says in err
    assert two_labs == []


@pytest.mark.usefixtures("two_labs")
@pytest.mark.parametrize(
    ("lab", "says"),
    [
        ("three", "write hosts x rate, such as 4x200mbit"),
        ("slip123456", "name a lab that is up"),
        ("3x", "write hosts x rate"),
        ("0x1gbit", "1 to 250 hosts"),
        ("3xfast", "'fast' is not understood"),
    ],
)
def test_a_bad_recipe_is_one_line_and_starts_nothing(
    slipstream, tmp_path: Path, lab: str, says: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"open({str(tmp_path / 'started')!r}, 'w')")
    code, out, err = slipstream("run", f"--lab={lab}", script)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert says in err
    assert not (tmp_path / "started").exists()


@pytest.mark.usefixtures("no_tools")
def test_a_machine_without_iproute2(slipstream, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("")
    for command in (("lab", "up"), ("run", "--lab=2x1gbit", script), ("lab", "exec", "0", "ls")):
        code, out, err = slipstream(*command)
        assert (code, out) == (2, "")
        assert "the lab needs ip and tc; install iproute2" in err
    assert slipstream("lab", "status")[:2] == (
        *(0, "no lab on this machine; `slipstream lab up` makes one\n"),
    )
    assert slipstream("lab", "down")[:2] == (0, "there was no lab to remove\n")


def test_only_root_removes(slipstream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(network.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(lab_command, "existing", lambda: LABS)
    for arguments in ([LABS[0]], ["--all"]):
        code, out, err = slipstream("lab", "down", *arguments)
        assert (code, out) == (2, "")
        assert "needs root" in err
