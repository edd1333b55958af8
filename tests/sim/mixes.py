"""Strategies made of any parts, and what must hold of a simulated run of one."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np

from slipstream.codecs import Dense, Factors, Rows
from slipstream.consistency import Asynchronous, ByAge, FirstOf, KAsync
from slipstream.methods import Rounds
from slipstream.outer_optimizers import SGD
from slipstream.routes import Everywhere, Route
from slipstream.strategy import Strategy
from slipstream.testing import Conduct, Simulation, simulate
from slipstream.testing.members import Tensors
from slipstream.types import OptimizerRecipe, Spec

WORKERS, SERVERS, ROUNDS = 3, 2, 4
# Enough tensors of every kind that two servers have something to hold.
DENSE = (
    Spec("conv.weight", (64, 40), "float32", 0),
    Spec("conv.bias", (64,), "float32", 1),
    Spec("norm.mean", (64,), "float32", 2, role="buffer"),
    Spec("head.weight", (30, 64), "float32", 3),
)
LINEAR = tuple(
    Spec(f"fc{i}.{name}", shape, "float32", 2 * i + j, layer=f"fc{i}", form="factors")
    for i in range(2)
    for j, (name, shape) in enumerate((("weight", (12, 20)), ("bias", (12,))))
)
# So small that factors are cheaper with two rows, and the dense gradient with three.
SMALL = tuple(
    Spec(f"small.{name}", shape, "float32", 9, layer="small", form="factors")
    for name, shape in (("weight", (6, 5)), ("bias", (6,)))
)
TABLES = tuple(
    Spec(f"table{i}.weight", (40, 6), "float32", i, layer=f"table{i}", form="rows")
    for i in range(2)
)
SLOW = {1: Conduct(speed=0.2)}
PLAIN_SUM = SGD(lr=1.0, at="server")


def sgd(specs: tuple[Spec, ...]) -> OptimizerRecipe:
    """Plain SGD of rate 1: weights that begin at zero are what was applied, times -1."""
    settings = {"lr": 1.0, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
    groups = [0 if spec.role == "parameter" else -1 for spec in specs]
    return OptimizerRecipe("SGD", [settings | {"nesterov": False}], groups)


def specs_for(strategy: Strategy) -> tuple[Spec, ...]:
    """Tensors that all routes of the strategy can carry."""
    forms = {route.up.form for route in strategy.rounds.routes.routes()}
    if "factors" in forms:
        return LINEAR if len(forms) == 1 else (*LINEAR, *SMALL, *DENSE)
    if "rows" in forms:
        return TABLES if len(forms) == 1 else (*TABLES, *DENSE)
    return DENSE


def whole_numbers(specs: tuple[Spec, ...], seed: int) -> Any:
    """Contributions whose sums are exact in float32."""

    def contribute(rank: int, round_: int, tensor: int) -> bytes:
        numbers = np.random.default_rng((seed, rank, round_, tensor))
        spec = specs[tensor]
        return numbers.integers(-8, 9, size=spec.numel).astype(spec.dtype).tobytes()

    return contribute


def run(strategy: Strategy, seed: int = 0) -> Simulation:
    specs = specs_for(strategy)
    topologies = {route.topology for route in strategy.rounds.routes.routes()}
    needs_servers = any(topology.needs_servers for topology in topologies)
    return simulate(
        strategy,
        specs,
        workers=WORKERS,
        servers=SERVERS if needs_servers else 0,
        rounds=ROUNDS,
        seed=seed,
        contribute=whole_numbers(specs, seed),
        conduct=SLOW,
        optimizer=sgd(specs) if strategy.rounds.update.holder_applies else None,
    )


def run_and_check(strategy: Strategy) -> None:
    """One run of which everything that is kept must hold, averaged weights included."""
    outer = strategy.rounds.update.outer_optimizer
    if outer is not None and outer.at == "server" and outer != PLAIN_SUM:
        check_agreement(run(strategy))
        # What counts, and how often, is seen where the weights are the sum of what came.
        update = msgspec.structs.replace(strategy.rounds.update, outer=PLAIN_SUM)
        strategy = Strategy(strategy.name, msgspec.structs.replace(strategy.rounds, update=update))
    if strategy.rounds.update.average is None or not strategy.rounds.update.holder_applies:
        check(run(strategy))
        return
    from slipstream.torch.optimizers.shard_optimizer import ChunkOptimizer

    decay, update = strategy.rounds.update.average.decay, ChunkOptimizer.update
    expected: dict[ChunkOptimizer, list[Any]] = {}

    def watched(held: ChunkOptimizer, *told: Any) -> None:
        before = expected.get(held) or [0.0] * len(held._parameters)
        update(held, *told)
        now = [parameter.detach().numpy().copy() for parameter in held._parameters]
        pairs = zip(before, now, strict=True)
        expected[held] = [decay * old + (1 - decay) * new for old, new in pairs]

    with patch.object(ChunkOptimizer, "update", watched):
        check(run(strategy))
    averaged = [held for held in expected if held._averages]
    assert averaged, "no weights were averaged"
    for held in averaged:
        for average, own in zip(held._averages, expected[held], strict=True):
            np.testing.assert_allclose(average.numpy(), own, rtol=1e-4, atol=1e-4)


def check_agreement(simulation: Simulation) -> None:
    """Nothing was refused, and all workers agree."""
    assert simulation.refused == 0
    if simulation.plan.delivers_every_result:
        assert len(set(simulation.final)) == 1, "workers differ"
        assert len(set(simulation.updates)) == 1, "workers applied different updates"


def check(simulation: Simulation) -> None:
    """Nothing was refused, all workers agree, and every contribution counts exactly once."""
    check_agreement(simulation)
    plan = simulation.plan
    if isinstance(plan.consistency.damping, ByAge):
        return  # how much each counts depends on its age
    ranks = range(len(simulation.steps))
    # What a residual keeps is part of several gradients, whose weights may differ.
    even = all(weight == 1.0 for rank in ranks for weight in weights_of(simulation, rank))
    given, applied = contributed(simulation), received(simulation)
    for tensor, spec in enumerate(plan.specs):
        checked = counts_everything(plan, tensor) and (even or not keeps_residual(plan, tensor))
        if spec.role == "parameter" and checked:
            kept = sum(owed[tensor] for owed in simulation.owed if tensor in owed)
            total = applied[tensor] + kept
            scale = np.abs(given[tensor]).max() + 1
            assert np.abs(total - given[tensor]).max() <= tolerance(plan) * scale, spec.name


def contributed(simulation: Simulation) -> dict[int, Any]:
    """By tensor, the sum of all that workers gave and that must count, now or later."""
    plan = simulation.plan
    made = (
        Counter((round_, rank) for round_, ranks in simulation.figures[0].makers for rank in ranks)
        if simulation.figures
        else Counter()
    )
    totals: dict[int, Any] = {t: np.zeros(spec.numel) for t, spec in enumerate(plan.specs)}
    for rank, steps in enumerate(simulation.steps):
        weights = weights_of(simulation, rank)
        for number, step in enumerate(steps):
            counts = not isinstance(plan.consistency.admit, FirstOf) or (step.round, rank) in made
            for tensor, content in enumerate(step.given):
                if content is not None and (counts or keeps_residual(plan, tensor)):
                    weight = weights[number] if weights else 1.0
                    totals[tensor] += weight * np.frombuffer(content, np.float32)
    return totals


def weights_of(simulation: Simulation, rank: int) -> list[float]:
    """By step of a worker: K over the number of gradients of the update that contains its own.

    When others have left, less than K make an update. Empty for other rules.
    """
    admit = simulation.plan.consistency.admit
    if not isinstance(admit, KAsync):
        return []
    updates = [ranks for _, ranks in simulation.figures[0].makers if rank in ranks]
    assert len(updates) == len(simulation.steps[rank]), "every gradient is in one update"
    return [admit.k / len(ranks) for ranks in updates]


def counts_everything(plan: Any, tensor: int) -> bool:
    """Not where gradients that come before a worker's turn are dropped for good."""
    admit = plan.consistency.admit
    drops = isinstance(admit, Asynchronous) and admit.ramp_up > 0
    return not drops or keeps_residual(plan, tensor)


def keeps_residual(plan: Any, tensor: int) -> bool:
    return "up: error feedback" in plan.routes[plan.route_of[tensor]].up.facts()


def received(simulation: Simulation) -> dict[int, Any]:
    """By tensor, what the results add up to, times what each sum was divided by."""
    plan = simulation.plan
    admit = plan.consistency.admit
    divisor = 1 if isinstance(admit, Asynchronous) else WORKERS
    if isinstance(admit, FirstOf):
        divisor = admit.first or WORKERS
    if isinstance(admit, KAsync):
        divisor = admit.k
    if plan.update.holder_applies:
        factor = plan.consistency.rate(0)
        return {t: -divisor / factor * floats(c) for t, c in enumerate(simulation.held) if c}
    if simulation.updates[0]:
        results: list[Tensors] = list(simulation.updates[0])
    else:
        results = [by_rank[0] for by_rank in simulation.results]
    totals: dict[int, Any] = {t: np.zeros(spec.numel) for t, spec in enumerate(plan.specs)}
    for result in results:
        for tensor, content in enumerate(result):
            if content is not None:
                totals[tensor] += floats(content)
    for tensor, owed in simulation.owed_back.items():
        totals[tensor] += owed
    return {tensor: divisor * total for tensor, total in totals.items()}


def floats(content: bytes) -> Any:
    return np.frombuffer(content, np.float32).astype(np.float64)


SHORT = ("bfloat16", "int8")


def tolerance(plan: Any) -> float:
    """What rounding may add up to: shorter formats round every contribution."""
    codecs = [codec for route in plan.routes for codec in (route.up, route.down)]
    short = any(isinstance(c, Dense | Factors | Rows) and c.wire in SHORT for c in codecs)
    short |= any(isinstance(c, Dense) and c.wire == "float16" for c in codecs)
    return 0.1 if short else 1e-4


def everywhere(name: str, route: Route, **fields: Any) -> Strategy:
    return Strategy(name, Rounds(Everywhere(route), **fields))
