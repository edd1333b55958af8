"""A strategy is data: a name, and a method with its parts. It holds no code.

``Strategy.plan`` turns it into chunks, units and holders, or refuses it with a reason, before
training starts. Servers receive the whole strategy, and compute the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from slipstream.compat import check
from slipstream.errors import ConfigError
from slipstream.fields import misplaced
from slipstream.methods import AnyMethod, Rounds
from slipstream.part_modules import is_own, module_names
from slipstream.plan import Plan, UnitLayout
from slipstream.routes import between_hosts
from slipstream.strategy_json import from_json, parts_in, to_plain
from slipstream.topologies import TwoLevel
from slipstream.types import Cluster, Spec

# Names in JSON that earlier versions wrote, by the field that has them.
RESPELLED = {
    "part": {
        "Each": "Asynchronous",
        "Fold": "StaleSynchronous",
        "Off": "Gradients",
        "User": "UserOptimizer",
    },
    "at": {"holder": "server"},
    "wire": {"own": "same"},
}


class Strategy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One point in the design space; ``slipstream.systems`` holds the named ones.

    Args:
        name: The name in logs and metrics.
        method: How workers come by each other's updates: in ``Rounds``, by ``PartialExchange``, or
            by ``SharedMemoryUpdates``.

    >>> from slipstream.routes import Everywhere, Route
    >>> from slipstream.topologies import Mesh
    >>> mine = Strategy("mine", Rounds(Everywhere(Route(Mesh()))))
    >>> Strategy.from_json(mine.to_json()) == mine
    True
    """

    name: str
    method: AnyMethod

    def __post_init__(self) -> None:
        if trouble := misplaced(self):
            raise ConfigError(f"strategy {self.name!r}: {trouble.removeprefix('method.')}")

    @property
    def rounds(self) -> Rounds:
        """The rounds of the method; of other methods, what holds for these and rounds alike."""
        return self.method.as_rounds()

    def plan(self, specs: Sequence[Spec], cluster: Cluster) -> Plan:
        """Route, check and lay out every tensor.

        Args:
            specs: All tensors that workers keep equal.
            cluster: How many workers and servers there are.

        Returns:
            The plan; all members with the same arguments get the same plan.

        Raises:
            IncompatibleParts: Parts of the strategy are incompatible.
            IncompatibleRoute: A tensor cannot take the route chosen for it.
        """
        check(self)
        return UnitLayout.of(self, specs, cluster).assigned(cluster)

    @property
    def two_levels(self) -> bool:
        """Whether workers of one host aggregate first."""
        return any(isinstance(route.topology, TwoLevel) for route in self.rounds.routes.routes())

    def instead_if_absent(self, workers: int) -> tuple[str, ...]:
        """Arguments with which no round waits for workers that are elsewhere in the loop.

        Where a worker may miss rounds, and a round needs more than one, some may. Empty if none
        does so anyway.

        Raises:
            ConfigError: The strategy is impossible with so many workers.
        """
        return self.rounds.consistency.among(workers).admit.instead_if_absent(workers)

    def needs_servers(self, specs: Sequence[Spec], cluster: Cluster) -> bool:
        """Whether any tensor is sent to a server."""
        policy = between_hosts(self.rounds.routes)
        return any(
            route.topology.needs_servers
            for spec in specs
            for route in policy.candidates(spec, cluster)
        )

    @property
    def own_modules(self) -> tuple[str, ...]:
        """The modules that define parts of the user's own."""
        kinds = [type(part) for part in parts_in(self)]
        return tuple(sorted({kind.__module__ for kind in kinds if is_own(kind)}))

    def config_fingerprint(self) -> list[str]:
        """One line for each field, which must be equal on all ranks."""
        method = {name: getattr(self.method, name) for name in self.method.__struct_fields__}
        said = {"name": self.name, "method": type(self.method).__name__} | method
        # Only the JSON form has the modules of the user's own parts, whose repr is theirs.
        own = [each for each in parts_in(self) if is_own(type(each))]
        return [
            *(f"strategy {name}: {value!r}" for name, value in said.items()),
            *(f"strategy part: {to_plain(part)!r}" for part in own),
        ]

    def to_json(self, *, parts: Sequence[str] = ()) -> str:
        """All of it as JSON text.

        Args:
            parts: The modules of parts of your own, such as ``["mypackage.parts"]``.

        Raises:
            ConfigError: A part of your own is in none of these modules, or is not of the kind that
                its field takes; or a value has no JSON form, so that it could not be read back.
        """
        try:
            text = msgspec.json.encode(to_plain(self)).decode()
            read = Strategy.from_json(text, parts=parts)
        except TypeError as error:  # such as numpy's numbers
            raise ConfigError(f"{self.name}: {error}; give Python's own numbers") from error
        except ConfigError as error:
            raise ConfigError(f"{self.name}: a part or a value is out of place: {error}") from error
        if read != self:
            raise ConfigError(f"{self.name}: {self!r} would be read back as {read!r}")
        return text

    @classmethod
    def from_json(cls, text: str | bytes, *, parts: Sequence[str] = ()) -> Strategy:
        """Read back what ``to_json`` wrote.

        Args:
            text: JSON.
            parts: The modules that may be imported for parts of your own that the text names.

        Returns:
            A strategy equal to the one that was written.

        Raises:
            ConfigError: It names unknown parts or fields, or has invalid values.
        """
        modules = module_names(parts)
        try:
            return from_json(text, cls, modules)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ConfigError(
                f"no strategy can be read from this JSON: {error}; "
                f"{respelled(text) or 'write one with strategy.to_json() and compare'}"
            ) from error


def respelled(text: str | bytes) -> str:
    """What to write in place of earlier versions' names in this JSON; empty if it has none."""
    try:
        pending = [msgspec.json.decode(text)]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return ""
    if isinstance(pending[0], dict) and "routes" in pending[0]:
        return 'write its parts as "method": {"part": "Rounds", "routes": …}'
    found: dict[str, str] = {}
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            pending += value.values()
            for field, now in RESPELLED.items():
                name = value.get(field)
                if isinstance(name, str) and name in now:
                    found[name] = now[name]
    return ", ".join(f"write {new!r} for {old!r}" for old, new in sorted(found.items()))
