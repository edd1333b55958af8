"""Compact gradients where they are cheaper than the dense road: which, on what terms. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from slipstream.errors import ConfigError
from slipstream.planning.choosing import Always, ByBytes, ByTime, Chooser
from slipstream.planning.costs import Speeds
from slipstream.types import Spec


@dataclass(frozen=True, slots=True)
class Hybrid:
    """``choose`` by bytes (the paper's rule) or by predicted time; ``speeds`` are measured when
    the job starts unless they are given. Layers named in ``dense`` never travel compact. They go
    ``to`` all peers, or to the one server that holds the layer and answers with its gradient."""

    choose: Literal["time", "bytes", "always"] = "time"
    wire: Literal["own", "bfloat16", "float32"] = "own"
    speeds: Speeds | None = None
    dense: tuple[str, ...] = ()
    to: Literal["peers", "server"] = "peers"

    def __post_init__(self) -> None:
        if self.choose not in ("time", "bytes", "always"):
            raise ConfigError(f"choose={self.choose!r}: choose by 'time' or by 'bytes'")
        if self.wire not in ("own", "bfloat16", "float32"):
            raise ConfigError(f"wire={self.wire!r}: choose 'own' or 'bfloat16'")

    @property
    def item_bytes(self) -> int | None:
        """A compact number's bytes on the wire, where that is not the tensor's own size."""
        return 2 if self.wire == "bfloat16" else None

    @property
    def needs_speeds(self) -> bool:
        return self.choose == "time" and self.speeds is None

    def chooser(self, measured: Speeds | None = None) -> Chooser:
        if self.choose == "bytes":
            return ByBytes()
        if self.choose == "always":
            return Always()
        speeds = self.speeds or measured
        if speeds is None:
            raise ConfigError("choosing by time needs speeds: measure them, or give them")
        return ByTime(speeds)

    def considered(self, specs: Sequence[Spec]) -> list[Spec]:
        """The specs without the layers that are to travel dense."""
        known = {spec.layer for spec in specs if spec.layer}
        known |= {spec.name.rpartition(".")[0] for spec in specs}
        for name in self.dense:
            if name not in known:
                raise ConfigError(f"dense={name!r}: the model has no such layer")
        return [
            replace(spec, layer="", obstacle="named in dense") if spec.layer in self.dense else spec
            for spec in specs
        ]
