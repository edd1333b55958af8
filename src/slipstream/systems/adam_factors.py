"""Project Adam's method (Chilimbi and others, 2014), as in the Poseidon paper's comparison.

- What is sent: a fully connected layer's factors up to the one server that holds the layer, its
  whole gradient matrix back to every worker; everything else dense, both ways.
- Topology: sharded servers. A layer is not split among them, so the server of a large layer sends
  its matrix to all workers: the imbalance that Poseidon's figure 10 shows.
- Consistency: rounds of all n workers.
- When: as each layer's backward ends.

References:
    Chilimbi, Suzue, Apacible and Kalyanaraman: Project Adam: Building an Efficient and Scalable
    Deep Learning Training System (2014).
"""

from __future__ import annotations

from slipstream.codecs import Dense, Factors
from slipstream.methods import Rounds
from slipstream.routes import Prefer, Route
from slipstream.strategy import Strategy
from slipstream.topologies import Sharded


def adam_factors() -> Strategy:
    """Send factors to the layer's server, and the gradient matrix back.

    >>> [route.scheme for route in adam_factors().rounds.routes.routes()]
    ['factors/sharded', 'dense/sharded']
    """
    whole = Sharded(whole_layers=True)
    return Strategy(
        "adam_factors",
        Rounds(Prefer((Route(whole, up=Factors("float32")), Route(whole, up=Dense())))),
    )
