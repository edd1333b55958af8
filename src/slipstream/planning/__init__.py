"""What is decided before training starts: chunks, holders, costs. Pure."""

from slipstream.planning.layout import CHUNK_BYTES, Layout, lay_out

__all__ = ["CHUNK_BYTES", "Layout", "lay_out"]
