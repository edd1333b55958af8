"""Which mode trains a plan, where workers exchange messages."""

from __future__ import annotations

from slipstream.plan import Plan
from slipstream.torch.modes.at_server import AtServerMode
from slipstream.torch.modes.at_worker import AtWorkerMode
from slipstream.torch.modes.local_steps import LocalStepsMode
from slipstream.torch.modes.networked import NetworkedMode
from slipstream.torch.modes.partial_exchange import PartialExchangeMode
from slipstream.torch.modes.streamed import StreamedMode


def mode_for(plan: Plan) -> type[NetworkedMode]:
    """Return the mode that trains this plan."""
    if plan.partial_exchange is not None:
        return PartialExchangeMode
    if plan.local_steps is not None:
        return LocalStepsMode
    if plan.update.holder_applies:
        return AtServerMode
    return StreamedMode if plan.runs_ahead else AtWorkerMode
