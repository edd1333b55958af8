"""Notices a learner's loop that replaces its parameters' memory: ``p.data = other``.

All learners share the weights, so a parameter with memory of its own would not be trained by other
learners, and its changes would reach nobody.
"""

from __future__ import annotations

import secrets
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import RuntimeFault
from slipstream.torch.tensors.fingerprint import digest_of
from slipstream.torch.tensors.script_lines import level_of_the_script

WAY_OUT = (
    "write in place, which changes the weights of all learners (p.data.copy_(values)), swap "
    "weights for an evaluation within job.swapped_weights(), or use another system, such as "
    "async_sgd()"
)


class Memory:
    """The memory that a learner's parameters had last; empty ones have none.

    Args:
        tensors: In the order of the parameters.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._at = addresses(tensors)

    def replaced(self, parameters: Sequence[Tensor]) -> list[int]:
        """The numbers of parameters that have other memory now."""
        now = addresses(parameters)
        if now == self._at:
            return []
        return [i for i, (one, other) in enumerate(zip(now, self._at, strict=True)) if one != other]

    def restore(self, parameters: Sequence[Tensor], replaced: Sequence[int]) -> None:
        """Give parameters back the memory that they had."""
        for i in replaced:
            parameters[i].data = self._tensors[i]

    @torch.no_grad()
    def take(self, names: Sequence[str], parameters: Sequence[Tensor], of: Sequence[int]) -> None:
        """Copy the values of some parameters to the memory that they had.

        Raises:
            RuntimeFault: One was converted.
        """
        for i in of:
            refuse_converted(names[i], parameters[i], self._tensors[i])
        for i in of:
            self._tensors[i].copy_(parameters[i])


class FirstWeights:
    """Decides whether weights count that a loop has put into the model before its first step.

    All learners run the same script, but not at the same time: when one loads weights, others may
    already train with them. And one that was started again loads them again.

    Args:
        trained: Returns whether any learner has pushed a gradient in this job.
        share: Returns the value of the first learner that has called it.
    """

    def __init__(self, trained: Callable[[], bool], share: Callable[[Any], Any]) -> None:
        self._trained, self._share = trained, share

    def count(self, names: Sequence[str], tensors: Sequence[Tensor]) -> bool:
        """Whether these weights are everybody's from now on; if they are lost, warn."""
        own = [*names, digest_of(tensors)]
        this_call = secrets.token_hex(8)
        first, call = self._share([own, this_call])
        if not self._trained():
            return True
        if first != own or call == this_call:
            warnings.warn(
                f"this learner has put other weights into {names[0]!r} before its first step, but "
                "others already train without them: they do not count. Load weights before "
                "job.distribute, or the same ones on all learners",
                stacklevel=level_of_the_script(),
            )
        return False


def addresses(tensors: Sequence[Tensor]) -> list[int]:
    """Where the values of each tensor begin."""
    return list(map(torch.Tensor.data_ptr, tensors))


def refuse_converted(name: str, now: Tensor, before: Tensor) -> None:
    """Refuse a parameter that has become another one.

    Raises:
        RuntimeFault: It has another shape, dtype or device than at ``job.distribute``.
    """
    for what in ("shape", "dtype", "device"):
        one, other = getattr(before, what), getattr(now, what)
        if one != other:
            raise RuntimeFault(
                f"{name!r} has {what} {other} now, but had {one} at job.distribute: change the "
                "model before that"
            )


def refuse_replaced(name: str) -> RuntimeFault:
    """The error for a parameter whose memory was replaced when training had begun."""
    return RuntimeFault(
        f"{name!r} was replaced after the first step (p.data = …, vector_to_parameters, "
        f"model.to(…)), but all learners share the weights: {WAY_OUT}"
    )


def warn_of_replaced(name: str) -> None:
    """Warn of a parameter that was replaced after the last step."""
    warnings.warn(
        f"{name!r} was replaced after the last step (p.data = …): the job ends with the weights "
        f"that all learners share; {WAY_OUT}",
        stacklevel=level_of_the_script(),
    )
