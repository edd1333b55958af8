"""The workloads by name; ``workload("vgg", scale=1 / 16)``, ``workload("mnist", data=folder)``."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from pathlib import Path

from slipstream.bench.workloads.learning import alexnet, fashion, lr, mf, mnist, text
from slipstream.bench.workloads.protocol import Goal, Workload
from slipstream.bench.workloads.stepping import conv, emulated, fc, vgg
from slipstream.errors import ConfigError

__all__ = ["WORKLOADS", "Goal", "Workload", "emulated", "known", "workload"]

WORKLOADS: dict[str, Callable[..., Workload]] = {
    "fc": fc,
    "conv": conv,
    "vgg": vgg,
    "alexnet": alexnet,
    "mnist": mnist,
    "fashion": fashion,
    "lr": lr,
    "mf": mf,
    "text": text,
}


def known(name: str) -> None:
    """Refuse a name that is not a workload's."""
    if name not in WORKLOADS:
        near = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no workload {name!r}: there are {', '.join(WORKLOADS)}{hint}")


def workload(name: str, *, data: Path | None = None, scale: float | None = None) -> Workload:
    """Load or generate the data and put the workload together.

    ``data`` is the folder of a real set, for workloads that learn; ``scale`` is the share of its
    parameters that a large net keeps.
    """
    known(name)
    given = {"data": data, "scale": scale}
    arguments = {key: value for key, value in given.items() if value is not None}
    for key in arguments:
        able = [n for n, make in WORKLOADS.items() if key in inspect.signature(make).parameters]
        if name not in able:
            raise ConfigError(f"{name} takes no {key}: {', '.join(able)} do; leave it out")
    return WORKLOADS[name](**arguments)
