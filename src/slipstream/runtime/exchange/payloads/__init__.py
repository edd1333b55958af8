"""The forms in which contributions and results travel: each whole in one file, both ends."""

from slipstream.codecs import LayerCodec, SharedCodec
from slipstream.plan import Plan
from slipstream.runtime.exchange.payloads.agreed import AgreedPayload
from slipstream.runtime.exchange.payloads.layer import LayerPayload
from slipstream.runtime.exchange.payloads.payload import Payload, Sinks
from slipstream.runtime.exchange.payloads.segments import SegmentPayload
from slipstream.types import Unit

__all__ = ["Payload", "Sinks", "payload_of"]


def payload_of(plan: Plan, unit: Unit) -> Payload:
    """The form of a unit's contributions and results, at one end of its links."""
    up = plan.route(unit).up
    if isinstance(up, LayerCodec):
        return LayerPayload(plan, unit, up)
    if isinstance(up, SharedCodec):
        return AgreedPayload(plan, unit, up)
    return SegmentPayload(plan, unit, up)
