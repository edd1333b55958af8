"""``nn.EmbeddingBag``: sums or means of rows of a table, whose gradient has few nonzero rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _Bags(torch.autograd.Function):
    """One row per bag; keeps ids and the gradient of each id's row."""

    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        offsets: Tensor | None,
        shares: Tensor | None,
        _port: Tensor,
        module: nn.EmbeddingBag,
        use: Any,
    ) -> Tensor:
        ctx.save_for_backward(ids, weight, offsets, shares)
        ctx.module, ctx.use = module, use
        return F.embedding_bag(
            ids,
            weight,
            offsets,
            mode=module.mode,
            per_sample_weights=shares,
            include_last_offset=module.include_last_offset,
            padding_idx=module.padding_idx,
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        dy = gradients[0].detach()
        ids, weight, offsets, shares = ctx.saved_tensors
        module, flat = ctx.module, ids.reshape(-1).long()
        bag = bags_of(ids, offsets, len(dy))
        values = dy[bag]
        counted = (
            torch.ones_like(flat) if module.padding_idx is None else flat != module.padding_idx
        )
        of_shares = None
        if ctx.needs_input_grad[3]:
            of_shares = ((weight[flat] * values).sum(1) * counted).view_as(shares)
        if shares is not None:
            values = values * shares.detach().reshape(-1, 1)
        if module.mode == "mean":
            sizes = torch.zeros(len(dy), dtype=dy.dtype, device=dy.device)
            sizes.index_add_(0, bag, counted.to(dy.dtype))
            values = values / sizes.clamp(min=1)[bag].unsqueeze(1)
        ctx.use.first, ctx.use.second = flat, values
        return None, None, None, ctx.use.once(of_shares), dy.new_zeros(()), None, None


def bags_of(ids: Tensor, offsets: Tensor | None, bags: int) -> Tensor:
    """The number of each id's bag.

    Args:
        ids: One row per bag, or all bags end to end.
        offsets: Where each bag begins, if they are end to end.

    >>> bags_of(torch.tensor([5, 3, 3, 0]), torch.tensor([0, 1, 1]), bags=3).tolist()
    [0, 2, 2, 2]
    """
    if offsets is None:
        return torch.arange(bags, device=ids.device).repeat_interleave(ids.shape[1])
    places = torch.arange(len(ids), device=ids.device)
    return torch.searchsorted(offsets[:bags].long().contiguous(), places, right=True) - 1


# Torch's type stubs do not describe the arguments and result of ``apply``.
embedding_bags: Callable[..., Tensor] = _Bags.apply
