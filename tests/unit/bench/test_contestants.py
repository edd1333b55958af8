from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch import nn

from slipstream.apps.bench import comparison, contestants
from slipstream.apps.bench.comparison import Comparison, compare
from slipstream.apps.bench.contestants import PEERS, check, is_peer, why_missing
from slipstream.apps.bench.contestants.ablation import LastOnly
from slipstream.apps.bench.contestants.torchft import split_evenly
from slipstream.apps.bench.trial import Trial
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
@pytest.mark.parametrize(
    ("system", "package"),
    [
        ("torchft", "torchft"),
        ("torchft_local_sgd", "torchft"),
        ("torchft_diloco(every=8, fragments=2)", "torchft"),
        ("hivemind", "hivemind"),
    ],
)
def test_a_missing_peer_says_what_installs_it(system: str, package: str) -> None:
    check(system)
    assert why_missing(system) == (
        f"{package} is not installed: pip install 'slipstream[{package}]'"
    )


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
    with pytest.raises(ConfigError, match=r"and of other projects local, .*torchft_diloco"):
        check("nonsense")


@pytest.mark.parametrize(
    ("system", "said"),
    [
        ("ddp(rank=2)", "ddp does not take rank: it takes no arguments"),
        ("ddp+powersgd(bits=2)", r"ddp\+powersgd does not take bits: it takes rank"),
        ("ddp+powersgd(rank=0)", "rank=0; take at least 1"),
        ("ddp+powersgd(rank=1.5)", "rank=1.5 is not a whole number; its default is 4"),
        ("ddp+powersgd(rank", "write NAME or NAME"),
        ("torchft_local_sgd(every=0)", "every=0; take at least 1"),
        ("torchft_diloco(lr='fast')", "lr='fast' is not a number; its default is 0.7"),
        ("torchft_diloco(momentum=-1)", "momentum=-1; take at least 0"),
        ("torchft_diloco(every=10, fragments=4)", "a multiple of the fragments"),
        ("torchft_diloco(every=8, fragments=4, delay=2)", "a delay shorter than"),
    ],
)
def test_arguments_that_a_peer_cannot_have_are_refused(system: str, said: str) -> None:
    assert is_peer(system)
    with pytest.raises(ConfigError, match=said):
        check(system)


@pytest.mark.parametrize(
    ("sizes", "count", "parts"),
    [
        ((4, 4, 4, 4), 2, [2, 2]),
        ((1, 1, 1, 9), 2, [3, 1]),
        ((9, 1, 1, 1), 3, [1, 1, 2]),
        ((1, 1, 9), 3, [1, 1, 1]),
        ((5,), 1, [1]),
    ],
)
def test_fragments_hold_every_tensor_once(
    sizes: tuple[int, ...], count: int, parts: list[int]
) -> None:
    model = nn.ParameterList(torch.zeros(size) for size in sizes)
    found = split_evenly(model, count)
    assert [len(part) for part in found] == parts
    assert [id(p) for part in found for p in part] == [id(p) for p in model]
    with pytest.raises(ConfigError, match=f"{len(sizes) + 1} fragments of {len(sizes)} tensors"):
        split_evenly(model, len(sizes) + 1)


def test_without_accumulation_only_the_last_update_is_sent() -> None:
    owed = LastOnly(Rotation(2), 0, [1], 4)
    owed.add(np.array([1, 2, 3, 4], np.float32))
    owed.add(np.array([5, 6, 7, 8], np.float32))
    (due,) = owed.accumulators
    assert {start: part.tolist() for start, part in (owed.take(due), owed.take(due))} == {
        0: [5, 6],
        2: [7, 8],
    }
