"""The workloads by name; ``workload("vgg", scale=1 / 16)``, ``workload("mnist", data=folder)``."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from slipstream.apps.bench.workloads.held_out import gpt, recommender
from slipstream.apps.bench.workloads.learning import alexnet, fashion, lr, mf, mnist, text
from slipstream.apps.bench.workloads.protocol import Goal, Workload
from slipstream.apps.bench.workloads.stepping import conv, emulated, fc, vgg
from slipstream.errors import ConfigError
from slipstream.printable import shown

__all__ = ["WORKLOADS", "Goal", "Workload", "emulated", "known", "parse_sizes", "workload"]

NO_SIZES = ("data", "scale")
SIZE = re.compile(r"([a-z_]+) *= *([0-9]{1,9})")

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
    "gpt": gpt,
    "recommender": recommender,
}


def known(name: str) -> None:
    """Check that a name is a workload's."""
    if name not in WORKLOADS:
        near = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"no workload {name!r}: there are {', '.join(WORKLOADS)}{hint}")


def workload(
    name: str,
    *,
    data: Path | None = None,
    scale: float | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Workload:
    """Load or generate the data and assemble the workload.

    Args:
        name: One of ``WORKLOADS``.
        data: The folder of a real set, for workloads that learn.
        scale: The share of its parameters that a large net keeps.
        sizes: Other sizes than the workload's own, by name, such as ``{"layers": 2}``.

    Returns:
        The workload, with its model, data and optimizer.

    Raises:
        ConfigError: There is no such workload, it does not take an argument, or the data is
            invalid.

    >>> workload("gpt", sizes={"layers": 2, "width": 64}).name
    'gpt'
    """
    known(name)
    options = {"data": data, "scale": scale, **(sizes or {})}
    arguments = {key: value for key, value in options.items() if value is not None}
    for key in arguments:
        able = [n for n, make in WORKLOADS.items() if key in inspect.signature(make).parameters]
        if name not in able:
            raise _not_taken(name, key, able)
    return WORKLOADS[name](**arguments)


def _not_taken(name: str, key: str, able: list[str]) -> ConfigError:
    if able:
        do = "do" if len(able) > 1 else "does"
        return ConfigError(f"{name} takes no {key}: {', '.join(able)} {do}; leave it out")
    sizes = [k for k in inspect.signature(WORKLOADS[name]).parameters if k not in NO_SIZES]
    return ConfigError(f"{name} has no size {key!r}: it has {', '.join(sizes) or 'none'}")


def parse_sizes(text: str) -> dict[str, int]:
    """Parse sizes from text such as ``"layers=2,width=64"``; none from an empty one.

    Raises:
        ConfigError: The text is of another form, or names a size twice.

    >>> parse_sizes("layers=2, width=64")
    {'layers': 2, 'width': 64}
    """
    sizes: dict[str, int] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        match = SIZE.fullmatch(part)
        if match is None or match[1] in NO_SIZES or match[1] in sizes:
            raise ConfigError(
                f"sizes {shown(text)}: write NAME=NUMBER, joined by commas, each name once, such "
                "as layers=2,width=64"
            )
        sizes[match[1]] = int(match[2])
    return sizes
