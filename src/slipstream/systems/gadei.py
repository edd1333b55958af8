"""GaDei (Zhang and others, 2016): learners of one machine train on weights in shared memory.

- Topology: one server, over shared memory; learners are processes.
- Consistency: none (Hogwild). Weights change while a learner computes; with ``consistent``
  it works on a consistent copy instead.
- What is sent: gradients, written by backward into a ring of slots that the learner and the server
  share; of embeddings only the used rows. Weights are not sent: learners read them in place.
- When: at the end of backward. A learner waits only when all its slots are full.
- Update: at the server, in place, one gradient after the other, learners in turn. With
  ``apply="direct"`` each learner applies its own.

    learner l:  g = ∇f(W);  slot[pushed mod k] ← g;  pushed ← pushed + 1
    server:     for l = 1 … λ in turn: if taken < pushed: W ← F(W, slot[taken mod k]);
                taken ← taken + 1

An idle process sleeps. A learner that dies has either pushed a gradient completely or not at all;
a new learner replaces it. When the server dies, a new one continues from the last checkpoint.

Deviations: the paper's server takes a lock for each learner's buffer; ours uses counters with one
writer each (``verify/ring.pml`` is a model of it). The paper's learners are GPUs and pull weights;
ours on a CPU read them in place.

References:
    Zhang, Feng, Zheng and others: GaDei: On Scale-up Training As A Service For Deep Learning
    (2016).
"""

from __future__ import annotations

import os
from typing import Literal

from slipstream.methods import SharedMemoryUpdates
from slipstream.strategy import Strategy


def gadei(
    *,
    apply: Literal["server", "direct"] = "server",
    consistent: bool = False,
    slots: int = 2,
    checkpoints: str | os.PathLike[str] | None = None,
    every_s: float = 30.0,
) -> Strategy:
    """Train learners on weights in shared memory, under ``slipstream run --workers N``.

    Args:
        apply: The process that updates weights: a "server", or every learner by itself ("direct").
        consistent: Let a learner compute on a consistent copy of the weights.
        slots: The most gradients of a learner that wait to be applied.
        checkpoints: A directory for checkpoints, from which a job continues; by
            default they are removed with the job.
        every_s: Seconds between checkpoints.

    Raises:
        ConfigError: A value is invalid.

    >>> gadei(slots=4).method.slots
    4
    """
    directory = None if checkpoints is None else os.fspath(checkpoints)
    return Strategy("gadei", SharedMemoryUpdates(slots, consistent, apply, directory, every_s))
