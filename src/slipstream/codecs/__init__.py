"""What travels. Codecs are frozen recipes; their memory, where they have any, is explicit."""

from slipstream.codecs.bounded import Bounded, Drop
from slipstream.codecs.compact import CompactWire
from slipstream.codecs.dense import Dense
from slipstream.codecs.one_bit import OneBit
from slipstream.codecs.protocol import Codec

__all__ = ["Bounded", "Codec", "CompactWire", "Dense", "Drop", "OneBit"]
