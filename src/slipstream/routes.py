"""The route of one tensor, and policies that give every tensor its route. Data, never code."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import ClassVar

import msgspec

from slipstream.codecs import AnyCodec, Dense, SegmentCodec
from slipstream.errors import ConfigError
from slipstream.parts import Facts, Part, facts, lists_to_tuples
from slipstream.planning.choosing import AnyChooser, ByTime
from slipstream.planning.choosing import ByBytes as ByBytes
from slipstream.planning.costs import dense_link_bytes
from slipstream.topologies import AnyTopology, Mesh, PeerSharded, TwoLevel
from slipstream.types import Cluster, Spec


class Links(Part, frozen=True):
    """A transport of point-to-point messages.

    >>> from slipstream.topologies import Sharded
    >>> Route(Sharded(), over=Links()).scheme
    'dense/sharded'
    """

    name: ClassVar[str] = "links"

    def facts(self) -> Facts:
        return facts("over links")


class Collective(Part, frozen=True):
    """A transport by torch.distributed's all-reduce, without slipstream's own messages.

    >>> from slipstream.topologies import Mesh
    >>> Route(Mesh(), over=Collective()).scheme
    'dense/collective'
    """

    name: ClassVar[str] = "collective"

    def facts(self) -> Facts:
        return facts("over a collective")


# Every transport that a route may name.
AnyTransport = Links | Collective


class Route(Part, frozen=True):
    """The route of a tensor: its holders, the codecs of contributions and results, the transport.

    Args:
        topology: The holders of the tensor: ``Sharded``, ``Mesh``, ``PeerSharded`` or ``Tree``;
            with ``TwoLevel`` a host's workers aggregate first.
        up: The codec of contributions: ``Dense``, ``OneBit``, ``Quantized``, ``LowRank``,
            ``Filter``, ``Factors``, ``Rows``.
        down: The codec of results.
        over: ``Links`` or ``Collective``.

    >>> from slipstream.topologies import Sharded
    >>> Route(Sharded(), up=Dense("bfloat16")).scheme
    'dense-bfloat16/sharded'
    """

    topology: AnyTopology
    up: AnyCodec = Dense()
    down: SegmentCodec = Dense()
    over: AnyTransport = Links()

    @property
    def scheme(self) -> str:
        """The name of this route in statistics."""
        place = self.topology.name if isinstance(self.over, Links) else self.over.name
        return f"{self.up.name}/{place}"

    def facts(self) -> Facts:
        known = self.topology.facts() | self.up.facts() | self.over.facts()
        if self.up.lossy:
            known |= facts("up: lossy")
        if self.down.lossy:
            known |= facts("down: lossy")
        if "up: error feedback" in self.down.facts():
            known |= facts("down: error feedback")
        if "up: agreed basis" in self.down.facts():
            known |= facts("down: agreed basis")
        if "up: each value rounded" in self.down.facts():
            known |= facts("down: each value rounded")
        if self.down == self.up:
            known |= facts("down: as up")
        return known

    def obstacle(self, spec: Spec) -> str:
        """Return why a tensor cannot take this route, and what to use instead; empty if it can."""
        return self.up.obstacle(spec) or self.down.obstacle(spec)

    def wire_bytes(self, spec: Spec, workers: int) -> float:
        """Return the bytes of a tensor on the wire, over one link, on average over both ways.

        On a mesh contributions are sent to every peer, and results are not sent.
        """
        up = self.up.wire_bytes(spec, workers)
        if self.topology == Mesh():
            return up
        return (up + self.down.wire_bytes(spec, workers)) / 2


class Everywhere(Part, frozen=True):
    """Give every tensor the same route.

    >>> from slipstream.topologies import Sharded
    >>> [route.scheme for route in Everywhere(Route(Sharded())).routes()]
    ['dense/sharded']
    """

    route: Route

    def routes(self) -> tuple[Route, ...]:
        return (self.route,)

    def candidates(self, spec: Spec, cluster: Cluster) -> tuple[Route, ...]:
        return (self.route,)


class Prefer(Part, frozen=True):
    """Give a tensor the first route that can carry it.

    Args:
        given: Routes, the best first; the last one should be able to carry every tensor.

    Raises:
        ConfigError: There is no route.

    >>> from slipstream.codecs import Factors
    >>> from slipstream.topologies import Mesh
    >>> policy = Prefer((Route(Mesh(), up=Factors()), Route(Mesh())))
    >>> conv = Spec("conv.weight", (8, 3, 3, 3), "float32", 0)
    >>> [route.scheme for route in policy.candidates(conv, Cluster(workers=4))]
    ['dense/mesh']
    """

    given: tuple[Route, ...]

    def __post_init__(self) -> None:
        lists_to_tuples(self)
        if not self.given:
            raise ConfigError("Prefer() needs at least one route")

    def routes(self) -> tuple[Route, ...]:
        return self.given

    def candidates(self, spec: Spec, cluster: Cluster) -> tuple[Route, ...]:
        fit = [route for route in self.given if not route.obstacle(spec)]
        return (fit[0] if fit else self.given[-1],)


class Large(Part, frozen=True):
    """A condition: parameters in fp32 with at least so many values and dimensions, and this name.

    Args:
        numel: The smallest number of values.
        dims: The smallest number of dimensions.
        pattern: A pattern of names, as in a shell: ``*`` matches anything.

    >>> Large(1000, pattern="fc*").fits(Spec("fc.weight", (64, 64), "float32", 0))
    True
    """

    numel: int = 1024
    dims: int = 0
    pattern: str = "*"

    def fits(self, spec: Spec) -> bool:
        is_large = spec.numel >= self.numel and len(spec.shape) >= self.dims
        right_kind = spec.role == "parameter" and spec.dtype == "float32"
        return is_large and right_kind and fnmatchcase(spec.name, self.pattern)


class Rule(Part, frozen=True):
    """Give tensors that match ``where`` the ``route``: one line of ``ByTensor``.

    Args:
        where: The condition on tensors.
        route: Their route; or ``Prefer``, the first of several that can carry them.

    >>> from slipstream.topologies import Mesh
    >>> Rule(Large(pattern="fc*"), Route(Mesh())).route.scheme
    'dense/mesh'
    """

    where: Large
    route: Route | Prefer

    def routes(self) -> tuple[Route, ...]:
        return (self.route,) if isinstance(self.route, Route) else self.route.routes()

    def candidates(self, spec: Spec, cluster: Cluster) -> tuple[Route, ...]:
        if isinstance(self.route, Route):
            return (self.route,)
        return self.route.candidates(spec, cluster)


class ByTensor(Part, frozen=True):
    """Give a tensor the route of the first rule that matches, else the default.

    >>> from slipstream.codecs import OneBit
    >>> from slipstream.topologies import Sharded
    >>> bits = Route(Sharded(), up=OneBit(), down=OneBit())
    >>> policy = ByTensor((Rule(Large(1024, dims=2), bits),), default=Route(Sharded()))
    >>> bias = Spec("fc.bias", (4096,), "float32", 0)
    >>> [route.scheme for route in policy.candidates(bias, Cluster(workers=2, servers=2))]
    ['dense/sharded']
    """

    rules: tuple[Rule, ...]
    default: Route

    def __post_init__(self) -> None:
        lists_to_tuples(self)

    def routes(self) -> tuple[Route, ...]:
        return (*(route for rule in self.rules for route in rule.routes()), self.default)

    def candidates(self, spec: Spec, cluster: Cluster) -> tuple[Route, ...]:
        fit = (r.candidates(spec, cluster) for r in self.rules if r.where.fits(spec))
        return next(fit, (self.default,))


class Cheapest(Part, frozen=True):
    """Give every layer, in every step, the cheapest of the routes (Poseidon).

    The plan chooses one of the dense routes. For a layer with a compact form, ``by``
    chooses between that form and the dense route before every forward pass.

    Args:
        given: Routes, of which one at least is dense; of two that cost the same, the better one
            first. A ``Rule`` instead of a route limits it to the tensors that fit.
        by: ``ByTime``, which predicts seconds, or ``ByBytes``, the paper's own rule.
        dense: Names of layers that are always sent dense, or patterns of them such as "head.*".

    Raises:
        ConfigError: No route is dense.

    >>> from slipstream.codecs import Factors
    >>> from slipstream.topologies import Mesh
    >>> policy = Cheapest((Route(Mesh(), up=Factors()), Route(Mesh(), over=Collective())))
    >>> fc = Spec("fc.weight", (64, 64), "float32", 0, layer="fc", form="factors")
    >>> [route.scheme for route in policy.candidates(fc, Cluster(workers=4))]
    ['factors/mesh', 'dense/collective']
    """

    given: tuple[Route | Rule, ...]
    by: AnyChooser = ByTime()
    dense: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        lists_to_tuples(self)
        if not any(isinstance(r, Route) and r.up.form == "dense" for r in self.given):
            raise ConfigError("Cheapest() needs a dense route, for tensors without another form")

    def facts(self) -> Facts:
        return facts("chosen in the run")

    def routes(self) -> tuple[Route, ...]:
        return tuple(route for each in self.given for route in routes_of(each))

    def candidates(self, spec: Spec, cluster: Cluster) -> tuple[Route, ...]:
        routes: list[Route] = []
        for each in self.given:
            if isinstance(each, Route):
                routes.append(each)
            elif each.where.fits(spec):
                routes += each.candidates(spec, cluster)
        dense = [route for route in routes if route.up.form == "dense"]
        dense = [route for route in dense if not route.obstacle(spec)] or dense
        compact = [r for r in routes if r.up.form != "dense" and not r.obstacle(spec)]
        if any(fnmatchcase(spec.layer, pattern) for pattern in self.dense):
            compact = []
        return (*compact[:1], cheapest_dense(dense, spec, cluster))

    def check(self, specs: Sequence[Spec]) -> None:
        """Check that the model has a layer that each name or pattern in ``dense`` fits.

        Raises:
            ConfigError: A name or pattern fits no layer.
        """
        known = {spec.layer for spec in specs if spec.layer}
        known |= {spec.name.rpartition(".")[0] for spec in specs}
        for name in self.dense:
            if not any(fnmatchcase(layer, name) for layer in known):
                raise ConfigError(f"dense={name!r}: the model has no such layer")


class ByRole(Part, frozen=True):
    """Give parameters one policy, and buffers such as batch-norm statistics another.

    >>> from slipstream.topologies import Mesh
    >>> reduced, sent = Route(Mesh(), over=Collective()), Route(Mesh())
    >>> mean = Spec("norm.running_mean", (64,), "float32", 0, role="buffer")
    >>> policy = ByRole(parameter=Everywhere(reduced), buffer=Everywhere(sent))
    >>> [route.scheme for route in policy.candidates(mean, Cluster(workers=4))]
    ['dense/mesh']
    """

    parameter: Everywhere | Prefer | ByTensor | Cheapest
    buffer: Everywhere | Prefer | ByTensor

    def facts(self) -> Facts:
        return self.parameter.facts() | self.buffer.facts()

    def routes(self) -> tuple[Route, ...]:
        return (*self.parameter.routes(), *self.buffer.routes())

    def candidates(self, spec: Spec, cluster: Cluster) -> tuple[Route, ...]:
        policy = self.parameter if spec.role == "parameter" else self.buffer
        return policy.candidates(spec, cluster)


# Every policy that a strategy may name. ``routes`` returns all routes that it may give to any
# tensor; ``candidates`` those for one tensor, best first. The plan keeps those that are possible.
AnyPolicy = Everywhere | Prefer | ByTensor | Cheapest | ByRole


def cheapest_dense(routes: Sequence[Route], spec: Spec, cluster: Cluster) -> Route:
    """Return the dense route, by servers or like a ring, with fewer bytes over the busiest link.

    If all values have the same size, dedicated servers need fewer bytes if there are enough of
    them. Workers that hold shares need as many as a ring.
    """
    like_a_ring = [
        route
        for route in routes
        if isinstance(route.over, Collective) or isinstance(route.topology, PeerSharded)
    ]
    served = [route for route in routes if route.topology.needs_servers]
    if not like_a_ring or not served:
        return routes[0]
    n = cluster.workers
    servers = cluster.servers if cluster.dedicated else min(cluster.servers, n)  # hosts with one
    ring_bytes, shard_bytes = (each[0].wire_bytes(spec, n) for each in (like_a_ring, served))
    ring = dense_link_bytes(ring_bytes, n, 0, dedicated=False)
    shards = dense_link_bytes(shard_bytes, n, servers, dedicated=cluster.dedicated)
    return served[0] if shards < ring else like_a_ring[0]


def between_hosts(policy: AnyPolicy) -> AnyPolicy:
    """Return the policy that hosts follow: the topologies within ``TwoLevel``.

    Args:
        policy: Any policy.

    Returns:
        The same policy if no route has two levels.
    """
    if isinstance(policy, ByRole):
        return ByRole(between_hosts(policy.parameter), between_hosts(policy.buffer))  # type: ignore[arg-type]
    if isinstance(policy, ByTensor):
        return ByTensor(tuple(map(_rule_between, policy.rules)), _between(policy.default))
    if isinstance(policy, Everywhere):
        return Everywhere(_between(policy.route))
    if isinstance(policy, Prefer):
        return Prefer(tuple(map(_between, policy.given)))
    given = (_between(e) if isinstance(e, Route) else _rule_between(e) for e in policy.given)
    return msgspec.structs.replace(policy, given=tuple(given))


def _between(route: Route) -> Route:
    if not isinstance(route.topology, TwoLevel):
        return route
    return msgspec.structs.replace(route, topology=route.topology.between)


def _rule_between(rule: Rule) -> Rule:
    if isinstance(rule.route, Route):
        return Rule(rule.where, _between(rule.route))
    return Rule(rule.where, Prefer(tuple(map(_between, rule.route.given))))


def routes_of(given: Route | Rule) -> tuple[Route, ...]:
    """Return all routes of a line of ``Cheapest``."""
    return (given,) if isinstance(given, Route) else given.routes()


def dense_only(policy: AnyPolicy) -> AnyPolicy:
    """Return the policy without the routes of factors and rows.

    Args:
        policy: Any policy.

    Returns:
        A policy that gives every tensor the next best dense route.

    Raises:
        ConfigError: Some tensors have no dense route.
    """
    if isinstance(policy, ByRole):
        return ByRole(dense_only(policy.parameter), dense_only(policy.buffer))  # type: ignore[arg-type]
    if isinstance(policy, ByTensor):
        dense_rules = (
            rule for rule in policy.rules if all(r.up.form == "dense" for r in rule.routes())
        )
        rules = tuple(dense_rules)
        require_dense([policy.default])
        return ByTensor(rules, policy.default)
    dense = tuple(route for route in policy.routes() if route.up.form == "dense")
    require_dense(dense)
    if isinstance(policy, Cheapest):
        forms = [[r.up.form for r in routes_of(each)] for each in policy.given]
        kept = zip(policy.given, forms, strict=True)
        return Cheapest(tuple(each for each, form in kept if set(form) == {"dense"}), policy.by)
    return Prefer(dense) if isinstance(policy, Prefer) else policy


def require_dense(routes: Sequence[Route]) -> None:
    if not any(route.up.form == "dense" for route in routes):
        raise ConfigError(
            "it knows no dense route, and with several models or optimizers layers are sent dense: "
            "add one, such as Prefer((Route(Mesh(), up=Factors()), Route(Mesh())))"
        )
