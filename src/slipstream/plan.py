"""The plan: computed from a strategy, the model's tensors and the cluster. A pure value.

Every member of a job computes the same plan, so messages name units and chunks by number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import groupby
from typing import TYPE_CHECKING

from slipstream.codecs import AboutCodec, Above, Filter
from slipstream.consistency import Consistency
from slipstream.errors import ConfigError, IncompatibleRoute
from slipstream.methods import PartialExchange, Rounds
from slipstream.planning.choosing import AnyChooser, Verdict, Ways
from slipstream.planning.costs import LayerShape, Speeds
from slipstream.planning.fragments import deal_fragments
from slipstream.planning.layout import Group, lay_out
from slipstream.planning.table import Row, tabulate
from slipstream.routes import (
    AnyPolicy,
    ByRole,
    ByTensor,
    Cheapest,
    Links,
    Route,
    Rule,
    between_hosts,
)
from slipstream.schedules import Schedule
from slipstream.topologies import Mesh
from slipstream.types import ITEM_BYTES, Chunk, Cluster, Layer, Node, Spec, Unit
from slipstream.updates import LocalSteps, Update

if TYPE_CHECKING:
    from slipstream.strategy import Strategy


@dataclass(frozen=True, slots=True)
class UnitLayout:
    """Everything that is numbered: cut once, for the members at the start.

    Messages name units and chunks by number, so these stay what they are when members leave or
    come; ``assigned`` deals the units to whoever is there.

    ``routes[route_of[i]]`` is tensor i's route. Where a policy chooses in the run, that is the
    dense route, and the layer has a second unit for its compact route.
    """

    strategy: Strategy
    rounds: Rounds
    specs: tuple[Spec, ...]
    routes: tuple[Route, ...]
    route_of: tuple[int, ...]
    chunks: tuple[Chunk, ...]
    units: tuple[Unit, ...]
    places: tuple[tuple[int, int], ...]  # by chunk: its unit, and which of the unit's chunks it is
    priorities: tuple[int, ...]  # by unit, asked for with every message
    fragments: tuple[tuple[int, ...], ...]  # tensors that share rounds; most plans have one

    @classmethod
    def of(cls, strategy: Strategy, specs: Sequence[Spec], cluster: Cluster) -> UnitLayout:
        """Route and cut every tensor; equal arguments give equal layouts on every member.

        Args:
            specs: The model's tensors, in the order of the forward pass.
            cluster: The members at the start. With ``members``, its workers are hosts, and routes
                are those between them.

        Raises:
            IncompatibleRoute: A tensor cannot take its route.
            ConfigError: The strategy is impossible with these tensors.
        """
        rounds = strategy.rounds
        policy = between_hosts(rounds.routes)
        for cheapest in choosing(policy):
            cheapest.check(specs)
        whole = travel_whole(specs, policy, cluster)
        specs = [considered(spec, policy, cluster, whole) for spec in specs]
        given = [policy.candidates(spec, cluster) for spec in specs]
        for spec, candidates in zip(specs, given, strict=True):
            check_dropped(rounds, spec, candidates[-1])
            if trouble := candidates[-1].obstacle(spec):
                raise IncompatibleRoute(
                    f"{spec.name!r} cannot travel {candidates[-1].scheme}: {trouble}"
                )
        # The last candidate is always possible.
        routes = list(dict.fromkeys(candidates[-1] for candidates in given))
        routes += dict.fromkeys(c[0] for c in given if c[0] not in routes)
        route_of = [routes.index(candidates[-1]) for candidates in given]
        fragments = fragments_of(rounds.update, specs)
        fragment_of = {tensor: f for f, tensors in enumerate(fragments) for tensor in tensors}
        groups = [
            Group(
                r,
                s.dtype,
                s.role,
                s.layer or ("" if routes[r].up.splits else s.name),
                routes[r].topology.shares(cluster),
                fragment_of[t],
            )
            for t, (s, r) in enumerate(zip(specs, route_of, strict=True))
        ]
        chunks = lay_out(specs, groups, chunk_bytes=rounds.chunk_bytes)
        compact = {s.layer: routes.index(c[0]) for s, c in zip(specs, given, strict=True)}
        units = units_of(specs, routes, chunks, compact)
        return cls(
            strategy,
            rounds,
            tuple(specs),
            tuple(routes),
            tuple(route_of),
            chunks,
            units,
            places_of(units, len(chunks)),
            priorities_of(units, specs, rounds.schedule),
            fragments,
        )

    def assigned(self, cluster: Cluster) -> Plan:
        """Deal the units to these members, without another number for any of them.

        Args:
            cluster: The members now.

        Raises:
            TooManyServers: There are more servers than chunks.
            ConfigError: The strategy is impossible with so many workers.
        """
        cut = {field.name: getattr(self, field.name) for field in fields(UnitLayout)}
        consistency = consistency_among(self.rounds, cluster)
        holders = deal(self.units, self.routes, self.specs, cluster)
        return Plan(**cut, cluster=cluster, consistency=consistency, holders=holders)


@dataclass(frozen=True, slots=True)
class Plan(UnitLayout):
    """A layout, and who holds each of its units: everything that is fixed before a step."""

    cluster: Cluster
    consistency: Consistency
    holders: tuple[tuple[Node, ...], ...]  # by unit

    # ---- queries of the runtime

    @property
    def update(self) -> Update:
        return self.rounds.update

    @property
    def schedule(self) -> Schedule:
        return self.rounds.schedule

    @property
    def delivers_every_result(self) -> bool:
        """True if every worker applies every result, so results may be increments. False if a
        worker may miss some; results are then full weights."""
        return self.consistency.lockstep or not self.update.holder_applies

    @property
    def keeps_dropped(self) -> bool:
        """Whether a contribution that a round drops returns to the sender's residual. It then
        counts in a later round, so its batch must not be dealt again. (If only some parameters have
        such a route, the other parameters' part of the gradient is lost.)"""
        of_parameters = {
            route
            for spec, route in zip(self.specs, self.route_of, strict=True)
            if spec.role == "parameter"
        }
        return any("up: error feedback" in self.routes[r].up.facts() for r in of_parameters)

    @property
    def weighs_late(self) -> bool:
        """Whether a contribution counts for all rounds that it covers: its own, and those whose
        contributions were dropped and returned to its residual.

        Outer gradients of local steps then make a mean over all local steps that a round contains,
        with the same weight for each. Gradients of single steps count once, in a later round.
        """
        return self.local_steps is not None and self.consistency.drops_late

    @property
    def runs_ahead(self) -> bool:
        """Whether a worker may continue before it has a result, and apply the result later."""
        later = not self.consistency.lockstep or self.update.inner.travels == "steps"
        return later and not self.update.holder_applies and self.partial_exchange is None

    @property
    def counts_rounds(self) -> bool:
        """Whether servers count the job's steps, by rounds of which a worker may miss some; else
        every worker makes every step, and counts them itself."""
        return self.consistency.admit.decided or self.consistency.admit.counts_late

    @property
    def steps_a_round(self) -> int:
        """How many steps of a worker's optimizer a round takes."""
        return 1 if self.local_steps is None else self.local_steps.every

    @property
    def local_steps(self) -> LocalSteps | None:
        """How workers train on weights of their own between rounds, if they do."""
        inner = self.update.inner
        return inner if isinstance(inner, LocalSteps) else None

    @property
    def partial_exchange(self) -> PartialExchange | None:
        """The rule of partial exchange, for these workers; None in other methods."""
        method = self.strategy.method
        if not isinstance(method, PartialExchange):
            return None
        return method.among(self.cluster.workers)

    @property
    def congested_below(self) -> float | None:
        """Bytes/s; a link with less available bandwidth counts as congested. None: not measured."""
        filters = [r.up.select for r in self.routes if isinstance(r.up, Filter)]
        found = [s.congested_below for s in filters if isinstance(s, Above)]
        return max((below for below in found if below is not None), default=None)

    @property
    def chooser(self) -> AnyChooser | None:
        """Chooses between a layer's compact form and its dense route; None if no layer has both."""
        return next((cheapest.by for cheapest in choosing(self.rounds.routes)), None)

    @property
    def unused_rules(self) -> tuple[Rule, ...]:
        """Rules that match no tensor of this model, but would if it were in float32."""
        policy = self.rounds.routes
        policy = policy.parameter if isinstance(policy, ByRole) else policy
        rules = policy.rules if isinstance(policy, ByTensor) else ()
        as_float32 = [replace(spec, dtype="float32") for spec in self.specs]
        return tuple(
            rule
            for rule in rules
            if not any(map(rule.where.fits, self.specs)) and any(map(rule.where.fits, as_float32))
        )

    def route(self, unit: Unit) -> Route:
        return self.routes[unit.route]

    def unit_of(self, chunk: Chunk) -> Unit:
        return self.units[self.places[chunk.index][0]]

    def holders_of(self, chunk: Chunk) -> tuple[Node, ...]:
        return self.holders[self.places[chunk.index][0]]

    def chunks_of(self, node: Node) -> tuple[Chunk, ...]:
        """The chunks whose weights, optimizer state and residuals are at a server."""
        return tuple(chunk for unit in self.held_by(node) for chunk in unit.chunks)

    def held_by(self, node: Node) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if node in self.holders[unit.index])

    def over_links(self) -> tuple[Unit, ...]:
        return tuple(unit for unit in self.units if isinstance(self.route(unit).over, Links))

    def choices(self) -> tuple[Unit, ...]:
        """Layers that are sent in compact form in some steps, and dense in others."""
        return tuple(unit for unit in self.units if unit.layer is not None and not unit.chunks)

    def priority(self, unit: Unit) -> int:
        """A unit's priority, that of its most urgent tensor. Smaller is sent first."""
        return self.priorities[unit.index]

    # ---- the plan as a table

    def ways(self) -> list[Ways]:
        """By tensor: its dense route."""
        cluster = self.cluster
        return [
            Ways(
                cluster.workers,
                cluster.servers if self.routes[route].topology.needs_servers else 0,
                cluster.dedicated,
                to_each(self.routes[route]),
                self._wire_bytes(spec, self.routes[route]) / max(1, spec.nbytes),
                self.steps_a_round,
            )
            for spec, route in zip(self.specs, self.route_of, strict=True)
        ]

    def _wire_bytes(self, spec: Spec, route: Route) -> float:
        partial, workers = self.partial_exchange, self.cluster.workers
        if partial is not None:
            return partial.wire_bytes(spec, workers)
        return route.wire_bytes(spec, workers)

    def verdicts(self, rows: int, speeds: Speeds | None) -> dict[str, Verdict]:
        """The choice for layers with a compact form if each had this many rows."""
        found: dict[str, Verdict] = {}
        ways = self.ways()
        for unit in self.units:
            if unit.layer is None:
                continue
            shape, codec = shape_of(unit.layer), self.route(unit).up
            compact_bytes = self.compact_bytes(unit.layer, codec, rows)
            if unit.chunks:  # there is no choice
                moved = compact_bytes + shape.dense_bytes
                place = self.route(unit).topology.name
                why = f"{codec.name} up, the gradient down"
                found[unit.layer.name] = Verdict(True, moved, None, why, place)
            elif self.chooser is not None:
                chooser = self.chooser.measured(speeds)
                way = ways[unit.layer.weight]
                found[unit.layer.name] = chooser.choose(
                    shape, rows, way, compact_bytes=compact_bytes
                )
        return found

    def compact_bytes(self, layer: Layer, codec: AboutCodec, rows: int) -> float:
        """What a layer's gradient of so many rows takes in a codec's compact form."""
        return codec.wire_bytes(self.specs[layer.weight], self.cluster.workers, rows)

    def rows(self, verdicts: Mapping[str, Verdict], speeds: Speeds | None = None) -> list[Row]:
        """The plan as a table, one row per layer."""
        schemes = [self.routes[route].scheme for route in self.route_of]
        shapes = {u.layer.name: shape_of(u.layer) for u in self.units if u.layer is not None}
        return tabulate(self.specs, schemes, self.ways(), verdicts, shapes, speeds)


def to_each(route: Route) -> float:
    """How often a worker sends what is on the wire to each peer: once on a mesh, else never."""
    return 1.0 if route.topology == Mesh() and isinstance(route.over, Links) else 0.0


def choosing(policy: AnyPolicy) -> list[Cheapest]:
    """The policies within ``policy`` that choose in the run."""
    if isinstance(policy, ByRole):
        return choosing(policy.parameter)
    return [policy] if isinstance(policy, Cheapest) else []


def travel_whole(specs: Sequence[Spec], policy: AnyPolicy, cluster: Cluster) -> dict[str, bool]:
    """By layer: whether all of its tensors may be sent in compact form."""
    found: dict[str, bool] = {}
    for spec in specs:
        if spec.layer:
            compact = policy.candidates(spec, cluster)[0].up.form != "dense"
            found[spec.layer] = found.get(spec.layer, True) and compact
    return found


def considered(spec: Spec, policy: AnyPolicy, cluster: Cluster, whole: Mapping[str, bool]) -> Spec:
    """The spec; without its layer if that layer is not sent in compact form anyway."""
    if policy.candidates(spec, cluster)[0].up.form != "dense":
        if whole.get(spec.layer, True):
            return spec
        other = "the layer's bias travels another way: give all of a layer the same route"
        return replace(spec, layer="", form="", obstacle=other)
    obstacle = ""
    if any(route.up.form != "dense" for route in policy.routes()):
        obstacle = spec.obstacle or ("named in dense" if spec.layer else "")
    return replace(spec, layer="", form="", obstacle=obstacle)


def check_dropped(rounds: Rounds, spec: Spec, route: Route) -> None:
    """Refuse a parameter of which a late worker's local steps would be lost.

    Raises:
        IncompatibleRoute: A round may drop its outer gradient, and the route keeps no residual.
    """
    local = isinstance(rounds.update.inner, LocalSteps) and spec.role == "parameter"
    if local and rounds.consistency.drops_late and "up: error feedback" not in route.up.facts():
        raise IncompatibleRoute(
            f"{spec.name!r} ({spec.dtype}) cannot travel {route.scheme}: a round of the first N "
            "drops the local steps of late workers unless a residual keeps them; route it to "
            "Filter(Above(0.0, decay='constant')) or Quantized(), which take float32, or use "
            "rounds of all workers"
        )


def consistency_among(rounds: Rounds, cluster: Cluster) -> Consistency:
    """The consistency with what depends on the number of workers filled in."""
    try:
        return rounds.consistency.among(cluster.workers)
    except ConfigError as error:
        if not cluster.members:
            raise
        raise ConfigError(
            f"{error} (each is a host: the workers of one aggregate first)"
        ) from error


def fragments_of(update: Update, specs: Sequence[Spec]) -> tuple[tuple[int, ...], ...]:
    """The tensors that make rounds together, by number."""
    if not isinstance(update.inner, LocalSteps):
        return (tuple(range(len(specs))),)
    return deal_fragments(specs, update.inner.fragments)


def units_of(
    specs: Sequence[Spec],
    routes: Sequence[Route],
    chunks: Sequence[Chunk],
    compact: Mapping[str, int],
) -> tuple[Unit, ...]:
    """A unit for every chunk that is sent dense (or for all chunks of a tensor whose contributions
    are not cut), and one for every layer with a compact form."""
    units: list[Unit] = []
    dense = [chunk for chunk in chunks if routes[chunk.route].up.form == "dense"]
    for (route, _), own in groupby(dense, lambda c: (c.route, together(c, routes[c.route]))):
        units.append(Unit(len(units), route, tuple(own)))
    for layer in layers_of(specs):
        route = compact[layer.name]
        of_layer = tuple(
            c for c in chunks if c.route == route and c.segments[0].tensor in layer.tensors
        )
        units.append(Unit(len(units), route, of_layer, layer))
    return tuple(units)


def together(chunk: Chunk, route: Route) -> tuple[str, int]:
    """Equal for chunks that one contribution is to."""
    if route.up.splits:
        return "chunk", chunk.index
    return "tensor", chunk.segments[0].tensor


def places_of(units: Sequence[Unit], chunks: int) -> tuple[tuple[int, int], ...]:
    found = {c.index: (u.index, part) for u in units for part, c in enumerate(u.chunks)}
    return tuple(found[chunk] for chunk in range(chunks))


def priorities_of(
    units: Sequence[Unit], specs: Sequence[Spec], schedule: Schedule
) -> tuple[int, ...]:
    last = max((spec.order for spec in specs), default=0)
    by_tensor = [
        schedule.priority(forward_order=spec.order, backward_order=last - spec.order)
        for spec in specs
    ]
    return tuple(min(by_tensor[tensor] for tensor in unit.tensors) for unit in units)


def layers_of(specs: Sequence[Spec]) -> list[Layer]:
    """The layers that the specs name, in forward order, each from its matrix and its bias."""
    by_name: dict[str, list[int]] = {}
    for tensor, spec in enumerate(specs):
        if spec.layer:
            by_name.setdefault(spec.layer, []).append(tensor)
    layers = []
    for name, tensors in by_name.items():
        weight = next(t for t in tensors if len(specs[t].shape) == 2)
        bias = next((t for t in tensors if len(specs[t].shape) == 1), None)
        spec = specs[weight]
        if spec.form == "":
            raise ConfigError(f"layer {name!r} has no compact form")
        outputs, inputs = reversed(spec.shape) if spec.transposed else spec.shape
        matrix = (outputs, inputs, weight, bias, spec.dtype, spec.transposed)
        layers.append(Layer(name, spec.form, *matrix))
    return layers


def shape_of(layer: Layer) -> LayerShape:
    """The layer's shape for the cost model."""
    bias, item_bytes = layer.bias is not None, ITEM_BYTES[layer.dtype]
    return LayerShape(layer.name, layer.form, layer.outputs, layer.inputs, bias, item_bytes)


def deal(
    units: Sequence[Unit], routes: Sequence[Route], specs: Sequence[Spec], cluster: Cluster
) -> tuple[tuple[Node, ...], ...]:
    """The holders of every unit."""
    holders: list[tuple[Node, ...]] = [()] * len(units)
    # Routes that share a topology are dealt together: a few biases with their own route need not
    # fill every server.
    for topology in dict.fromkeys(route.topology for route in routes):
        lots: dict[int | str, list[Unit]] = {}
        for unit in units:
            if routes[unit.route].topology == topology:
                tensor = unit.tensors[0]
                layer = specs[tensor].layer if topology.whole_layers else ""
                lots.setdefault(layer or unit.index, []).append(unit)
        sizes = [sum(c.nbytes for unit in lot for c in unit.chunks) for lot in lots.values()]
        dealt = topology.deal(sizes, cluster)
        for lot, nodes in zip(lots.values(), dealt, strict=True):
            for unit in lot:
                holders[unit.index] = nodes
    return tuple(holders)
