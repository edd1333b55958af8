"""Lightning's Trainer over slipstream: ``Trainer(strategy="slipstream_poseidon", devices=4)``.

Importing this module registers a strategy of Lightning for every system (``slipstream_push_pull``
and so on), and ``slipstream``, which is that of the command line. ``SlipstreamStrategy`` takes any
strategy of slipstream.
"""

from slipstream.integrations.lightning.strategy import SlipstreamStrategy, register

__all__ = ["SlipstreamStrategy"]

register()
