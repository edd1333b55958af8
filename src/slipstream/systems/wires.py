"""The formats that ``wire=`` selects, in which a system sends gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire as DenseWire
from slipstream.codecs.quantized import FEW_BITS
from slipstream.errors import ConfigError
from slipstream.routes import ByTensor, Everywhere, Large, Route, Rule
from slipstream.topologies import AnyTopology, TwoLevel
from slipstream.topologies.two_level import Between

Wire = Literal[DenseWire, "int8", "int4"]
SMALLEST = 1024  # values; below, the bytes saved are not worth the rounding


def with_levels(hierarchical: bool, between: Between) -> TwoLevel | Between:
    """Return a topology with two levels, or the one between hosts alone (``hierarchical=``).

    Args:
        hierarchical: Let workers of one host aggregate first; otherwise each takes part by itself.
        between: The topology of hosts, or of workers.

    Raises:
        ConfigError: ``hierarchical`` is neither True nor False.

    >>> from slipstream.topologies import Mesh
    >>> with_levels(True, Mesh())
    TwoLevel(between=Mesh())
    """
    if type(hierarchical) is not bool:
        raise ConfigError(f"hierarchical={hierarchical!r}: choose True or False")
    return TwoLevel(between) if hierarchical else between


def routes_for(
    wire: Wire, topology: AnyTopology, *, back: Literal["dense", "same"] = "dense"
) -> Everywhere | ByTensor:
    """Return the routes of dense gradients in this format.

    Args:
        wire: "same" is exact; "bfloat16" and "float16" halve the bytes of fp32 and round; "int8"
            and "int4" quantise fp32 parameters of 1,024 values or more, with error feedback, and do
            not change the rest.
        topology: The topology of the routes.
        back: The format of results: exact, or the same as that of gradients.

    Raises:
        ConfigError: The format is unknown.

    >>> from slipstream.topologies import Sharded
    >>> routes_for("int8", Sharded()).rules[0].route.scheme
    'int8/sharded'
    """
    check_wire(wire, get_args(Wire))
    if wire == "int8" or wire == "int4":
        return ByTensor((in_few_bits(wire, topology, back=back),), default=Route(topology))
    dense = Dense(wire)
    return Everywhere(Route(topology, up=dense, down=dense if back == "same" else Dense()))


def check_wire(wire: str, known: Sequence[str]) -> None:
    """Check that a format is known.

    Raises:
        ConfigError: The format is unknown.
    """
    if wire not in known:
        raise ConfigError(f"wire={wire!r}: choose one of {', '.join(known)}")


def in_few_bits(
    wire: Literal["int8", "int4"], topology: AnyTopology, *, back: Literal["dense", "same"]
) -> Rule:
    """Return the route of tensors that are worth quantising."""
    few_bits = FEW_BITS[wire]
    down = few_bits if back == "same" else Dense()
    return Rule(Large(SMALLEST), Route(topology, up=few_bits, down=down))
