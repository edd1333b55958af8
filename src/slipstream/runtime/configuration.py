"""What rank 0 tells a server: the plan as plain data, from which the server makes the same plan."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.errors import FrameRefused
from slipstream.strategy import Plan, Road, Route, Update, describe, rebuild
from slipstream.transports.wire import Settings
from slipstream.types import Cluster, Spec

Part = tuple[str, dict[str, Any]]


class OptimizerRecipe(msgspec.Struct, frozen=True):
    """A torch optimizer by name, its settings by group, and the group of every tensor."""

    name: str
    settings: Settings
    group_of: list[int]


class Configuration(msgspec.Struct, frozen=True):
    """Everything a server needs to hold its shard."""

    workers: int
    servers: int
    addresses: dict[str, str]
    processes: dict[str, int]
    specs: list[tuple[str, list[int], str, int, str, str]]
    routes: list[tuple[Part, Part, Part, str]]
    route_of: list[int]
    consistency: Part
    schedule: Part
    update: str
    chunk_bytes: int
    silence_s: float
    optimizer: OptimizerRecipe | None = None
    averaged: float | None = None
    outlives_workers: bool = False
    narrow_below: float | None = None

    @classmethod
    def of(
        cls,
        plan: Plan,
        addresses: dict[str, str],
        processes: dict[str, int],
        silence_s: float,
        optimizer: OptimizerRecipe | None,
    ) -> Configuration:
        return cls(
            workers=plan.cluster.workers,
            servers=plan.cluster.servers,
            addresses=addresses,
            processes=processes,
            specs=[(s.name, list(s.shape), s.dtype, s.order, s.role, s.layer) for s in plan.specs],
            routes=[
                (describe(r.topology), describe(r.push), describe(r.publish), r.road)
                for r in plan.routes
            ],
            route_of=list(plan.route_of),
            consistency=describe(plan.consistency),
            schedule=describe(plan.schedule),
            update=plan.update,
            chunk_bytes=plan.chunk_bytes,
            silence_s=silence_s,
            optimizer=optimizer,
            averaged=plan.averaged,
            outlives_workers=plan.outlives_workers,
            narrow_below=plan.narrow_below,
        )

    def plan(self) -> Plan:
        specs = [
            Spec(
                name,
                tuple(shape),
                dtype,
                order,
                "parameter" if role == "parameter" else "buffer",
                layer,
            )
            for name, shape, dtype, order, role, layer in self.specs
        ]
        routes = []
        for topology, push, publish, road_name in self.routes:
            road: Road = "links" if road_name == "links" else "collective"
            routes.append(Route(rebuild(topology), rebuild(push), rebuild(publish), road))
        update: Update = "server" if self.update == "server" else "worker"
        return Plan.make(
            cluster=Cluster(self.workers, self.servers),
            specs=specs,
            routes=routes,
            route_of=self.route_of,
            consistency=rebuild(self.consistency),
            schedule=rebuild(self.schedule),
            update=update,
            chunk_bytes=self.chunk_bytes,
            averaged=self.averaged,
            outlives_workers=self.outlives_workers,
            narrow_below=self.narrow_below,
        )

    def encode(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def decode(cls, content: Any) -> Configuration:
        try:
            return msgspec.json.decode(content, type=cls)
        except msgspec.MsgspecError as error:
            raise FrameRefused(f"unreadable configuration: {error}") from error
