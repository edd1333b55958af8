"""What ``wire=`` means: the format in which a system sends gradients."""

from __future__ import annotations

from typing import Literal, get_args

from slipstream.codecs import Dense, Quantized
from slipstream.codecs.dense import Wire as DenseWire
from slipstream.errors import ConfigError
from slipstream.routes import ByTensor, Everywhere, Large, Route, Rule
from slipstream.topologies import AnyTopology

Wire = Literal[DenseWire, "int8", "int4"]
# With 4 bits blocks are smaller, so that a large value sets the scale of fewer other values.
QUANTIZED = {"int8": Quantized(8, block=256), "int4": Quantized(4, block=128)}
SMALLEST = 1024  # values; below, the saved bytes are not worth the rounding


def routes_for(
    wire: Wire, topology: AnyTopology, *, back: Literal["dense", "same"] = "dense"
) -> Everywhere | ByTensor:
    """The routes of dense gradients in this format.

    Args:
        wire: "own" is exact; "bfloat16" and "float16" halve the bytes of fp32 and round; "int8" and
            "int4" quantise fp32 parameters of 1,024 values or more, with error feedback, and do not
            change the rest.
        topology: Who holds tensors.
        back: The format of results: exact, or the same as that of gradients.

    Raises:
        ConfigError: The format is unknown.

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
