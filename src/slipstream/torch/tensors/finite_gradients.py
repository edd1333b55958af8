"""How to treat a gradient with a NaN or an infinity.

A worker checks every tensor's gradient once per step, before it is sent. A non-finite one is sent
unchanged (``pass``), counts as no gradient in this step (``refuse``), or ends the job (``stop``).
The check uses the largest magnitude of a tensor, which is infinite or NaN if any value is.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream._native import largest
from slipstream.errors import NonFiniteGradient
from slipstream.runtime.figures.telemetry import warn
from slipstream.runtime.process.environment import Nonfinite
from slipstream.torch.tensors.inventory import dtype_name
from slipstream.torch.tensors.staging import as_real

# The smallest magnitude that rounds to an infinity in a shorter format.
BECOMES_INFINITE = {
    "float16": 2.0**16 - 2.0**4,
    "bfloat16": 2.0**128 - 2.0**119,
    "float32": 2.0**128 - 2.0**103,
    "int8": 2.0**128 - 2.0**103,  # with scales in float32
    "int4": 2.0**128 - 2.0**103,
    "float64": math.inf,
}


class FiniteGradients:
    """Decides for one worker; ``is_first``: whether no other worker has warned before."""

    def __init__(
        self,
        policy: Nonfinite = "pass",
        rank: int = 0,
        is_first: Callable[[], bool] = lambda: True,
    ) -> None:
        self.step = 0
        self._policy, self._rank, self._is_first = policy, rank, is_first
        self._has_warned = False

    @property
    def refuses(self) -> bool:
        return self._policy == "refuse"

    def admits(self, name: str, magnitude: float, travels_as: str = "float64") -> bool:
        """Whether a gradient with this largest magnitude counts; ``travels_as`` is the dtype to
        which it is cast on the wire.

        Raises:
            NonFiniteGradient: if the job is set to stop.
        """
        if magnitude < BECOMES_INFINITE[travels_as]:
            return True
        cast = travels_as if math.isfinite(magnitude) else ""
        error = NonFiniteGradient(self._rank, name, self.step, cast)
        if self._policy == "stop":
            raise error
        if not self._has_warned:
            self._has_warned = True
            if self._is_first():
                warn_anyway(f"{error.finding}{ADVICE[self._policy]}")
        return self._policy == "pass"

    def clear_refused(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Set gradients that do not count to None, where an optimizer uses them here."""
        trained = [(name, p, p.grad) for name, p in named if p.grad is not None]
        found = magnitudes([gradient for _, _, gradient in trained])
        for (name, parameter, _), magnitude in zip(trained, found, strict=True):
            if not self.admits(name, magnitude):
                parameter.grad = None


def warn_anyway(text: str) -> None:
    """Warn, but never raise, whatever the warning filters: a gradient that passes must not end
    the job."""
    try:
        warnings.warn(text, stacklevel=3)
    except Warning:
        warn(text)


ADVICE = {
    "pass": (
        " and goes on as it is: unless the loop skips this step, as a GradScaler does, weights "
        "become NaN. slipstream.init(nonfinite='refuse') leaves such gradients out, 'stop' ends "
        "the job. Later ones are not reported"
    ),
    "refuse": " and does not count (nonfinite='refuse'). Later ones are not reported",
}


def magnitude_of(values: Tensor) -> float:
    """The largest magnitude; infinite or NaN if any value is."""
    if values.is_sparse:
        values = values.coalesce().values()
    flat = as_real(values)
    if flat.device.type != "cpu" or not flat.is_contiguous():
        return float(flat.abs().amax()) if flat.numel() else 0.0
    return largest(flat.reshape(-1).view(torch.uint8).numpy(), dtype_name(flat))


def magnitudes(gradients: Sequence[Tensor]) -> list[float]:
    """The largest magnitude of each; waits for an accelerator only once if all are finite."""
    away = [g for g in gradients if g.device.type != "cpu" and not g.is_sparse]
    known: dict[int, float] = {}
    if away:
        overall = float(torch.nn.utils.get_total_norm(away, math.inf))
        if math.isfinite(overall):
            known = dict.fromkeys(map(id, away), overall)
    return [known[id(g)] if id(g) in known else magnitude_of(g) for g in gradients]


def before_use(tick: Callable[[], None]) -> Callable[..., Any]:
    """A hook that calls ``tick`` when an optimizer's gradients are complete: before its step, or
    after each call of a closure that computes them within the step."""

    def on_step(_: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if closure is None:
            tick()
            return None

        def watched() -> Any:
            loss = closure()
            tick()
            return loss

        return args[:1], {**kwargs, "closure": watched}

    return on_step
