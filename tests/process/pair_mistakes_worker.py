"""Makes mistakes with several pairs, a job each, and writes down what each rank was told."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked_servers import start_servers_by_fork
from torch import nn

import slipstream

Optimizer = torch.optim.Optimizer


def pair(inputs: int = 4) -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(inputs, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: Optimizer) -> None:
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


def none(job: Any) -> None:
    job.distribute([])


def same_optimizer(job: Any) -> None:
    (model, optimizer) = pair()
    job.distribute([(model, optimizer), (model, optimizer)], "push_pull")


def again(job: Any) -> None:
    job.distribute(*job.distribute(*pair(), "push_pull(update='server')"))


def shared_parameter(job: Any) -> None:
    model, optimizer = pair()
    job.distribute([(model, optimizer), (model, torch.optim.Adam([model.bias]))])  # type: ignore[list-item]


def sliced(job: Any) -> None:
    job.distribute([pair(), pair()], "ako")


def in_shared_memory(job: Any) -> None:
    job.distribute([pair(), pair()], "gadei")


def first_of_some(job: Any) -> None:
    job.distribute([pair(), pair()], "backup_workers(first=1)")


def too_late(job: Any) -> None:
    step(*job.distribute(*pair(), "allreduce"))
    job.distribute(*pair())


def after_the_second(job: Any) -> None:
    """The second pair has made a step, and the first none."""
    _, second = job.distribute([pair(), pair()], "allreduce")
    step(*second)
    job.distribute(*pair())


def another_strategy(job: Any) -> None:
    job.distribute(*pair(), "allreduce")
    job.distribute(*pair(), "all_to_all")


def other_settings(job: Any) -> None:
    job.distribute(*pair(), "allreduce")
    job.distribute(*pair(), "allreduce(overlap=False)")


def no_pairs(job: Any) -> None:
    job.distribute([pair()[0], pair()[0]], "push_pull")


def wrong_order(job: Any) -> None:
    model, optimizer = pair()
    job.distribute([(optimizer, model)], "push_pull")  # type: ignore[list-item]


def frozen(job: Any) -> None:
    model, optimizer = pair()
    job.distribute([pair(), (model.requires_grad_(False), optimizer)])


def one_rank_more(job: Any) -> None:
    job.distribute([pair() for _ in range(2 + job.rank)], "allreduce")


def one_rank_wrong(job: Any) -> None:
    model, optimizer = pair()
    if job.rank == 1:
        optimizer = torch.optim.LBFGS(model.parameters())
    job.distribute([pair(), (model, optimizer)], "push_pull(update='server')")


def only_factors(job: Any) -> None:
    from slipstream.codecs import Factors
    from slipstream.methods import Rounds
    from slipstream.routes import Everywhere, Route
    from slipstream.strategy import Strategy
    from slipstream.topologies import Mesh

    strategy = Strategy("factors", Rounds(Everywhere(Route(Mesh(), up=Factors()))))
    job.distribute([pair(), pair()], strategy)


def whose(job: Any) -> None:
    job.distribute([pair(), pair()], "allreduce")
    job.backward_for(pair()[1])


def too_early(job: Any) -> None:
    job.backward_for(pair()[1])


def added_later(job: Any) -> None:
    (model, optimizer), _ = job.distribute([pair(), pair()], "allreduce")
    with job.backward_for(optimizer):
        model(torch.ones(3, 4)).sum().backward()
    model(torch.ones(3, 4)).sum().backward()


def converted(job: Any) -> None:
    (model, optimizer), _ = job.distribute([pair(), pair()], "allreduce")
    model.double()
    model(torch.ones(3, 4).double()).sum().backward()
    optimizer.step()


MISTAKES: dict[str, Callable[[Any], None]] = {
    make.__name__: make
    for make in (
        *(none, same_optimizer, again, shared_parameter, sliced, in_shared_memory, too_late),
        *(after_the_second, another_strategy, other_settings, no_pairs, wrong_order, frozen),
        *(
            first_of_some,
            one_rank_more,
            one_rank_wrong,
            only_factors,
            whose,
            too_early,
            added_later,
            converted,
        ),
    )
}


def all_have_joined(name: str, job: Any) -> None:
    """A rank that was still joining would hear of the mistake from one that was not."""
    Path(f"{name}.{job.rank}").touch()
    while not all(Path(f"{name}.{rank}").exists() for rank in range(job.world_size)):
        time.sleep(0.005)


def main() -> None:
    rank = os.environ.get("RANK", "0")
    told = {}
    start_servers_by_fork()
    for name in sys.argv[2:]:
        try:
            with slipstream.init(start_limit_s=60, wait_limit_s=30) as job:
                all_have_joined(name, job)
                MISTAKES[name](job)
            told[name] = ["none", ""]
        except slipstream.SlipstreamError as error:
            told[name] = [type(error).__name__, str(error)]
    Path(sys.argv[1], f"told.{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
