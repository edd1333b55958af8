"""All-to-all: every worker sends its whole gradient to every peer; no servers.

- Topology: mesh over point-to-point links; each worker sums for itself, in rank order.
- Consistency: rounds of all n workers.
- What is sent: dense gradients, (n−1) models out and (n−1) in. The costly baseline of the papers.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from slipstream.methods import Rounds
from slipstream.strategy import Strategy
from slipstream.systems.wires import Wire, routes_for
from slipstream.topologies import Mesh


def all_to_all(*, wire: Wire = "same") -> Strategy:
    """Send dense gradients over the peer mesh.

    Args:
        wire: The form of gradients on the wire: see ``routes_for``; "same" is exact.

    Raises:
        ConfigError: ``wire`` is unknown.

    >>> all_to_all(wire="bfloat16").rounds.routes.route.scheme
    'dense-bfloat16/mesh'
    """
    return Strategy("all_to_all", Rounds(routes_for(wire, Mesh())))
