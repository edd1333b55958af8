"""The trees over which servers broadcast, and their predicted time. Pure.

``choose_overlay`` compares a star, rotated chains and rotated trees on a ``Network``; ``counts`` is
the program behind the trees.
"""

from slipstream.planning.overlays.choosing import Candidate as Candidate
from slipstream.planning.overlays.choosing import Choice as Choice
from slipstream.planning.overlays.choosing import choose_overlay as choose_overlay
from slipstream.planning.overlays.choosing import possible_limits as possible_limits
from slipstream.planning.overlays.choosing import rotated_chains as rotated_chains
from slipstream.planning.overlays.choosing import rotated_trees as rotated_trees
from slipstream.planning.overlays.network import Host as Host
from slipstream.planning.overlays.network import MeasuredCosts as MeasuredCosts
from slipstream.planning.overlays.network import Network as Network
from slipstream.planning.overlays.network import PositionCosts as PositionCosts
from slipstream.planning.overlays.network import Rack as Rack
from slipstream.planning.overlays.network import even_network as even_network
from slipstream.planning.overlays.prediction import Load as Load
from slipstream.planning.overlays.prediction import Prediction as Prediction
from slipstream.planning.overlays.prediction import predict as predict
from slipstream.planning.overlays.rotation import RankTree as RankTree
from slipstream.planning.overlays.rotation import rotate as rotate
from slipstream.planning.overlays.rotation import star as star
from slipstream.planning.overlays.shape import Limits as Limits
from slipstream.planning.overlays.shape import Shape as Shape
from slipstream.planning.overlays.topology_file import read_topology as read_topology
