"""Outer optimizers at a server: the bits that workers get, checkpoints, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from state_messages import StateMessages
from torch import nn

from slipstream._native import mean_into
from slipstream.errors import FrameRefused
from slipstream.methods import Rounds
from slipstream.outer_optimizers import SGD, Adam, Nesterov, OuterOptimizer
from slipstream.routes import Everywhere, Route
from slipstream.runtime.files.state_entries import FIRST_WEIGHTS, STATE
from slipstream.runtime.servers.outer_shard import OuterShard
from slipstream.runtime.servers.server import updater_of
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.topologies import Sharded
from slipstream.torch.checkpoints.outer_weights import OuterWeights
from slipstream.torch.tensors.inventory import Inventory
from slipstream.transports.wire import State, checksum
from slipstream.types import Cluster, Entry, Spec, Values
from slipstream.updates import LocalSteps, Update

NUMEL = 10
EVERY = [SGD(0.5, "server"), Nesterov(0.7, 0.9, "server"), Adam(0.1, at="server")]


def values(numbers: Sequence[float], dtype: str = "float32") -> Values:
    out = Values.empty(len(numbers), dtype)
    mean_into(out.data, [np.float64(numbers)], "float64", 1.0, out_dtype=dtype)
    return out


def numbers(values: Values | None) -> list[float]:
    assert values is not None
    out = np.empty(values.numel)
    mean_into(out, [values.data], values.dtype, 1.0, out_dtype="float64")
    return out.tolist()


class ShardHarness:
    """The only shard of a job with one tensor of ten values."""

    def __init__(
        self, outer: OuterOptimizer, dtype: str = "float32", role: Any = "parameter"
    ) -> None:
        strategy = Strategy(
            "outer",
            Rounds(
                Everywhere(Route(Sharded())),
                update=Update(LocalSteps(2), outer),  # type: ignore[arg-type]
                schedule=AfterBackward(),
            ),
        )
        plan = strategy.plan([Spec("w", (NUMEL,), dtype, 0, role)], Cluster(2, servers=1))
        (self.chunk,) = plan.chunks
        node = plan.cluster.server_nodes[0]
        updater = updater_of(plan, node, None)
        assert isinstance(updater, OuterShard)
        self.shard = updater
        self.messages = StateMessages(plan, node, updater)

    def load(self, weights: Values) -> None:
        self.messages.send(FIRST_WEIGHTS, 0, [weights.data])

    def load_state(self, entries: Sequence[Entry], frames: Sequence[bytes]) -> None:
        self.messages.send(STATE, 0, frames, entries)

    def state(self) -> tuple[list[Entry], list[bytes]]:
        return self.shard.chunks[0].state()

    def apply(self, gradient: Values) -> list[float]:
        (result,) = self.shard.apply(self.chunk, [gradient], None)
        return numbers(result)


@pytest.mark.parametrize("outer", EVERY, ids=repr)
def test_server_gets_the_bits_of_a_worker(outer: OuterOptimizer) -> None:
    model = nn.Linear(NUMEL, 1, bias=False)
    held, weights = ShardHarness(outer), OuterWeights(Inventory.of(model), outer)
    held.load(values(model.weight.flatten().tolist()))
    random = np.random.default_rng(1)
    (tensor,) = weights.weights
    for _ in range(4):
        gradient = random.normal(size=NUMEL).astype(np.float32)
        weights.update(tensor, torch.from_numpy(gradient).view(1, NUMEL))
        given = Values(gradient.view(np.uint8), "float32")
        assert held.apply(given) == weights.weights[tensor].flatten().tolist()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_weights_of_other_formats_are_updated_in_32_bits_or_more(dtype: str) -> None:
    held = ShardHarness(Nesterov(0.5, 0.5, "server"), dtype)
    held.load(values([1.0] * NUMEL, dtype))
    assert held.apply(values([0.5] * NUMEL, dtype)) == [1 - 0.5 * 0.75] * NUMEL
    entries = held.state()[0]
    assert (0, "weights", dtype) in entries
    assert (0, "momentum_buffer", "float64" if dtype == "float64" else "float32") in entries


def test_buffer_becomes_its_mean() -> None:
    held = ShardHarness(Adam(at="server"), role="buffer")
    held.load(values([5.0] * NUMEL))
    assert held.apply(values([2.0] * NUMEL)) == [2.0] * NUMEL
    assert [name for _, name, _ in held.state()[0]] == ["weights"]


@pytest.mark.parametrize("outer", EVERY, ids=repr)
def test_loaded_state_goes_on_as_it_would_have(outer: OuterOptimizer) -> None:
    held, again = ShardHarness(outer), ShardHarness(outer)
    for gradient in ([1.0, -2.0] * 5, [0.5, 3.0] * 5):
        weights = held.apply(values(gradient))
    entries, frames = held.state()
    again.load_state(entries, frames)
    again.load(values(weights))
    last = values([-1.0, 0.25] * 5)
    assert again.apply(last) == held.apply(last)


FULL = np.ones(NUMEL, np.float32).tobytes()
BAD: dict[str, tuple[list[tuple[int, str, str]], list[bytes], str]] = {
    "another segment": ([(1, "momentum_buffer", "float32")], [FULL], "of segment 1"),
    "too short": ([(0, "momentum_buffer", "float32")], [FULL[:-4]], "of 36, expected 40 in all"),
    "an unknown dtype": ([(0, "momentum_buffer", "int8")], [FULL], "segment 0 in int8, expected"),
    "no format of weights": ([(0, "momentum_buffer", "int64")], [FULL * 2], "segment 0 in int64"),
    "an unknown name": ([(0, "exp_avg", "float32")], [FULL], "the outer optimizer keeps"),
    "an entry more": (
        [(0, "momentum_buffer", "float32"), (0, "exp_avg", "float32")],
        [FULL, FULL],
        "the outer optimizer keeps",
    ),
    "a frame less": ([(0, "momentum_buffer", "float32")], [], "of 0, expected 40 in all"),
    "a step of many": ([(0, "step", "float32")], [FULL], "of 40, expected 4 in all"),
    "too many": ([(0, "step", "float32")] * 17, [bytes(4)] * 17, "17 entries, expected at most 16"),
}


@pytest.mark.parametrize("case", BAD)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    entries, frames, why = BAD[case]
    held = ShardHarness(Nesterov(at="server"))
    held.apply(values([1.0] * NUMEL))
    before = held.state()
    with pytest.raises(FrameRefused, match=why):
        held.load_state(entries, frames)
    assert held.state() == before


def test_damaged_and_misplaced_messages_are_refused() -> None:
    held = ShardHarness(SGD(at="server"))
    wrong = checksum([FULL]) ^ 1
    with pytest.raises(FrameRefused, match="checksum"):
        held.messages.post(State(FIRST_WEIGHTS, 0, 0, 40, wrong), FULL)
    with pytest.raises(FrameRefused, match="checksum"):
        held.messages.post(State(STATE, 0, 0, 40, wrong, [(0, "momentum_buffer", "float32")]), FULL)
    with pytest.raises(FrameRefused, match="first weights 7 from rank 0 is not expected"):
        held.messages.send(FIRST_WEIGHTS, 7, [FULL])
    with pytest.raises(FrameRefused, match="of 36, expected 40 in all"):
        held.messages.send(FIRST_WEIGHTS, 0, [FULL[4:]])
    with pytest.raises(FrameRefused, match="settings"):
        held.shard.examine([{"lr": 1.0}])
    held.shard.examine(None)


def test_outer_gradient_that_is_not_finite_makes_weights_that_are_not() -> None:
    held = ShardHarness(Adam(at="server"))
    assert np.isnan(held.apply(values([np.inf] + [1.0] * (NUMEL - 1)))[0])


def test_outer_optimizer_runs_without_torch() -> None:
    code = """
import sys
import numpy as np
import msgspec
from slipstream.outer_optimizers import Adam
from slipstream.strategy import Strategy
from slipstream.updates import LocalSteps, Update
from slipstream.runtime.servers.server import updater_of
from slipstream.systems import parse
from slipstream.types import Cluster, Spec, Values
strategy = parse("diloco(every=2, first=2)")
update = Update(LocalSteps(2), Adam(at="server"))
strategy = Strategy("outer", msgspec.structs.replace(strategy.rounds, update=update))
plan = strategy.plan([Spec("w", (4,), "float32", 0)], Cluster(2, 1))
shard = updater_of(plan, 2, None)
(chunk,) = plan.chunks
shard.apply(chunk, [Values(np.ones(4, np.float32).view(np.uint8), "float32")], None)
sys.exit("torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
