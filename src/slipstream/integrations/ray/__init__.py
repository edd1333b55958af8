"""slipstream on Ray: ``run`` on actors of a placement group; ``SlipstreamConfig`` for Ray Train.

Ray places the workers and shows their output. Needs Ray 2.51 or later.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

try:
    import ray.exceptions  # a folder called ray, as Ray makes in /tmp, has none
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"slipstream.integrations.ray needs Ray ({missing}): pip install 'slipstream[ray]'"
    ) from missing

from slipstream.integrations.versions import require_version

if TYPE_CHECKING:
    from slipstream.integrations.ray.launch import run as run
    from slipstream.integrations.ray.train import SlipstreamConfig as SlipstreamConfig

__all__ = ["SlipstreamConfig", "run"]

OLDEST = (2, 51)
HOMES = {"run": "launch", "SlipstreamConfig": "train"}

# Before the modules below are imported, since an older Ray may lack what they use.
require_version("Ray", ray.__version__, OLDEST, user=__name__, extra="ray")


def __getattr__(name: str) -> Any:
    # Importing Ray Train takes seconds, which workers of ``run`` need not spend.
    if name in HOMES:
        return getattr(import_module(f"{__name__}.{HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
