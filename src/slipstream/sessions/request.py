"""The arguments of ``job.distribute``: pairs of a model and an optimizer, and one strategy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.strategy import Strategy
from slipstream.systems import is_json, parse
from slipstream.torch.distribute.preparing import check_pairs
from slipstream.torch.optimizers.loop_optimizer import own_optimizer
from slipstream.torch.optimizers.own_step import check_whole
from slipstream.torch.tensors.pairs import Pair

DEFAULT_STRATEGY = "push_pull"


@dataclass(frozen=True, slots=True)
class Request:
    """All calls of ``job.distribute`` so far.

    Attributes:
        pairs: as the user gave them.
        strategy: of all pairs.
        name: the strategy's name in the first call.
    """

    pairs: tuple[Pair, ...]
    strategy: Strategy
    name: str

    @classmethod
    def extend(
        cls,
        before: Request | None,
        given: Sequence[Any],
        strategy: Strategy | str | None,
        default: str | None,
        parts: Sequence[str] = (),
    ) -> Request:
        """The request of earlier calls with one more call.

        Args:
            before: the request of earlier calls, if there were any.
            given: pairs of a model and an optimizer, to be checked.
            strategy: for all pairs; None for that of earlier calls, or the default.
            default: the strategy of the command line, if it names one.
            parts: the modules of the user's own parts.

        Raises:
            ConfigError: these are not pairs, or the pairs are incompatible.
        """
        added = tuple(pair_of(each) for each in given)
        named = strategy or (before and before.strategy) or default or DEFAULT_STRATEGY
        chosen = parse(named, parts=parts) if isinstance(named, str) else named
        if not isinstance(chosen, Strategy):
            raise ConfigError(
                f"job.distribute takes a strategy, such as slipstream.push_pull(), or its text; it "
                f"was given {chosen!r}"
            )
        if before is None:
            check_pairs(added, chosen)
            is_call = isinstance(named, str) and not is_json(named)
            return cls(added, chosen, str(named) if is_call else chosen.name)
        if chosen != before.strategy:
            other = chosen.name if chosen.name != before.strategy.name else "other settings"
            raise ConfigError(
                f"job.distribute was called with {before.strategy.name} before, and now with "
                f"{other}: all pairs of a job have the same strategy"
            )
        pairs = (*before.pairs, *added)
        check_pairs(pairs if added else (), chosen)
        return cls(pairs, chosen, before.name)


def pair_of(given: Any) -> Pair:
    """A model and an optimizer, in this order.

    Raises:
        ConfigError: these are not a model and an optimizer.
    """
    if not given or not isinstance(given, list | tuple):
        raise ConfigError(
            f"job.distribute takes a model and an optimizer, or a list of such pairs; it was given "
            f"a {type(given).__name__}"
        )
    kinds = tuple(type(each) for each in given)
    if len(kinds) != 2 or not (
        issubclass(kinds[0], nn.Module) and issubclass(kinds[1], torch.optim.Optimizer)
    ):
        raise ConfigError(
            f"job.distribute takes a model and an optimizer, in this order; it was given a "
            f"{' and a '.join(kind.__name__ for kind in kinds)}"
        )
    model, optimizer = given
    own = own_optimizer(optimizer)
    check_whole(own)
    return Pair(model, own)
