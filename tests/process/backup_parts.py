"""What tests ask of ``backup_worker``, and what its ranks wrote down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fork_server import ForkServer, Run

from slipstream.runtime.exchange.aggregator import KEPT_ROUNDS

WORKER = Path(__file__).with_name("backup_worker.py")
LIMIT_S = 250.0


@dataclass
class Part:
    """One job; see ``backup_worker`` for the loops and models."""

    name: str
    strategy: str
    loop: str = "by_steps"
    model: str = "network"
    optimizer: str = "sgd"
    servers: int = 1
    total: int = 30  # rounds, or epochs
    own: Sequence[int] = ()  # by rank: steps
    pause_s: Sequence[float] = ()  # by rank, before every step
    behind: Sequence[int] = ()  # by rank: how many rounds the others make within its step
    within: int = 0  # how many rounds after the slowest's anybody begins one; 0: any number
    abreast: int = 0  # how many steps more than the slowest anybody takes; 0: any number
    jitter_s: float = 0.0  # at random on top
    silence_s: float = 10.0
    wait_s: float = 30.0
    look: bool = False  # at the weights after every step
    stats: bool = False
    save: str = ""
    save_every: int = 0
    load: str = ""
    decay: float = 0.9
    loaders: int = 0  # processes of the data loader
    stops_within: Sequence[int] = field(default_factory=list)  # which rank, in which of its steps


Told = dict[str, Any]


def start(fork_server: ForkServer, folder: Path, workers: int, *parts: Part) -> Run:
    plan = folder / f"{parts[0].name}.plan.json"
    plan.write_text(json.dumps([asdict(part) for part in parts]))
    return fork_server.start(WORKER, str(plan), ranks=workers)


def outcome(run: Run, part: Part, rank: int) -> Told:
    """What a rank wrote down; if it failed, that is in ``error``."""
    file = run.folder / f"{part.name}.{rank}.json"
    assert file.exists(), run.told()
    told: Told = json.loads(file.read_text())
    return told


def see_out(run: Run, *parts: Part, limit_s: float = LIMIT_S) -> dict[str, list[Told]]:
    """What became of every part, when all ranks have ended and left nothing."""
    codes = run.wait(limit_s)
    assert set(codes) == {0}, run.told()
    assert run.remains.left() == []
    ranks = range(len(codes))
    return {part.name: [outcome(run, part, rank) for rank in ranks] for part in parts}


def flawless(told: list[Told]) -> list[Told]:
    errors = [f"rank {r}: {t['error']}\n{t['trace']}" for r, t in enumerate(told) if "error" in t]
    assert not errors, "\n".join(errors)
    return told


def assert_equal_at_the_end(told: list[Told]) -> None:
    prints = told[0]["summary"]["weights_sha256"]
    assert len(prints) == len(told)
    assert len(set(prints)) == 1
    assert len({t["digest"] for t in told}) == 1


def makers_of(told: list[Told]) -> dict[int, tuple[int, ...]]:
    """Who made each round: the same at all servers, for all chunks, without a gap."""
    accounts = told[0]["accounts"]
    lists = [[(round_, tuple(ranks)) for round_, ranks in a["makers"]] for a in accounts]
    for other in lists[1:]:
        assert other == lists[0]
    rounds = [round_ for round_, _ in lists[0]]
    # Servers remember the last thousand or so.
    assert rounds == list(range(rounds[0], rounds[0] + len(rounds)))
    assert rounds[0] == 0 or len(rounds) == KEPT_ROUNDS
    return dict(lists[0])


def made_and_dropped(told: list[Told]) -> tuple[dict[int, int], dict[int, int]]:
    account = told[0]["accounts"][0]
    made, dropped = account["made"], account["dropped"]
    return {int(k): n for k, n in made.items()}, {int(k): n for k, n in dropped.items()}
