"""A strategy maps every tensor to a route and adds one consistency, one schedule, one update.

``Strategy.plan`` turns that into chunks and holders, or refuses with the reason, before anything
starts. A plan is a pure value: every member of a job works out the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from slipstream.codecs import Bounded, Codec, Dense, Drop, OneBit
from slipstream.consistency import (
    Asynchronous,
    BoundedStaleness,
    Consistency,
    Rounds,
    WithinReach,
)
from slipstream.errors import ConfigError, IncompatibleRoute
from slipstream.planning.choosing import Verdict, Ways
from slipstream.planning.costs import Form, Speeds
from slipstream.planning.hybrid import Hybrid
from slipstream.planning.layout import CHUNK_BYTES, Group, Layout, lay_out
from slipstream.planning.one_machine import OneMachine
from slipstream.planning.slices import Slices
from slipstream.planning.table import Row, shapes_of, tabulate
from slipstream.schedules import AfterBackward, Priority, Schedule, WaitFree
from slipstream.topologies import Mesh, Sharded, Topology, Tree
from slipstream.types import LARGEST_CHUNK_BYTES, Chunk, Cluster, Node, Spec

Road = Literal["links", "collective", "memory"]
Update = Literal["worker", "server"]
Travels = Literal["gradients", "steps"]  # what enters a worker's optimizer, or what it makes of it


@dataclass(frozen=True, slots=True)
class Route:
    """The way of one tensor: who holds it, what is pushed, what is published, over what.

    ``links`` are point-to-point messages; ``collective`` lets torch.distributed do the fan-out of
    a mesh; ``memory`` is shared by the processes of one machine.
    """

    topology: Topology
    push: Codec
    publish: Codec
    road: Road = "links"

    @property
    def scheme(self) -> str:
        """What statistics call this route."""
        place = self.topology.name if self.road == "links" else self.road
        return f"{self.push.name}/{place}"

    def check(self, spec: Spec) -> None:
        self.push.check(spec)
        self.publish.check(spec)
        if self.road == "collective" and self.topology != Mesh():
            raise IncompatibleRoute(
                f"{spec.name!r}: collectives leave the result with every worker, which is a mesh; "
                f"route it over links to use {self.topology.name}"
            )


def everywhere(road: Route) -> Callable[[Spec, Cluster], Route]:
    """The same way for every tensor."""

    def route(spec: Spec, cluster: Cluster) -> Route:
        return road

    return route


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that is fixed before the first step."""

    cluster: Cluster
    specs: tuple[Spec, ...]
    routes: tuple[Route, ...]
    route_of: tuple[int, ...]
    consistency: Consistency
    schedule: Schedule
    update: Update
    chunk_bytes: int
    layout: Layout
    holders: tuple[tuple[Node, ...], ...]
    last_order: int  # of the tensor that the forward pass needs last
    hybrid: Hybrid | None = None
    averaged: float | None = None
    clip_norm: float | None = None
    travels: Travels = "gradients"
    outlives_workers: bool = False
    narrow_below: float | None = None
    slices: Slices | None = None

    @classmethod
    def make(
        cls,
        *,
        cluster: Cluster,
        specs: Sequence[Spec],
        routes: Sequence[Route],
        route_of: Sequence[int],
        consistency: Consistency,
        schedule: Schedule,
        update: Update,
        chunk_bytes: int = CHUNK_BYTES,
        hybrid: Hybrid | None = None,
        averaged: float | None = None,
        clip_norm: float | None = None,
        travels: Travels = "gradients",
        outlives_workers: bool = False,
        narrow_below: float | None = None,
        slices: Slices | None = None,
    ) -> Plan:
        groups = [
            Group(
                r,
                spec.dtype,
                spec.role,
                routes[r].push.splits and routes[r].publish.splits,
                spec.layer,
            )
            for spec, r in zip(specs, route_of, strict=True)
        ]
        layout = lay_out(specs, groups, shares=cluster.servers, chunk_bytes=chunk_bytes)
        holders: list[tuple[Node, ...]] = [()] * len(layout.chunks)
        # Routes that share a topology are dealt together: a few biases on a road of their own need
        # not fill every server.
        for topology in dict.fromkeys(route.topology for route in routes):
            lots: dict[int | str, list[Chunk]] = {}
            for chunk in layout.chunks:
                if routes[chunk.route].topology == topology:
                    layer = specs[chunk.segments[0].tensor].layer
                    whole = topology.whole_layers and layer
                    lots.setdefault(layer if whole else chunk.index, []).append(chunk)
            sizes = [sum(chunk.nbytes for chunk in lot) for lot in lots.values()]
            dealt = topology.deal(sizes, cluster)
            for lot, nodes in zip(lots.values(), dealt, strict=True):
                for chunk in lot:
                    holders[chunk.index] = nodes
        return cls(
            cluster,
            tuple(specs),
            tuple(routes),
            tuple(route_of),
            consistency,
            schedule,
            update,
            chunk_bytes,
            layout,
            tuple(holders),
            max((spec.order for spec in specs), default=0),
            hybrid,
            averaged,
            clip_norm,
            travels,
            outlives_workers,
            narrow_below,
            slices,
        )

    @property
    def together(self) -> bool:
        """Whether all workers make every round and apply every result; else results are whole, and
        who has missed some is given what they made of the weights."""
        return self.consistency.lockstep or self.update == "worker"

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        return self.layout.chunks

    def route(self, chunk: Chunk) -> Route:
        return self.routes[chunk.route]

    def held_by(self, node: Node) -> tuple[Chunk, ...]:
        return tuple(chunk for chunk in self.chunks if node in self.holders[chunk.index])

    def ways(self) -> list[Ways]:
        """By tensor: how it travels where it travels dense."""
        cluster = self.cluster
        return [
            Ways(
                cluster.workers,
                cluster.servers if self.routes[route].topology.needs_servers else 0,
                cluster.dedicated,
                self._to_each(self.routes[route]),
            )
            for route in self.route_of
        ]

    def _to_each(self, route: Route) -> float:
        """What part of a tensor a worker sends to every other one; of slices, until it is known how
        many links ask for, as many as there are peers."""
        if route.topology != Mesh() or route.road != "links":
            return 0.0
        peers = max(1, self.cluster.workers - 1)
        return 1.0 if self.slices is None else 1 / (self.slices.partitions or peers)

    def verdicts(
        self, rows: int, speeds: Speeds, forms: Mapping[str, Form] | None = None
    ) -> dict[str, Verdict]:
        """What a hybrid would choose for its layers if each had this many rows."""
        if self.hybrid is None:
            return {}
        chooser, item_bytes = self.hybrid.chooser(speeds), self.hybrid.item_bytes
        ways = dict(zip((spec.layer for spec in self.specs), self.ways(), strict=True))
        return {
            name: chooser.choose(shape, rows, ways[name], item_bytes=item_bytes)
            for name, shape in shapes_of(self.specs, forms).items()
        }

    def rows(
        self,
        verdicts: Mapping[str, Verdict],
        speeds: Speeds | None = None,
        forms: Mapping[str, Form] | None = None,
    ) -> list[Row]:
        """The plan as a table, a row a layer."""
        schemes = [self.routes[route].scheme for route in self.route_of]
        if self.slices is not None:
            schemes = ["slices/mesh"] * len(schemes)
        shapes = shapes_of(self.specs, forms)
        return tabulate(self.specs, schemes, self.ways(), verdicts, shapes, speeds)

    def priority(self, chunk: Chunk) -> int:
        """A chunk is as urgent as its most urgent tensor."""
        last = self.last_order
        orders = [self.specs[segment.tensor].order for segment in chunk.segments]
        return min(self.schedule.priority(forward_order=o, backward_order=last - o) for o in orders)


@dataclass(frozen=True, slots=True)
class Strategy:
    """One point in the design space; ``slipstream.systems`` holds the named ones."""

    name: str
    route: Callable[[Spec, Cluster], Route]
    consistency: Consistency
    schedule: Schedule
    update: Update = "worker"
    chunk_bytes: int = CHUNK_BYTES
    hybrid: Hybrid | None = None  # compact gradients where they are cheaper than the route
    averaged: float | None = None  # how much of the averaged weights stays at every update
    clip_norm: float | None = None  # what a worker's whole gradient is cut to before it leaves
    travels: Travels = "gradients"
    outlives_workers: bool = False  # whether the rest go on when one is lost
    narrow_below: float | None = None  # bytes/s; links with less to spare are narrow
    slices: Slices | None = None  # workers send each other slices of their steps, out of lockstep
    one_machine: OneMachine | None = None  # learners share the memory that weights are in

    def __post_init__(self) -> None:
        if type(self.chunk_bytes) is not int or not 1 <= self.chunk_bytes <= LARGEST_CHUNK_BYTES:
            raise ConfigError(
                f"chunk_bytes={self.chunk_bytes!r}: give a number of bytes, 1 or more, at most "
                f"{LARGEST_CHUNK_BYTES}"
            )
        if (self.consistency.agreed or self.consistency.alone) and self.update != "server":
            raise ConfigError(
                f"{self.name}: workers that do not make every round take the weights from the "
                "servers; use update='server'"
            )
        if self.travels == "steps" and (
            self.update == "server" or self.schedule.leaves_during_backward or self.hybrid
        ):
            raise ConfigError(
                f"{self.name}: a worker's step is known after its optimizer's; use "
                "update='worker' and AfterBackward()"
            )
        if (self.slices is not None) != isinstance(self.consistency, WithinReach):
            raise ConfigError(f"{self.name}: slices and WithinReach() belong together")
        if self.one_machine is not None and not self.consistency.alone:
            raise ConfigError(f"{self.name}: who shares memory trains by itself: Asynchronous()")
        if self.slices is not None and self.travels != "steps":
            raise ConfigError(f"{self.name}: what travels in slices are steps")
        for name in ("averaged", "clip_norm"):
            if not isinstance(value := getattr(self, name), int | float | None):
                raise ConfigError(f"{name}={value!r}: give a number")
        if self.averaged is not None and not 0 < self.averaged < 1:
            raise ConfigError(f"averaged={self.averaged}: choose between 0 and 1, such as 0.9999")
        if self.averaged is not None and self.update != "server":
            raise ConfigError(f"{self.name}: servers average weights only where they update them")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"clip_norm={self.clip_norm}: give a norm above 0")
        if self.clip_norm is not None and self.schedule.leaves_during_backward:
            raise ConfigError("a gradient that is to be clipped leaves after backward: no overlap")
        if self.hybrid is not None and not self.consistency.lockstep:
            raise ConfigError(f"{self.name}: compact gradients are of rounds; use Rounds()")
        if self.hybrid is not None and self.update == "server":
            raise ConfigError(
                f"{self.name}: gradients in compact form never reach a server that could update "
                "weights; use update='worker'"
            )

    def plan(self, specs: Sequence[Spec], cluster: Cluster) -> Plan:
        """Route, check and lay out every tensor."""
        if self.hybrid is None:
            specs = [replace(spec, layer="", obstacle="") for spec in specs]
        else:
            specs = self.hybrid.considered(specs)
        routes: list[Route] = []
        route_of = []
        for spec in specs:
            route = self.route(spec, cluster)
            route.check(spec)
            if self.update == "server" and not route.topology.needs_servers:
                raise IncompatibleRoute(
                    f"{spec.name!r} travels {route.scheme}, which has no server to update it; "
                    "use update='worker'"
                )
            self._check_followed(spec, route)
            if (route.road == "memory") != (self.one_machine is not None):
                raise IncompatibleRoute(
                    f"{spec.name!r} travels {route.scheme}: shared memory is for strategies with "
                    "one_machine=, such as gadei(), and all tensors of one are in it"
                )
            if route not in routes:
                routes.append(route)
            route_of.append(routes.index(route))
        return Plan.make(
            cluster=cluster,
            specs=specs,
            routes=routes,
            route_of=route_of,
            consistency=self.consistency.among(cluster.workers),
            schedule=self.schedule,
            update=self.update,
            chunk_bytes=self.chunk_bytes,
            hybrid=self.hybrid,
            averaged=self.averaged,
            clip_norm=self.clip_norm,
            travels=self.travels,
            outlives_workers=self.outlives_workers,
            narrow_below=self.narrow_below,
            slices=self.slices,
        )

    def _check_followed(self, spec: Spec, route: Route) -> None:
        """Updates that come later, or around a lost worker, come from one place, in one order."""
        followed = not self.consistency.lockstep or self.travels == "steps" or self.outlives_workers
        if self.slices is not None:
            return  # there is no such order
        if followed and not (route.topology.needs_servers and route.road != "collective"):
            raise IncompatibleRoute(
                f"{spec.name!r} travels {route.scheme}, where every worker makes the update for "
                "itself; with staleness, travels='steps' or outlives_workers=True use Sharded()"
            )

    def portrait(self, specs: Sequence[Spec], workers: int) -> list[str]:
        """One line for each thing that must be equal on all ranks."""
        cluster = Cluster(workers, servers=1)
        routes = {repr(self.route(spec, cluster)) for spec in specs}
        return [
            f"strategy {self.name}, update at the {self.update}, chunks of {self.chunk_bytes}",
            f"{self.consistency}, {self.schedule}, {self.hybrid}",
            f"averaged {self.averaged}, clip_norm {self.clip_norm}, {self.travels} travel",
            f"outlives workers: {self.outlives_workers}, narrow below {self.narrow_below}",
            f"{self.slices}, {self.one_machine}",
            *sorted(routes),
        ]

    def needs_servers(self, specs: Sequence[Spec], cluster: Cluster) -> bool:
        return any(self.route(spec, cluster).topology.needs_servers for spec in specs)


PART = "part"  # marks a part within a part
PARTS: dict[str, type[Any]] = {
    part.__name__: part
    for part in (
        AfterBackward,
        Asynchronous,
        Bounded,
        BoundedStaleness,
        Dense,
        Drop,
        Mesh,
        OneBit,
        Priority,
        Rounds,
        Sharded,
        Tree,
        WaitFree,
        WithinReach,
    )
}


def describe(part: Any) -> tuple[str, dict[str, Any]]:
    """A frozen part as plain data, for the wire: its name and its fields."""
    values = {field.name: _plain(getattr(part, field.name)) for field in fields(part)}
    return type(part).__name__, values


def _plain(value: Any) -> Any:
    return {PART: list(describe(value))} if is_dataclass(value) else value


def rebuild(description: Sequence[Any]) -> Any:
    """The part that ``describe`` described."""
    name, values = description
    return PARTS[name](**{field: _built(value) for field, value in values.items()})


def _built(value: Any) -> Any:
    return rebuild(value[PART]) if isinstance(value, dict) and PART in value else value
