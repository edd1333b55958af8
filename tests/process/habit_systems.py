"""The systems in which every habit of a training loop is tried, by training mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class System:
    """A system, and what it promises of a loop's weights.

    Attributes:
        in_step: Whether workers hold the weights of one process after every step. Else the job's
            last weights contain every worker's every update once, in whichever order.
        updates_a_step: How many gradients one process's step stands for: 1 where workers' gradients
            are averaged, as many as there are workers where each is applied by itself.
        share_of_write: How much of a weight that one rank alone changes is in everybody's.
        tolerance: How far weights may be from one process's: of the length of what they moved, if
            what is sent is compressed; else in all.
    """

    strategy: str
    in_step: bool = True
    updates_a_step: int = 1
    share_of_write: float = 1.0
    dtype: torch.dtype = torch.float64
    tolerance: float = 1e-9
    is_compressed: bool = False


def compressed(strategy: str, tolerance: float) -> System:
    """What is sent has few bits or a low rank; only float32 is compressed."""
    return System(
        strategy, in_step=False, dtype=torch.float32, tolerance=tolerance, is_compressed=True
    )


# By training mode: a column of the table each. The first one is for every commit.
MODES: dict[str, dict[str, System]] = {
    "mean": {
        "push_pull": System("push_pull"),
        "push_pull after backward": System("push_pull(overlap=False)"),
        "allreduce": System("allreduce"),
        "all_to_all": System("all_to_all"),
        "allreduce int8": compressed("allreduce(wire='int8')", 0.02),
        "one_bit": compressed("one_bit", 0.7),
        "low_rank": compressed("low_rank(rank=10)", 0.4),
        "parameter_flow": compressed("parameter_flow(delta='50%')", 0.45),
    },
    "compact": {
        "poseidon": System("poseidon(choose='bytes')"),
        "adam_factors": System("adam_factors"),
    },
    "server": {"push_pull server": System("push_pull(update='server')")},
    "first": {"backup_workers": System("backup_workers(first=2)")},
    "apart": {
        "async_sgd": System("async_sgd", in_step=False, updates_a_step=2),
        "bounded_staleness": System("bounded_staleness", in_step=False),
    },
    "ahead": {
        "parameter_flow ahead": System(
            "parameter_flow(staleness=1, delta=0.0, rate_factor=1.0)",
            in_step=False,
            dtype=torch.float32,
            tolerance=1e-5,
        )
    },
    "local": {
        "diloco": System("diloco(every=2, lr=1.0, momentum=0.0)", False, share_of_write=0.5),
        "local_sgd": System("local_sgd(every=2)", False, share_of_write=0.5),
    },
    "ako": {"ako": System("ako", False, dtype=torch.float32, tolerance=1e-5)},
    "gadei": {"gadei": System("gadei", False, updates_a_step=2)},
}


def system_of(name: str) -> System:
    (found,) = (each[name] for each in MODES.values() if name in each)
    return found
