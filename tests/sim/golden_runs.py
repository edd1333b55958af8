"""Digests of simulated runs, by system and seed: what must not change when code is rearranged.

``python tests/sim/golden_runs.py`` writes them anew, after a change that is meant to change them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from mixes import LINEAR, SMALL, TABLES, sgd

from slipstream.codecs import (
    Dense,
    Factors,
    Filter,
    LowRank,
    Quantized,
    Rows,
    SegmentCodec,
    TopK,
)
from slipstream.consistency import All, Consistency, FirstOf, Lag
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Prefer, Route
from slipstream.runtime.exchange.choices import PERIOD
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.systems import (
    adam_factors,
    all_to_all,
    async_sgd,
    backup_workers,
    bounded_staleness,
    diloco,
    local_sgd,
    low_rank,
    one_bit,
    parameter_flow,
    poseidon,
    push_pull,
)
from slipstream.testing import Conduct, Simulation, simulate
from slipstream.topologies import Mesh, PeerSharded, Sharded, Tree
from slipstream.types import OptimizerRecipe, Spec
from slipstream.updates import LocalSteps, Nesterov, Update, UserOptimizer

FILE = Path(__file__).parent / "golden_runs.json"
SEEDS = (0, 1, 2)
WORKERS, SERVERS, ROUNDS = 3, 2, 4
SPECS = (
    Spec("conv.weight", (64, 40), "float32", 0),
    Spec("norm.mean", (64,), "float32", 1, role="buffer"),
    Spec("fc.weight", (30, 64), "float32", 2),
    Spec("fc.bias", (30,), "float32", 3),
)
MOMENTUM = OptimizerRecipe(
    "SGD",
    [{"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}],
    [0, -1, 0, 0],
)
TREE = Tree((((1,), (2,), (0,), ()), ((0, 2), (1,), (), ())))

LAYERS = (*LINEAR, *SMALL, *TABLES, *SPECS)


@dataclass(frozen=True)
class Case:
    """A strategy in a job of ``WORKERS`` workers.

    Attributes:
        conduct: Who is unlike the others.
        optimizer: Runs at the servers.
    """

    strategy: Strategy
    conduct: Mapping[int, Conduct] = field(default_factory=dict)
    optimizer: OptimizerRecipe | None = None
    specs: tuple[Spec, ...] = SPECS
    servers: int = SERVERS
    rounds: int = ROUNDS


def preferring(route: Route, **fields: Any) -> Strategy:
    """Send what a route can carry by that one, and the rest dense between the same members."""
    return Strategy(
        "preferring", Rounds(Prefer((route, Route(route.topology))), chunk_bytes=4096, **fields)
    )


def locally(up: SegmentCodec, steps: LocalSteps, outer: Nesterov) -> Strategy:
    """Make local steps between rounds over links."""
    return Strategy(
        "local steps",
        Rounds(
            Everywhere(Route(Sharded(), up=up)),
            Consistency(),
            Update(steps, outer),
            AfterBackward(),
            chunk_bytes=4096,
        ),
    )


CASES = {
    "push_pull": Case(push_pull(chunk_bytes=4096)),
    "push_pull at servers": Case(push_pull(update="server", chunk_bytes=4096), {}, MOMENTUM),
    "push_pull in bf16": Case(push_pull(wire="bfloat16", overlap=False)),
    "all_to_all": Case(all_to_all(), servers=0),
    "one_bit": Case(one_bit(chunk_bytes=4096)),
    "backup_workers": Case(backup_workers(2, chunk_bytes=4096), {1: Conduct(speed=0.2)}, MOMENTUM),
    "bounded_staleness": Case(
        bounded_staleness(1, chunk_bytes=4096), {2: Conduct(speed=0.2)}, MOMENTUM
    ),
    "async_sgd": Case(async_sgd(lr_by_staleness=True, chunk_bytes=4096), {}, MOMENTUM),
    "parameter_flow": Case(parameter_flow(delta=0.5, chunk_bytes=4096)),
    "parameter_flow by share": Case(parameter_flow(delta="80%", decay="root")),
    "parameter_flow ahead": Case(
        parameter_flow(delta=0.5, staleness=2, chunk_bytes=4096), {0: Conduct(speed=0.3)}
    ),
    "parameter_flow over trees": Case(parameter_flow(tree=TREE, delta=0.2)),
    "parameter_flow after a loss": Case(
        parameter_flow(tree=TREE, staleness=1), {1: Conduct(away_at=0.3, given_up=True)}
    ),
    # Layers in compact form, chosen when the plan is made, and by batches once a period.
    "poseidon by bytes": Case(poseidon(choose="bytes"), specs=LAYERS, rounds=2 * PERIOD + 2),
    "poseidon in int8": Case(
        poseidon(wire="int8", rate="100mbit"),
        {2: Conduct(speed=0.3)},
        specs=LAYERS,
        rounds=PERIOD + 2,
    ),
    "adam_factors": Case(adam_factors(), specs=(*LINEAR, *SPECS)),
    "factors at servers": Case(
        preferring(
            Route(Sharded(whole_layers=True), up=Factors("bfloat16")),
            update=Update(outer=UserOptimizer(at="server")),
        ),
        {1: Conduct(speed=0.3)},
        sgd((*LINEAR, *SPECS)),
        specs=(*LINEAR, *SPECS),
    ),
    # Tensors in a basis that all ends agree on.
    "low_rank": Case(low_rank(rank=3, chunk_bytes=4096)),
    "low_rank among peers": Case(low_rank(rank=2, peers=True, chunk_bytes=4096), servers=0),
    "low_rank ahead over trees": Case(
        preferring(Route(TREE, LowRank(3), LowRank(3)), consistency=Consistency(All(), Lag(1))),
        {0: Conduct(speed=0.3)},
    ),
    "low_rank of the first two": Case(
        preferring(
            Route(Sharded(), LowRank(3)),
            consistency=Consistency(FirstOf(2)),
            update=Update(outer=UserOptimizer(at="server")),
        ),
        {1: Conduct(speed=0.1)},
        MOMENTUM,
    ),
    # Local steps, whose outer gradients go over links.
    "local_sgd in int4": Case(local_sgd(every=4, wire="int4"), servers=0),
    "diloco in fragments": Case(
        locally(Quantized(8), LocalSteps(4, fragments=2, overlap_steps=1), Nesterov())
    ),
    "diloco at servers": Case(
        locally(Dense(), LocalSteps(4), Nesterov(at="server")),
        {1: Conduct(speed=0.3)},
        sgd(SPECS),
    ),
    "diloco of the first two": Case(diloco(every=4, first=2), {2: Conduct(speed=0.3)}, sgd(SPECS)),
    # Each tensor takes the first route that can carry it.
    "preferred few bits": Case(preferring(Route(PeerSharded(), Quantized(4), Quantized(8)))),
    "preferred rows over a mesh": Case(
        preferring(Route(Mesh(), up=Rows("int8"))), specs=(*TABLES, *SPECS), servers=0
    ),
    "preferred largest ahead": Case(
        preferring(Route(Sharded(), up=Filter(TopK(0.2))), consistency=Consistency(All(), Lag(2))),
        {0: Conduct(speed=0.3)},
    ),
}


def run(name: str, seed: int) -> Simulation:
    case = CASES[name]
    with mock.patch.object(np, "matmul", in_order):
        return simulate(
            case.strategy,
            case.specs,
            workers=WORKERS,
            servers=case.servers,
            rounds=case.rounds,
            seed=seed,
            conduct=case.conduct,
            optimizer=case.optimizer,
        )


def in_order(left: np.ndarray[Any, Any], right: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """A product whose last bits do not depend on the processor, as those of a BLAS do."""
    total = np.multiply.outer(left[:, 0], right[0])
    for place in range(1, len(right)):
        total += np.multiply.outer(left[:, place], right[place])
    return total


def digest(simulation: Simulation) -> str:
    """Of every message's way and time, and of what workers gave, had, applied and still owe."""
    said = hashlib.sha256()
    for event in simulation.trace:
        line = (event.kind, event.source, event.peer, round(event.at_s, 6), event.priority)
        said.update(repr(line).encode())
    for steps, last in zip(simulation.steps, simulation.final, strict=True):
        for step in steps:
            said.update(repr(step.round).encode())
            _add(said, (*step.had, *step.given))
        _add(said, last)
    for updates in simulation.updates:
        for update in updates:
            _add(said, update)
    for owed in (*simulation.owed, simulation.owed_back):
        _add(said, [owed[tensor].tobytes() for tensor in sorted(owed)])
    for counter in (*simulation.sent, *simulation.received):
        # The filter had another name when these were kept.
        named = {key.replace("filter", "bounded"): n for key, n in counter.items()}
        said.update(repr(sorted(named.items())).encode())
    return said.hexdigest()


def _add(said: hashlib._Hash, contents: Iterable[bytes | None]) -> None:
    for content in contents:
        said.update(b"none" if content is None else content)


def digests() -> dict[str, list[str]]:
    return {name: [digest(run(name, seed)) for seed in SEEDS] for name in CASES}


if __name__ == "__main__":
    FILE.write_text(json.dumps(digests(), indent=1) + "\n")
