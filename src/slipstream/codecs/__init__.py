"""Codecs: frozen recipes for what is sent; their state, where they have any, is explicit."""

from slipstream.codecs.dense import Dense
from slipstream.codecs.factors import Factors
from slipstream.codecs.filter import Filter
from slipstream.codecs.layer_codec import LayerCodec
from slipstream.codecs.low_rank import LowRank
from slipstream.codecs.one_bit import OneBit
from slipstream.codecs.protocol import AboutCodec, Codec, Form
from slipstream.codecs.quantized import Quantized
from slipstream.codecs.residual import Residual
from slipstream.codecs.rows import Rows
from slipstream.codecs.select import Above, AnySelector, Drop, TopK
from slipstream.codecs.shared_codec import Agreement, SharedCodec

# Every codec that a strategy may name: those for parts of tensors, and those for whole layers.
SegmentCodec = Dense | OneBit | Quantized | Filter | LowRank
AnyCodec = SegmentCodec | Factors | Rows

__all__ = [
    "AboutCodec",
    "Above",
    "Agreement",
    "AnyCodec",
    "AnySelector",
    "Codec",
    "Dense",
    "Drop",
    "Factors",
    "Filter",
    "Form",
    "LayerCodec",
    "LowRank",
    "OneBit",
    "Quantized",
    "Residual",
    "Rows",
    "SegmentCodec",
    "SharedCodec",
    "TopK",
]
