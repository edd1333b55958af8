"""What ``wire=`` means: in which form the gradients of a system travel."""

from __future__ import annotations

from typing import Literal, get_args

from slipstream.codecs import Dense, Quantized
from slipstream.codecs.dense import Wire as DenseWire
from slipstream.errors import ConfigError
from slipstream.routes import ByTensor, Everywhere, Large, Route, Rule
from slipstream.topologies import AnyTopology, Mesh, Sharded, TwoLevel

Wire = Literal[DenseWire, "int8", "int4"]
Hosts = Literal["first", "flat"]
# Of 4 bits, smaller blocks: a large value leaves fewer of its neighbours without a step.
QUANTIZED = {"int8": Quantized(8, block=256), "int4": Quantized(4, block=128)}
SMALLEST = 1024  # values; below, the bytes saved are not worth the rounding


def with_hosts(hosts: Hosts, between: Sharded | Mesh) -> TwoLevel | Sharded | Mesh:
    """What ``hosts=`` means.

    Args:
        hosts: "first": workers of one host aggregate first; "flat": each takes part by itself.
        between: The topology of hosts, or of workers.

    Raises:
        ConfigError: It is neither.

    >>> with_hosts("first", Mesh())
    TwoLevel(between=Mesh(), inside=OneHolder())
    """
    if hosts not in get_args(Hosts):
        raise ConfigError(f"hosts={hosts!r}: choose 'first' or 'flat'")
    return TwoLevel(between) if hosts == "first" else between


def routes_for(
    wire: Wire, topology: AnyTopology, *, back: Literal["dense", "same"] = "dense"
) -> Everywhere | ByTensor:
    """The routes of dense gradients in this form.

    Args:
        wire: "own" is exact; "bfloat16" and "float16" halve the bytes of fp32 and round; "int8" and
            "int4" quantise fp32 parameters of 1,024 values or more, with error feedback, and leave
            the rest as it is.
        topology: Who holds tensors.
        back: In which form results return: exact, or as the gradients went.

    Raises:
        ConfigError: There is no such form.

    >>> from slipstream.topologies import Sharded
    >>> routes_for("int8", Sharded()).rules[0].route.scheme
    'int8/sharded'
    """
    if wire not in get_args(Wire):
        raise ConfigError(f"wire={wire!r}: choose one of {', '.join(get_args(Wire))}")
    if wire == "int8" or wire == "int4":
        few_bits = QUANTIZED[wire]
        route = Route(topology, up=few_bits, down=few_bits if back == "same" else Dense())
        return ByTensor((Rule(Large(SMALLEST), route),), default=Route(topology))
    dense = Dense(wire)
    return Everywhere(Route(topology, up=dense, down=dense if back == "same" else Dense()))
