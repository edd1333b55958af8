"""``slipstream bench`` up to where it would start something."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from slipstream.apps.cli.bench import split_systems


@pytest.fixture
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **_: object) -> None:
        raise AssertionError(f"started {arguments}")

    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.parametrize(
    ("text", "systems"),
    [
        ("ddp", ["ddp"]),
        ("ddp, push_pull ,local", ["ddp", "push_pull", "local"]),
        (
            "push_pull(overlap=False,update='server'),ddp",
            ["push_pull(overlap=False,update='server')", "ddp"],
        ),
        ("a((1,2),(3,4)), b(5,6)", ["a((1,2),(3,4))", "b(5,6)"]),
        ("ddp,,local,", ["ddp", "local"]),
        (" , ", []),
    ],
)
def test_systems_are_split_at_commas_outside_parentheses(text: str, systems: list[str]) -> None:
    assert split_systems(text) == systems


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nope"], "no workload 'nope'"),
        (["fashon"], "did you mean 'fashion'?"),
        (["fc", "--compare=ddp,pushpull"], "did you mean 'push_pull'?"),
        (["fc", "--compare=push_pull(speed=9)"], "speed"),
        (["fc", "--compare=ddp,local,ddp"], "named twice"),
        (["fc", "--compare=,"], "no system to measure"),
        (["fc", "--straggle=slow"], "lognormal:SIGMA"),
        (["fc", "--straggle=worker:4:x2"], "name one of 0 to 3"),
        (["fc", "--straggle=pareto:0.5"], "above 1"),
        (["fc", "--target=0.9"], "learns nothing"),
        (["fc", "--device-ms=vgg91"], "did you mean 'vgg19'?"),
        (["fc", "--device-ms=0"], "more than 0 ms"),
        (["fc", "--device-ms=nan"], "more than 0 ms"),
        (["fc", "--device-ms=inf"], "more than 0 ms"),
        (["vgg", "--device-ms=vgg19", "--target=0.9"], "learns nothing"),
        (["fc", "--rate=200mbps"], "200mbps"),
        (["fc", "--batch=500"], "a batch of 2000 is more than the 512 rows"),
        (["fc", "--data=."], "fc takes no data"),
        (["fc", "--sizes=layers=2"], "fc takes no layers: gpt does"),
        (["gpt", "--sizes=layers"], "write NAME=NUMBER"),
        (["gpt", "--sizes=heads=3"], "does not divide into 3 heads"),
        (["gpt", "--compare=ddp+powersgd(rank=0)"], "rank=0; take at least 1"),
        (["mnist", "--data=no-such-folder"], "no-such-folder"),
        (["fc", "--scale=0.5"], "fc takes no scale"),
        (["fc", "--json=."], "that is a folder"),
        (["fc", "--plot=picture"], ".png"),
        (["fc", "--plot=picture.xyz"], ".png"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_starts_nothing(
    slipstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = slipstream("bench", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("slipstream: ")
    assert len(err.splitlines()) == 1
    assert says in err


@pytest.mark.usefixtures("nothing_starts")
@pytest.mark.parametrize("option", ["--target=high", "--workers=0", "--scale=2", "--warmup=0"])
def test_options_out_of_range_are_named(slipstream, option: str) -> None:
    code, out, err = slipstream("bench", "fc", option)
    assert (code, out) == (2, "")
    assert option.partition("=")[0] in err


@pytest.mark.usefixtures("nothing_starts")
def test_a_plot_without_matplotlib_names_the_extra(
    slipstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.apps.cli.options.find_spec", lambda name: None)
    code, _, err = slipstream("bench", "fc", f"--plot={tmp_path}/picture.png")
    assert code == 2
    assert "slipstream[bench]" in err
