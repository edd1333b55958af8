from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec

import numpy as np
import pytest

from slipstream.bench import comparison, contestants
from slipstream.bench.comparison import Comparison, compare
from slipstream.bench.contestants import PEERS, check, why_missing
from slipstream.bench.contestants.ablation import LastOnly
from slipstream.bench.trial import Trial
from slipstream.codecs.partition import Rotation
from slipstream.errors import ConfigError


@pytest.fixture
def only_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing was installed that a peer needs."""
    needed = {peer.needs for peer in PEERS.values()}
    monkeypatch.setattr(
        contestants, "find_spec", lambda name: None if name in needed else find_spec(name)
    )


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("system", ["torchft", "hivemind"])
def test_a_missing_peer_says_what_installs_it(system: str) -> None:
    check(system)
    assert why_missing(system) == (f"{system} is not installed: pip install 'slipstream[{system}]'")


@pytest.mark.usefixtures("only_torch")
@pytest.mark.parametrize("system", ["local", "ddp", "ddp+fp16", "push_pull(overlap=False)"])
def test_what_needs_torch_alone_is_never_missing(system: str) -> None:
    assert why_missing(system) is None


@pytest.mark.usefixtures("only_torch")
def test_a_comparison_leaves_missing_peers_out_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[str] = []
    monkeypatch.setattr(comparison, "ForkServer", nullcontext)
    monkeypatch.setattr(
        comparison, "_run_once", lambda outcome, *_: ran.append(outcome.system) or "done"
    )
    trial = Trial(workload="fc", steps=1)
    notes: list[str] = []
    outcomes, _ = compare(
        Comparison(trial, ("hivemind", "ddp", "torchft"), workers=1, repetitions=1),
        trial.load(),
        notes.append,
    )
    assert [outcome.system for outcome in outcomes] == ["ddp"]
    assert ran == ["local", "ddp"]
    left_out = [note for note in notes if "left out" in note]
    assert left_out == [
        f"{system} is left out: {system} is not installed: pip install 'slipstream[{system}]'"
        for system in ("hivemind", "torchft")
    ]


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError):
        check("nonsense")


def test_without_accumulation_only_the_last_update_is_sent() -> None:
    owed = LastOnly(Rotation(2), 0, [1], 4)
    owed.add(np.array([1, 2, 3, 4], np.float32))
    owed.add(np.array([5, 6, 7, 8], np.float32))
    (due,) = owed.accumulators
    assert {start: part.tolist() for start, part in (owed.take(due), owed.take(due))} == {
        0: [5, 6],
        2: [7, 8],
    }
