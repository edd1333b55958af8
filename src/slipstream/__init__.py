"""Data-parallel training where the network, the stragglers or the batch size are the problem.

with slipstream.init() as job:
    model, optimizer = job.distribute(model, optimizer, slipstream.push_pull())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.entrance import init
    from slipstream.errors import ConfigError, RuntimeFault, SlipstreamError
    from slipstream.job import Job
    from slipstream.planning.backups import plan_backups
    from slipstream.planning.learning_rates import (
        asynchronous_rate,
        decayed_rate,
        stale_rate,
        synchronous_rate,
    )
    from slipstream.planning.staleness import ramped_staleness
    from slipstream.strategy import Plan, Route, Strategy
    from slipstream.systems import (
        adam_factors,
        ako,
        all_to_all,
        allreduce,
        async_sgd,
        backup_workers,
        bounded_staleness,
        gadei,
        one_bit,
        parameter_flow,
        poseidon,
        push_pull,
    )
    from slipstream.torch.simulated_staleness import simulated_staleness

__version__ = "0.1.0"
__all__ = [
    "ConfigError",
    "Job",
    "Plan",
    "Route",
    "RuntimeFault",
    "SlipstreamError",
    "Strategy",
    "adam_factors",
    "ako",
    "all_to_all",
    "allreduce",
    "async_sgd",
    "asynchronous_rate",
    "backup_workers",
    "bounded_staleness",
    "decayed_rate",
    "gadei",
    "init",
    "one_bit",
    "parameter_flow",
    "plan_backups",
    "poseidon",
    "push_pull",
    "ramped_staleness",
    "simulated_staleness",
    "stale_rate",
    "synchronous_rate",
]

# Names are imported when first used: servers and the command line start without torch.
_HOMES = {
    "ConfigError": "errors",
    "Job": "job",
    "Plan": "strategy",
    "Route": "strategy",
    "RuntimeFault": "errors",
    "SlipstreamError": "errors",
    "Strategy": "strategy",
    "adam_factors": "systems",
    "ako": "systems",
    "all_to_all": "systems",
    "allreduce": "systems",
    "async_sgd": "systems",
    "backup_workers": "systems",
    "bounded_staleness": "systems",
    "asynchronous_rate": "planning.learning_rates",
    "decayed_rate": "planning.learning_rates",
    "gadei": "systems",
    "init": "entrance",
    "one_bit": "systems",
    "parameter_flow": "systems",
    "plan_backups": "planning.backups",
    "poseidon": "systems",
    "push_pull": "systems",
    "ramped_staleness": "planning.staleness",
    "simulated_staleness": "torch.simulated_staleness",
    "stale_rate": "planning.learning_rates",
    "synchronous_rate": "planning.learning_rates",
}


def __dir__() -> list[str]:
    return list(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'slipstream' has no attribute {name!r}")
    return getattr(import_module(f"slipstream.{_HOMES[name]}"), name)
