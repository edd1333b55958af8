"""Digests of simulated runs, by system and seed: what must not change when code is rearranged.

``python tests/sim/golden_runs.py`` writes them anew, after a change that is meant to change them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from slipstream.strategy import Strategy
from slipstream.systems import (
    all_to_all,
    async_sgd,
    backup_workers,
    bounded_staleness,
    one_bit,
    parameter_flow,
    push_pull,
)
from slipstream.testing import Conduct, Simulation, simulate
from slipstream.topologies import Tree
from slipstream.types import OptimizerRecipe, Spec

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

# By name: the strategy, who is unlike the others, and the optimizer at the servers.
CASES: dict[str, tuple[Strategy, dict[int, Conduct], OptimizerRecipe | None]] = {
    "push_pull": (push_pull(chunk_bytes=4096), {}, None),
    "push_pull at servers": (push_pull(update="server", chunk_bytes=4096), {}, MOMENTUM),
    "push_pull in bf16": (push_pull(wire="bfloat16", overlap=False), {}, None),
    "all_to_all": (all_to_all(), {}, None),
    "one_bit": (one_bit(chunk_bytes=4096), {}, None),
    "backup_workers": (
        backup_workers(2, chunk_bytes=4096),
        {1: Conduct(speed=0.2)},
        MOMENTUM,
    ),
    "bounded_staleness": (
        bounded_staleness(1, chunk_bytes=4096),
        {2: Conduct(speed=0.2)},
        MOMENTUM,
    ),
    "async_sgd": (async_sgd(lr_by_staleness=True, chunk_bytes=4096), {}, MOMENTUM),
    "parameter_flow": (parameter_flow(delta=0.5, chunk_bytes=4096), {}, None),
    "parameter_flow by share": (parameter_flow(delta="80%", decay="root"), {}, None),
    "parameter_flow ahead": (
        parameter_flow(delta=0.5, staleness=2, chunk_bytes=4096),
        {0: Conduct(speed=0.3)},
        None,
    ),
    "parameter_flow over trees": (parameter_flow(tree=TREE, delta=0.2), {}, None),
    "parameter_flow after a loss": (
        parameter_flow(tree=TREE, staleness=1),
        {1: Conduct(away_at=0.3, given_up=True)},
        None,
    ),
}


def run(name: str, seed: int) -> Simulation:
    strategy, conduct, optimizer = CASES[name]
    return simulate(
        strategy,
        SPECS,
        workers=WORKERS,
        servers=0 if name == "all_to_all" else SERVERS,
        rounds=ROUNDS,
        seed=seed,
        conduct=conduct,
        optimizer=optimizer,
    )


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
