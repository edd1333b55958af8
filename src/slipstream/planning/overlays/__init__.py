"""Over which trees servers broadcast, and how long that would take. Pure.

``choose_overlay`` compares a star, rotated chains and rotated trees on a ``Network``; ``p3`` and
``counts`` are the programs behind the trees.
"""

from slipstream.planning.overlays.choosing import (
    Candidate,
    Choice,
    choose_overlay,
    possible_limits,
    rotated_chains,
    rotated_trees,
)
from slipstream.planning.overlays.network import (
    Host,
    MeasuredCosts,
    Network,
    PositionCosts,
    Rack,
    even_network,
)
from slipstream.planning.overlays.prediction import Load, Prediction, predict
from slipstream.planning.overlays.rotation import RankTree, rotate, star
from slipstream.planning.overlays.shape import Limits, Shape
from slipstream.planning.overlays.topology_file import read_topology

__all__ = [
    "Candidate",
    "Choice",
    "Host",
    "Limits",
    "Load",
    "MeasuredCosts",
    "Network",
    "PositionCosts",
    "Prediction",
    "Rack",
    "RankTree",
    "Shape",
    "choose_overlay",
    "even_network",
    "possible_limits",
    "predict",
    "read_topology",
    "rotate",
    "rotated_chains",
    "rotated_trees",
    "star",
]
