"""Which parts go together: facts that parts state about themselves, and rules over them.

Every part says what is true of it (``Part.facts``). A rule names facts that do not go together, why
not, and what to do instead. ``check`` is asked before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from slipstream.errors import ConfigError, IncompatibleParts
from slipstream.parts import NO_FACTS, Facts, facts

if TYPE_CHECKING:
    from slipstream.strategy import Strategy


@dataclass(frozen=True, slots=True)
class Rule:
    """A combination that makes no sense: why, and what to do instead.

    A strategy breaks it if all facts of ``when`` hold, at least one of ``any_of`` (if there are
    any), and none of ``unless``.
    """

    when: Facts
    why: str
    instead: str
    any_of: Facts = NO_FACTS
    unless: Facts = NO_FACTS

    def broken_by(self, known: Facts) -> bool:
        chosen = not self.any_of or self.any_of & known
        return self.when <= known and bool(chosen) and not self.unless & known


@dataclass(frozen=True, slots=True)
class Problem:
    """One rule that a strategy breaks, on one of its routes."""

    scheme: str
    why: str
    instead: str

    def __str__(self) -> str:
        return f"on {self.scheme}: {self.why}; {self.instead}"


SERVERS_UPDATE = "let servers update and send weights: Update(outer=User(at='holder'))"

RULES = (
    # ---- A worker may miss results.
    Rule(
        facts("rounds of the first N", "workers update"),
        "a late worker misses results; where workers update, results are increments, of which "
        "none may be missed",
        SERVERS_UPDATE,
    ),
    Rule(
        facts("each gradient is an update", "workers update", "servers hold"),
        "a worker gets the results of its own gradients only; where workers update, it would miss "
        "the other workers' increments",
        SERVERS_UPDATE,
    ),
    Rule(
        facts("workers relay"),
        "a tree sends results to all workers, but these are only for the workers whose gradients "
        "they contain",
        "use Sharded()",
        any_of=facts("rounds of the first N", "each gradient is an update"),
    ),
    Rule(
        facts("rounds of the first N", "may run ahead"),
        "a round of the first N does not wait for slow workers, so there is nothing to run ahead "
        "of",
        "use Lag(0), or Fold()",
    ),
    Rule(
        facts("each gradient is an update", "may run ahead"),
        "a worker continues when its own gradient is applied, so there is nothing to run ahead of",
        "use Lag(0)",
    ),
    # ---- Every worker holds every tensor.
    Rule(
        facts("the holder updates", "every worker holds"),
        "every worker holds the tensor: there is no server to update weights",
        "use User(at='worker'), or Sharded()",
    ),
    Rule(
        facts("every worker holds", "each gradient is an update"),
        "workers would apply gradients in different orders, and their weights would drift apart",
        "use Sharded(), All(), or up=Filter(Rotate())",
        unless=facts("up: partial exchange"),
    ),
    Rule(
        facts("every worker holds", "rounds of the first N"),
        "no server decides for all workers which gradients make a round",
        "use Sharded()",
    ),
    Rule(
        facts("every worker holds", "stale-synchronous rounds"),
        "workers would count different gradients in a round, and their weights would drift apart",
        "use All() with the same Lag(), or Sharded()",
    ),
    Rule(
        facts("every worker holds", "survives lost workers"),
        "workers may have received different parts of what a lost worker sent",
        "use Sharded()",
        unless=facts("up: partial exchange"),
    ),
    Rule(
        facts("every worker holds", "over links", "down: lossy"),
        "every worker computes the result for itself, so nothing is sent back",
        "use down=Dense()",
    ),
    # ---- Two levels: the workers of a host aggregate first.
    Rule(
        facts("hosts aggregate first", "some tensors skip the host"),
        "one worker of a host exchanges for all of them, so all tensors have two levels or none",
        "use TwoLevel() for every route",
    ),
    Rule(
        facts("hosts aggregate first"),
        "a host's workers make a round together, and contribute their sum",
        "use Consistency(All()), or one level: between= of TwoLevel()",
        unless=facts("rounds of all workers"),
    ),
    Rule(
        facts("hosts aggregate first"),
        "a host's workers share one result, which all of them need before the next round, and none "
        "of them may be missing",
        "use Consistency(All(), Lag(0)), or one level: between= of TwoLevel()",
        any_of=facts("may run ahead", "survives lost workers"),
    ),
    Rule(
        facts("hosts aggregate first", "the holder updates"),
        "a host's workers share mean gradients, not weights",
        "use User(at='worker'), or one level: between= of TwoLevel()",
    ),
    Rule(
        facts("hosts aggregate first", "update deltas are sent"),
        "a host's workers share mean gradients, not update deltas",
        "use Update(inner=Off()), or one level: between= of TwoLevel()",
    ),
    # ---- Collectives.
    Rule(
        facts("over a collective"),
        "a collective leaves the result with every worker, which is a mesh",
        "use Mesh(), or over=Links()",
        unless=facts("every worker holds"),
    ),
    Rule(
        facts("over a collective"),
        "a collective sums dense values",
        "use up=Dense() and down=Dense(), or over=Links()",
        any_of=facts("up: error feedback", "up: compact form", "down: error feedback"),
    ),
    Rule(
        facts("over a collective"),
        "a collective needs every worker in every round",
        "use Consistency(All()), or over=Links()",
        unless=facts("rounds of all workers"),
    ),
    Rule(
        facts("over a collective", "may run ahead"),
        "a collective ends when every worker has joined it, so no worker can run ahead",
        "use Lag(0), or over=Links()",
    ),
    Rule(
        facts("over a collective", "update deltas are sent"),
        "update deltas are applied in the order in which messages bring them, and a collective "
        "sends no messages",
        "use Update(inner=Off()), or over=Links()",
    ),
    Rule(
        facts("over a collective", "survives lost workers"),
        "a collective cannot continue without a lost worker",
        "use All(), or over=Links() with Sharded()",
    ),
    # ---- Factors and rows of whole layers.
    Rule(
        facts("up: compact form"),
        "a layer's gradient is computed from all of its factors or rows, which must be in one "
        "place",
        "use Sharded(whole_layers=True), or Mesh()",
        unless=facts("layers stay whole"),
    ),
    Rule(
        facts("up: compact form", "update deltas are sent"),
        "factors and rows are forms of a gradient, not of an update delta",
        "use Update(inner=Off()), or up=Dense()",
    ),
    Rule(
        facts("up: compact form", "clips"),
        "a gradient's norm is not known while it is sent as factors or rows",
        "use up=Dense()",
    ),
    Rule(
        facts("chosen for each step"),
        "Cheapest() needs all workers to choose the same route for a layer in every round",
        "use Consistency(All(), Lag(0)), or Prefer() instead of Cheapest()",
        unless=facts("rounds of all workers"),
    ),
    Rule(
        facts("chosen for each step"),
        "Cheapest() needs all workers to choose the same route for a layer in every round",
        "use Consistency(All(), Lag(0)), or Prefer() instead of Cheapest()",
        any_of=facts("may run ahead", "survives lost workers"),
    ),
    Rule(
        facts("chosen for each step", "the holder updates"),
        "gradients sent as factors or rows do not reach the server that updates the layer when its "
        "gradient is dense",
        "use User(at='worker'), or Prefer() with Sharded(whole_layers=True)",
    ),
    Rule(
        facts("chosen for each step", "up: compact form"),
        "with Cheapest() factors and rows go from worker to worker, and servers get dense "
        "gradients only",
        "use Mesh() for factors and rows, or Prefer() instead of Cheapest()",
        unless=facts("every worker holds"),
    ),
    # ---- The way down.
    Rule(
        facts("down: lossy", "the holder updates"),
        "weights that are rounded on the way down stay rounded, and the errors add up",
        "use down=Dense()",
    ),
    Rule(
        facts("down: partial exchange"),
        "a result is sent once, so entries that are left out would never be sent",
        "use down=Filter(Above()), or down=Dense()",
    ),
    Rule(
        facts("down: nothing is sent"),
        "no worker would get the result",
        "use down=Dense()",
        unless=facts("up: partial exchange", "in shared memory"),
    ),
    # ---- What is sent, and who applies it.
    Rule(
        facts("update deltas are sent", "leaves during backward"),
        "an update delta is known only after the optimizer's step",
        "use AfterBackward()",
    ),
    Rule(
        facts("update deltas are sent", "the holder updates"),
        "update deltas are added where the optimizer has run, which is at the workers",
        "use outer=Add(at='worker')",
    ),
    Rule(
        facts("update deltas are sent", "the optimizer applies the result"),
        "an update delta comes from an optimizer, so it is added, not used for another step",
        "use outer=Add(at='worker')",
    ),
    Rule(
        facts("gradients are sent", "adds the result"),
        "a gradient that is added to the weights would have no learning rate",
        "use outer=User(), or inner=UserSteps()",
    ),
    Rule(
        facts("deltas grow with workers"),
        "growth= and warm_steps= scale each worker's own update deltas, but here their mean is "
        "added",
        "use Add() without growth= and warm_steps=, or up=Filter(Rotate())",
        unless=facts("up: partial exchange"),
    ),
    Rule(
        facts("keeps its own update"),
        "an update that the worker keeps would come back as part of the mean, and count twice",
        "use UserSteps(own='returned'), or up=Filter(Rotate())",
        unless=facts("up: partial exchange"),
    ),
    Rule(
        facts("damped by age", "workers update"),
        "only the holder of the weights knows how old a gradient is",
        "use Constant(), or User(at='holder')",
    ),
    Rule(
        facts("damped", "rounds of all workers", "workers update"),
        "in rounds of all workers no gradient is stale",
        "leave the damping out, and set the learning rate instead",
        unless=facts("may run ahead", "update deltas are sent"),
    ),
    Rule(
        facts("damped", "up: partial exchange"),
        "peers add a worker's update deltas as they are",
        "leave the damping out, and set the learning rate instead",
    ),
    Rule(
        facts("ramps up"),
        "only a server counts updates, and knows when a worker may begin",
        "leave ramp_up= out, or use Sharded()",
        unless=facts("servers hold"),
    ),
    Rule(
        facts("clips", "leaves during backward"),
        "the norm of the whole gradient is known only after backward",
        "use AfterBackward(), which is overlap=False",
    ),
    # ---- Partial exchange (Ako): partitions of accumulated updates, from worker to worker.
    Rule(
        facts("up: partial exchange"),
        "partitions are sent whenever the link is free",
        "use schedule=Merging()",
        unless=facts("leaves when the link is free"),
    ),
    Rule(
        facts("leaves when the link is free"),
        "only partitions of accumulated updates may leave at any time",
        "use up=Filter(Rotate()), or another schedule",
        unless=facts("up: partial exchange"),
    ),
    Rule(
        facts("up: partial exchange"),
        "partitions are sent from worker to worker",
        "use Route(Mesh(), up=Filter(Rotate()), down=InPlace())",
        unless=facts("every worker holds"),
    ),
    Rule(
        facts("up: partial exchange"),
        "a worker has applied its own update already, and only its peers add it",
        "use Update(inner=UserSteps(own='kept'), outer=Add(at='worker'))",
        unless=facts("keeps its own update"),
    ),
    Rule(
        facts("up: partial exchange"),
        "partitions belong to no round",
        "use Consistency(Each(), LagBehindPeers())",
        unless=facts("bounded lead over peers"),
    ),
    Rule(
        facts("up: partial exchange"),
        "partitions belong to no round",
        "use Consistency(Each(), LagBehindPeers())",
        unless=facts("each gradient is an update"),
    ),
    Rule(
        facts("up: partial exchange"),
        "peers add partitions as they arrive, and no result is sent back",
        "use down=InPlace()",
        unless=facts("down: nothing is sent"),
    ),
    Rule(
        facts("up: partial exchange", "up: shorter values"),
        "partitions are sent as float32, and are not compressed",
        "use Filter(Rotate()) without values= and squeeze=",
    ),
    Rule(
        facts("up: partial exchange", "several routes"),
        "partitions are cut from all parameters as one vector",
        "use Everywhere() with one route",
    ),
    Rule(
        facts("bounded lead over peers"),
        "only messages with partitions tell a worker how many steps its peers have made",
        "use Lag(), or up=Filter(Rotate())",
        unless=facts("up: partial exchange"),
    ),
    # ---- Shared memory.
    Rule(
        facts("waits for nobody"),
        "over links, gradients would queue up without limit",
        "use Lag(0), or over=SharedMemory()",
        unless=facts("in shared memory"),
    ),
    Rule(
        facts("one process holds"),
        "one process can hold all weights only in shared memory",
        "use over=SharedMemory(), or Sharded()",
        unless=facts("in shared memory"),
    ),
    Rule(
        facts("in shared memory"),
        "in shared memory every gradient is an update of its own",
        "use Consistency(Each(), Free())",
        unless=facts("each gradient is an update"),
    ),
    Rule(
        facts("in shared memory"),
        "in shared memory a worker waits only when its slots are full",
        "use Consistency(Each(), Free())",
        unless=facts("waits for nobody"),
    ),
    Rule(
        facts("in shared memory"),
        "weights in shared memory have one owner",
        "use OneHolder()",
        unless=facts("one process holds"),
    ),
    Rule(
        facts("in shared memory"),
        "workers read weights in shared memory where they are, so nothing is sent back",
        "use down=InPlace()",
        unless=facts("down: nothing is sent"),
    ),
    Rule(
        facts("in shared memory"),
        "backward writes gradients into shared memory as they are (used rows of embeddings only)",
        "use up=Dense()",
        any_of=facts("up: lossy", "up: compact form"),
    ),
    Rule(
        facts("in shared memory", "several routes"),
        "all tensors of a model are in one shared memory",
        "use Everywhere() with one route",
    ),
    Rule(
        facts("in shared memory", "update deltas are sent"),
        "backward writes gradients, not update deltas, into shared memory",
        "use Update(inner=Off())",
    ),
    Rule(
        facts("in shared memory", "averages"),
        "weights in shared memory change all the time, and nobody averages them",
        "leave out averaged=, or use async_sgd()",
    ),
    Rule(
        facts("in shared memory", "clips"),
        "gradients are in shared memory before their norm is known",
        "leave out clip_norm=, or use async_sgd()",
    ),
    Rule(
        facts("in shared memory", "leaves during backward"),
        "a slot in shared memory is handed to the server as a whole",
        "use AfterBackward()",
    ),
    Rule(
        facts("in shared memory", "damped"),
        "the server in shared memory applies all gradients with the same learning rate",
        "leave the damping out, or use async_sgd()",
    ),
)


def problems(strategy: Strategy) -> list[Problem]:
    """Every rule that a strategy breaks, by route.

    Args:
        strategy: Any composition of parts.

    Returns:
        The problems; none if the parts go together.

    >>> from slipstream import systems
    >>> problems(systems.push_pull())
    []
    """
    common = strategy.consistency.facts() | strategy.update.facts() | strategy.schedule.facts()
    common |= strategy.routes.facts()
    routes = dict.fromkeys(strategy.routes.routes())
    if len(routes) > 1:
        common |= facts("several routes")
    levels = {"hosts aggregate first" in route.facts() for route in routes}
    if len(levels) > 1:
        common |= facts("some tensors skip the host")
    found: dict[str, Problem] = {}
    for route in routes:
        known = common | route.facts()
        for rule in RULES:
            if rule.broken_by(known):
                problem = Problem(route.scheme, rule.why, rule.instead)
                found.setdefault(rule.why + rule.instead, problem)
    return list(found.values())


def check(strategy: Strategy) -> None:
    """Refuse a strategy whose parts do not go together.

    Args:
        strategy: Any composition of parts.

    Raises:
        IncompatibleParts: A ConfigError with every reason, and what to do instead.

    >>> from slipstream import Everywhere, Mesh, Route, Strategy, Update, User
    >>> check(Strategy("mine", Everywhere(Route(Mesh())), update=Update(outer=User(at="holder"))))
    Traceback (most recent call last):
    ...
    slipstream.errors.IncompatibleParts: mine on dense/mesh: every worker holds the tensor: there \
is no server to update weights; use User(at='worker'), or Sharded()
    """
    if not hasattr(strategy, "consistency"):
        raise ConfigError(
            f"compat.check takes a strategy, such as slipstream.push_pull(), not {strategy!r}"
        )
    if found := problems(strategy):
        raise IncompatibleParts(f"{strategy.name} {'; also '.join(map(str, found))}")
