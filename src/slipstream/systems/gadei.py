"""GaDei (Zhang and others, 2016): learners of one machine train on weights in shared memory.

- Topology: one server, over shared memory; learners are processes.
- Consistency: none (Hogwild). Weights change under a learner while it computes; ``consistent``
  lets it work on a copy of one moment instead.
- What travels: gradients, written by backward into a ring of slots that the learner and the server
  share; of embeddings the rows that were used. Weights do not travel: they are read where they are.
- When: at the end of backward. A learner waits only when all its slots are full.
- Update: at the server, in place, one gradient after the other, learners in turn. With
  ``apply="direct"`` each learner makes its own.

    learner l:  g = ∇f(W);  slot[pushed mod k] ← g;  pushed ← pushed + 1
    server:     for l = 1 … λ in turn: if taken < pushed: W ← F(W, slot[taken mod k]);
                taken ← taken + 1

Whoever finds nothing to do sleeps. A learner that dies has pushed or has not; one that is started
in its place goes on. When the server dies, another goes on from the last checkpoint.

Where we deviate: the paper's server takes a lock for each learner's buffer; here counts with one
writer each do (``verify/ring.pml`` is a model of it). Its learners are GPUs and pull weights; ours
on a CPU read them in place.
"""

from __future__ import annotations

import os

from slipstream.codecs import Dense
from slipstream.consistency import Asynchronous
from slipstream.planning.one_machine import Apply, OneMachine
from slipstream.schedules import AfterBackward
from slipstream.strategy import Route, Strategy, everywhere
from slipstream.topologies import Sharded


def gadei(
    *,
    apply: Apply = "server",
    consistent: bool = False,
    slots: int = 2,
    checkpoints: str | os.PathLike[str] | None = None,
    every_s: float = 30.0,
) -> Strategy:
    """Learners that share memory, under ``slipstream run --workers N --strategy gadei``.

    ``apply`` says who updates weights: a server process, or every learner by itself. ``consistent``
    gives a learner weights of one moment. ``slots`` are the gradients of a learner that may wait.
    ``checkpoints`` is a directory: one is kept there every ``every_s`` seconds, and a job that
    finds one goes on from it; without it they go with the job.
    """
    directory = None if checkpoints is None else os.fspath(checkpoints)
    return Strategy(
        "gadei",
        route=everywhere(Route(Sharded(), push=Dense(), publish=Dense(), road="memory")),
        consistency=Asynchronous(),
        schedule=AfterBackward(),
        update="server",
        one_machine=OneMachine(apply, consistent, slots, directory, every_s),
    )
