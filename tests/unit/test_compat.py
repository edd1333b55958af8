"""What does not go together is refused before anything starts, with the reason and a way out."""

from typing import Any

import msgspec
import pytest

from slipstream import compat
from slipstream.codecs import (
    Above,
    Dense,
    Factors,
    Filter,
    LowRank,
    OneBit,
    Quantized,
    Rows,
)
from slipstream.compat import RULES, problems
from slipstream.consistency import (
    All,
    Asynchronous,
    ByAge,
    Consistency,
    Constant,
    FirstOf,
    KAsync,
    Lag,
    StaleSynchronous,
)
from slipstream.errors import IncompatibleParts
from slipstream.methods import Rounds
from slipstream.parts import FACTS, Facts, facts
from slipstream.planning.choosing import ByBytes
from slipstream.routes import Cheapest, Collective, Everywhere, Prefer, Route
from slipstream.schedules import AfterBackward, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems import SYSTEMS, parse
from slipstream.topologies import Mesh, PeerSharded, Sharded, Tree, TwoLevel
from slipstream.types import Cluster, Spec
from slipstream.updates import (
    Add,
    ClipNorm,
    Ema,
    LocalSteps,
    Nesterov,
    Update,
    UserOptimizer,
    UserSteps,
)

SHARDS, WHOLE = Route(Sharded()), Route(Sharded(whole_layers=True), up=Factors())
PEERS, REDUCED = Route(Mesh()), Route(Mesh(), over=Collective())
SHARES = Route(PeerSharded())
HOSTS = Route(TwoLevel())
RELAYED = Route(Tree((((0,), (1,), ()),)))
AT_HOLDER = Update(outer=UserOptimizer(at="server"))
STEPS = Update(inner=UserSteps(), outer=Add())
LOCAL = Update(LocalSteps(), Nesterov())
FILTERED = Filter(Above(0.5))


def made(
    route: Route | Any,
    consistency: Consistency | None = None,
    update: Update | None = None,
    schedule: Any = None,
) -> Strategy:
    routes = Everywhere(route) if isinstance(route, Route) else route
    return Strategy(
        "mine",
        Rounds(
            routes, consistency or Consistency(), update or Update(), schedule or AfterBackward()
        ),
    )


def replaced(strategy: Strategy, **fields: Any) -> Strategy:
    """The same, with other fields of its rounds."""
    return Strategy(strategy.name, msgspec.structs.replace(strategy.rounds, **fields))


@pytest.mark.parametrize("name", sorted(SYSTEMS))
def test_the_named_systems_are_in_order(name: str) -> None:
    assert problems(SYSTEMS[name]()) == []


@pytest.mark.parametrize(
    "text",
    [
        "push_pull(update='server', averaged=0.9, clip_norm=1.0)",
        "push_pull(averaged=0.9, clip_norm=1.0)",
        "push_pull(wire='bfloat16')",
        "async_sgd(clip_norm=1.0, lr_by_staleness=True, averaged=0.9)",
        "parameter_flow(staleness=3, payload='update')",
        "gadei(apply='direct', consistent=True)",
        "poseidon(choose='bytes')",
    ],
)
def test_so_are_they_with_arguments(text: str) -> None:
    assert problems(parse(text)) == []


# Each hole that once passed and was ignored, waited for ever, or lost something.
HOLES = {
    "means that come back filtered from a collective": made(
        Route(Mesh(), down=FILTERED, over=Collective())
    ),
    "clipping what leaves before its norm is known": made(
        SHARDS, update=Update(before=(ClipNorm(1.0),)), schedule=WaitFree()
    ),
    "factors between workers that may be lost": made(
        Route(Mesh(), up=Factors()), Consistency(All(without_lost=True))
    ),
    "choosing among workers that may be lost": made(
        Cheapest((Route(Mesh(), up=Rows()), SHARDS), ByBytes()),
        Consistency(All(without_lost=True)),
    ),
    "weights that come back in one bit": made(Route(Sharded(), down=OneBit()), update=AT_HOLDER),
    "weights that come back rounded": made(
        Route(Sharded(), down=Dense("bfloat16")), update=AT_HOLDER
    ),
    "weights of 64 bits that come back as 32": made(
        Route(Sharded(), down=Dense("float32")), update=AT_HOLDER
    ),
    "weights that come back filtered": made(
        Route(Sharded(), up=FILTERED, down=FILTERED), update=AT_HOLDER
    ),
}


@pytest.mark.parametrize("hole", HOLES)
def test_holes_are_closed(hole: str) -> None:
    strategy = HOLES[hole]
    assert problems(strategy)
    with pytest.raises(IncompatibleParts, match=r"^mine on "):
        strategy.plan([Spec("w", (4, 4), "float32", 0, layer="", form="")], Cluster(2, 1))


def test_what_those_holes_asked_for_can_be_had_otherwise() -> None:
    clipped = Update(before=(ClipNorm(1.0),))
    assert problems(made(SHARDS, update=clipped, schedule=AfterBackward())) == []
    assert problems(made(WHOLE, Consistency(All(without_lost=True)))) == []
    assert problems(made(Route(Sharded(), up=OneBit()), update=AT_HOLDER)) == []
    # What is dropped of a filter's returns to its residual.
    first = made(Route(Sharded(), up=FILTERED), Consistency(FirstOf(first=2)), AT_HOLDER)
    assert problems(first) == []


class Majority(Dense, frozen=True):
    """A part of a user's own, whose results are no means."""

    def facts(self) -> Facts:
        return super().facts() | facts("up: no mean")


# By a word of the reason: parts that break this rule. Each is one change away from what goes.
BROKEN: dict[str, Strategy] = {
    "of which none may be missed": made(SHARDS, Consistency(FirstOf(first=1))),
    "miss the other workers' increments": made(SHARDS, Consistency(Asynchronous())),
    "no server to update": made(PEERS, update=AT_HOLDER),
    "miss the increments of all others": made(SHARDS, Consistency(KAsync(2))),
    "when an update contains its gradient": made(SHARDS, Consistency(KAsync(2), Lag(1)), AT_HOLDER),
    "which K gradients make an update": made(PEERS, Consistency(KAsync(2))),
    "its K gradients have different ages": made(
        SHARDS, Consistency(KAsync(2), damping=ByAge()), AT_HOLDER
    ),
    "must use the same basis": made(
        Route(Sharded(), up=LowRank()), Consistency(StaleSynchronous())
    ),
    "in which workers sent their gradients": made(Route(Sharded(), LowRank(4), LowRank(2))),
    "which is a mesh": made(Route(Sharded(), over=Collective())),
    "has no optimizer for it": made(SHARES, update=AT_HOLDER),
    "count the gradients of all workers": made(SHARES, Consistency(StaleSynchronous())),
    "is lost with it": made(SHARES, Consistency(All(without_lost=True))),
    "sums dense values": made(Route(Mesh(), up=OneBit(), over=Collective())),
    "needs every worker in every round": made(REDUCED, Consistency(StaleSynchronous())),
    "ends when every worker has joined": made(REDUCED, Consistency(All(), Lag(1))),
    "in which messages bring them": made(REDUCED, update=STEPS),
    "the mean of their weights": made(
        Route(Sharded(), up=Majority()), update=Update(LocalSteps(), Nesterov())
    ),
    "codec's results are no means": made(Route(Sharded(), up=Majority()), update=STEPS),
    "would have no learning rate": made(SHARDS, update=Update(outer=Add("worker"))),
    "is added, not used for another step": made(
        SHARDS, update=Update(UserSteps(), UserOptimizer("worker"))
    ),
    "how old a gradient is": made(SHARDS, Consistency(StaleSynchronous(), Lag(1), ByAge())),
    "no gradient is stale": made(SHARDS, Consistency(damping=Constant(0.5))),
    "cannot continue without a lost worker": made(REDUCED, Consistency(All(without_lost=True))),
    "in different orders": made(PEERS, Consistency(Asynchronous())),
    "no server decides for all workers": made(PEERS, Consistency(FirstOf(first=1))),
    "count different gradients": made(PEERS, Consistency(StaleSynchronous(), Lag(1))),
    "different parts of what a lost worker sent": made(PEERS, Consistency(All(without_lost=True))),
    "computes the result for itself": made(Route(Mesh(), down=OneBit())),
    "must be in one place": made(Route(Sharded(), up=Factors())),
    "forms of a gradient": made(WHOLE, update=STEPS),
    "while it is sent as factors": made(WHOLE, update=Update(before=(ClipNorm(1.0),))),
    "choose the same route for a layer in every round": made(
        Cheapest((Route(Mesh(), up=Factors()), SHARDS)), Consistency(All(), Lag(1))
    ),
    "gradients sent as factors or rows do not reach": made(
        Cheapest((Route(Mesh(), up=Factors()), SHARDS)), update=AT_HOLDER
    ),
    "stay rounded": made(Route(Sharded(), down=Dense("float16")), update=AT_HOLDER),
    "known only after the optimizer's step": made(SHARDS, update=STEPS, schedule=WaitFree()),
    "are added where the optimizer has run": made(
        SHARDS, update=Update(inner=UserSteps(), outer=Add("server"))
    ),
    "known only after backward": made(
        SHARDS, update=Update(before=(ClipNorm(1.0),)), schedule=WaitFree()
    ),
    "does not wait for slow workers": made(
        SHARDS, Consistency(FirstOf(first=1), Lag(1)), AT_HOLDER
    ),
    "when its own gradient is applied": made(
        SHARDS, Consistency(Asynchronous(), Lag(1)), AT_HOLDER
    ),
    "results to all workers": made(RELAYED, Consistency(FirstOf(first=1)), AT_HOLDER),
    "only for the workers whose gradients": made(RELAYED, Consistency(Asynchronous()), AT_HOLDER),
    "and servers get dense gradients": made(Cheapest((WHOLE, Route(WHOLE.topology)), ByBytes())),
    "when a worker may begin": made(PEERS, Consistency(Asynchronous(ramp_up=2))),
    "what waits for the next round is the host's": made(
        Route(TwoLevel(), up=Quantized()), update=Update(LocalSteps(mix=0.5), Nesterov())
    ),
    "which is no gradient of the loss": made(SHARDS, update=Update(LocalSteps(), UserOptimizer())),
    "which workers have after steps of their own": made(SHARDS, update=Update(outer=Nesterov())),
    "would mix those of several": made(SHARDS, Consistency(StaleSynchronous()), LOCAL),
    "is a matter of LocalSteps": made(SHARDS, Consistency(gate=Lag(1)), LOCAL),
    "decided for the whole model": made(
        SHARDS,
        Consistency(FirstOf(2)),
        Update(LocalSteps(4, fragments=2, overlap_steps=1), Nesterov(at="server")),
    ),
    "what waits at the holder for its next result": made(
        Route(Sharded(), up=Quantized(), down=OneBit()), update=Update(LocalSteps(4, mix=0.5))
    ),
    "outer weights are averages already": made(
        Route(Sharded(), up=Quantized(), down=Quantized()),
        update=Update(LocalSteps(4, mix=0.5), Nesterov(), average=Ema(0.9)),
    ),
    "no outer gradient is stale": made(SHARDS, Consistency(damping=Constant(0.5)), LOCAL),
    "own weights are lost with it": made(SHARDS, Consistency(All(without_lost=True)), LOCAL),
    "make a round together": made(HOSTS, Consistency(StaleSynchronous()), AT_HOLDER),
    "none of them may be missing": made(HOSTS, Consistency(All(without_lost=True), Lag(2))),
    "only one worker of a host gets these": made(HOSTS, update=STEPS),
    "all tensors have two levels or none": made(Prefer((HOSTS, SHARDS))),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_each_combination_that_makes_no_sense_is_refused_with_a_way_out(reason: str) -> None:
    found = [problem for problem in problems(BROKEN[reason]) if reason in problem.why]
    assert found, [str(problem) for problem in problems(BROKEN[reason])]
    for problem in found:
        assert problem.instead
        assert str(problem) in str(refusal(BROKEN[reason]))


def refusal(strategy: Strategy) -> IncompatibleParts:
    with pytest.raises(IncompatibleParts) as raised:
        compat.check(strategy)
    return raised.value


def test_every_rule_has_an_example() -> None:
    known = {problem.why for strategy in BROKEN.values() for problem in problems(strategy)}
    assert {rule.why for rule in RULES} == known


def test_all_that_is_wrong_is_said_at_once_and_each_reason_once() -> None:
    routes = Prefer((Route(Mesh(), up=Factors()), PEERS))
    text = str(refusal(made(routes, update=AT_HOLDER)))
    assert text.count("there is no server to update weights") == 1
    both = made(PEERS, Consistency(StaleSynchronous()), AT_HOLDER)
    assert "; also on dense/mesh: " in str(refusal(both))


def test_rules_speak_of_facts_that_some_part_states() -> None:
    stated: set[str] = set()
    for strategy in (*BROKEN.values(), *HOLES.values(), *(make() for make in SYSTEMS.values())):
        stated |= strategy.rounds.consistency.facts() | strategy.rounds.update.facts()
        stated |= strategy.rounds.schedule.facts() | strategy.rounds.routes.facts()
        for route in strategy.rounds.routes.routes():
            stated |= route.facts()
    named: Facts = frozenset().union(*(rule.when | rule.any_of | rule.unless for rule in RULES))
    assert named <= stated | {"several routes", "some tensors skip the host"}  # no single part does
    assert stated <= FACTS


@pytest.mark.parametrize("damping", [Constant(0.5), ByAge()])
def test_a_part_may_be_put_in_place_of_another(damping: Any) -> None:
    strategy = parse("async_sgd")
    damped = msgspec.structs.replace(strategy.rounds.consistency, damping=damping)
    assert problems(replaced(strategy, consistency=damped)) == []
