"""Trains with parts of its own, or with slipstream's that do the same; writes its weights."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import own_parts
import torch
from torch import nn

import slipstream
from slipstream.codecs import Dense
from slipstream.consistency import Consistency
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.schedules import AfterBackward
from slipstream.topologies import Sharded
from slipstream.updates import LocalSteps, Nesterov, Update

MODULE = own_parts.__name__
OWN: dict[str, Any] = {
    "topology": own_parts.OnOne(),
    "codec": own_parts.Plain(),
    "admission": own_parts.Everybody(),
    "schedule": own_parts.Backwards(),
    "outer": own_parts.Heavy(),
}
# v ← μ v + Δ and θ ← θ − η v, of which Nesterov's look ahead is left out by a momentum of 0.
LIKE: dict[str, Any] = {
    "topology": Sharded(),
    "codec": Dense(),
    "admission": Consistency().admit,
    "schedule": AfterBackward(),
    "outer": Nesterov(lr=0.5, momentum=0.0, at="server"),
}


def strategy(parts: dict[str, Any]) -> slipstream.Strategy:
    return slipstream.Strategy(
        "own",
        Rounds(
            Everywhere(Route(parts["topology"], up=parts["codec"], down=parts["codec"])),
            Consistency(parts["admission"]),
            Update(LocalSteps(2), parts["outer"]),
            parts["schedule"],
        ),
    )


def main(which: str, given: str) -> None:
    parts = LIKE if which == "like" else OWN | {"outer": own_parts.Heavy(momentum=0.0)}
    chosen = given.split(",") if given else None
    with slipstream.init(parts=chosen) as job:
        torch.manual_seed(3)
        model: nn.Module = nn.Linear(6, 4).double()
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = job.distribute(model, optimizer, strategy(parts))
        for step in job.steps(6):
            data = torch.Generator().manual_seed(10 * step + job.rank)
            inputs = torch.randn(5, 6, generator=data).double()
            optimizer.zero_grad()
            (model(inputs) - inputs[:, :4].sin()).square().mean().backward()
            optimizer.step()
        job.wait()
        weights = [p.detach().reshape(-1).tolist() for p in model.parameters()]
        Path(f"{os.environ.get('RANK', 0)}.json").write_text(json.dumps(weights))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
