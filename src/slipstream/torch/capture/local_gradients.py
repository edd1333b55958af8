"""This worker's own gradients: checks and changes before they are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.errors import RuntimeFault
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.inventory import Inventory, unexpected_gradient, unheld_gradient


class LocalGradients:
    """The gradients of one model's exchanged parameters.

    Args:
        finite: Decides about non-finite gradients.
        clip_norm: The norm to which this worker's whole gradient is scaled down; None: never.

    Attributes:
        unheld: Names and parameters whose changes are not exchanged, by any pair of the job.
    """

    def __init__(
        self, inventory: Inventory, finite: FiniteGradients, clip_norm: float | None
    ) -> None:
        self._inventory, self._finite, self._clip_norm = inventory, finite, clip_norm
        named = zip(inventory.specs, inventory.tensors, strict=True)
        self._trained = [(spec.name, tensor) for spec, tensor in named if spec.role == "parameter"]
        self._known = {id(tensor) for tensor in inventory.tensors}
        self._dtypes = [tensor.dtype for tensor in inventory.tensors]
        self._left: list[tuple[Tensor, Tensor | None, int]] = []
        self.unheld: Sequence[tuple[str, Tensor]] = ()

    def clip(self) -> None:
        """Clip this worker's whole gradient, if the strategy does so."""
        if self._clip_norm is not None:
            self.clear_refused()  # a non-finite one would make all others non-finite
            trained = [p for _, p in self._trained if p.grad is not None]
            torch.nn.utils.clip_grad_norm_(trained, self._clip_norm)

    def clear_refused(self) -> None:
        """Where gradients are used before they are sent: set those that do not count to None."""
        self._finite.clear_refused(self._trained)

    def note_left(self) -> None:
        """These gradients were sent: later changes would have no effect."""
        gradients = [(p, p.grad) for _, p in self._trained]
        self._left = [(p, g, 0 if g is None else g._version) for p, g in gradients]

    def changed_since(self) -> bool:
        """Whether gradients were changed after they were sent; from now on they are not tracked."""
        left, self._left = self._left, []
        return any(
            p.grad is not gradient or (gradient is not None and gradient._version != version)
            for p, gradient, version in left
        )

    def refuse_converted(self, tensor: int) -> None:
        """Refuse a tensor that does not match the plan.

        Raises:
            RuntimeFault: It has another dtype than at ``job.distribute``.
        """
        before, now = self._dtypes[tensor], self._inventory.tensors[tensor].dtype
        if now != before:
            raise RuntimeFault(
                f"{self._inventory.specs[tensor].name!r} is {now} now, but was {before} at "
                "job.distribute: convert the model (model.double(), model.to(...)) before that"
            )

    def refuse_unknown(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuse gradients that are not exchanged: weights would silently drift apart.

        Raises:
            RuntimeFault: A parameter trains that took no part in ``job.distribute``, or that only
                an optimizer unknown to the job could update.
        """
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in self._known:
                    raise unexpected_gradient(parameter)
        for name, parameter in self.unheld:
            if parameter.requires_grad and parameter.grad is not None:
                raise unheld_gradient(name)
