"""The exchanged tensors of every pair of a model and an optimizer; refuses what cannot work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import torch
from torch import nn

from slipstream.compat import check
from slipstream.errors import ConfigError, ModelMismatch, SlipstreamError
from slipstream.methods import PartialExchange, Rounds, SharedMemoryUpdates
from slipstream.routes import dense_only
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.process.config_fingerprint import difference
from slipstream.strategy import Strategy
from slipstream.torch.capture.remote_optimizer import check_own_state
from slipstream.torch.distribute.exchange import HeldTensors, check_exchangeable
from slipstream.torch.optimizers.own_step import check_own_step, run_hooks
from slipstream.torch.optimizers.shard_optimizer import check_elementwise
from slipstream.torch.tensors.flat_weights import FlatWeights
from slipstream.torch.tensors.inventory import (
    Inventory,
    check_optimizer,
    config_fingerprint,
    groups_of,
    is_constant,
)
from slipstream.torch.tensors.pairs import Pair


def check_constant(model: nn.Module, inventory: Inventory) -> None:
    """Refuse tables that forward passes change, where servers have the weights.

    Raises:
        ConfigError: One has ``max_norm``.
    """
    constant = is_constant(model)
    for name, parameter in inventory.trained.items():
        if not constant(parameter):
            raise ConfigError(
                f"{name!r} belongs to a table with max_norm, which every forward pass changes, but "
                "with this strategy servers update the weights and would undo that: leave max_norm "
                "out, and let the forward pass normalize the rows that it looks up"
            )


def prepare(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    strategy: Strategy,
    parts: Sequence[str] = (),
) -> Inventory:
    """The exchanged tensors; refuses what cannot work, before training starts.

    Args:
        parts: The modules of the user's own parts.

    Raises:
        ConfigError: The strategy, or this optimizer with it, cannot train the model.
    """
    check_optimizer(model, optimizer)
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise ConfigError(
            "SparseAdam takes sparse gradients only, and the mean over workers is dense: use Adam"
        )
    if strategy.rounds.update.inner.travels == "gradients":
        check_rows(model, optimizer)
    if isinstance(optimizer, torch.optim.LBFGS) and not strategy.rounds.consistency.lockstep:
        raise ConfigError(
            "LBFGS runs backward itself, several times per step, so no worker can run ahead of its "
            "updates: use another optimizer, or rounds of all workers, such as push_pull()"
        )
    strategy.to_json(parts=parts)  # refuses parts that cannot be sent to servers
    check(strategy)
    inventory = Inventory.of(model)
    if not inventory.specs:
        raise ConfigError("the model has no parameter that requires a gradient")
    if isinstance(strategy.method, PartialExchange):
        FlatWeights(inventory)
    if not strategy.rounds.update.user_at_holder or isinstance(
        strategy.method, SharedMemoryUpdates
    ):
        run_hooks(optimizer)
        return inventory
    check_elementwise(optimizer)
    check_own_step(optimizer)
    check_own_state(optimizer, inventory.trained)
    held = inventory.of_optimizer(optimizer)
    check_constant(model, held)
    return held


def check_rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that may treat sparse gradients in its own way: it would never see any.

    Torch's own make the same step from a dense gradient, except for SparseAdam, which takes none.

    Raises:
        ConfigError: It holds the weight of a layer with ``sparse=True``, and is not torch's.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("torch.optim"):
        return
    held = groups_of(optimizer)
    for name, layer in model.named_modules():
        sparse = isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse
        if sparse and id(layer.weight) in held:
            raise ConfigError(
                f"{name!r} has sparse gradients, which {kind.__name__} may treat row by row, but "
                "the mean over workers is dense: make the layer with sparse=False if a dense "
                "gradient will do, or use torch.optim.Adagrad or SGD"
            )


def check_pairs(pairs: Sequence[Pair], strategy: Strategy) -> None:
    """Refuse pairs that are incompatible, or that a strategy cannot train.

    Raises:
        ConfigError: There is no pair; an optimizer is given twice; a parameter is in two
            optimizers; the strategy trains one model with one optimizer only, or cannot carry
            ``job.exchange``.
    """
    if not pairs:
        raise ConfigError("job.distribute was given an empty list: give (model, optimizer) pairs")
    if any(isinstance(pair.model, HeldTensors) for pair in pairs):
        check_exchangeable(strategy)
    if len({id(pair.optimizer) for pair in pairs}) < len(pairs):
        raise ConfigError(
            "job.distribute was given the same optimizer twice: each optimizer belongs to "
            "one pair; put several models that it updates into one nn.ModuleDict"
        )
    check_disjoint(pairs)
    one_only = not isinstance(strategy.method, Rounds)
    if len(pairs) > 1 and one_only:
        raise ConfigError(
            f"{strategy.name} trains one model with one optimizer, and was given {len(pairs)} "
            "pairs: use one optimizer over one nn.ModuleDict, or another strategy, such as "
            "push_pull()"
        )


def check_disjoint(pairs: Sequence[Pair]) -> None:
    """Check that every parameter has only one optimizer.

    Raises:
        ConfigError: One is in two optimizers.
    """
    owners: dict[int, int] = {}
    for number, (model, optimizer) in enumerate(pairs):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for parameter in groups_of(optimizer):
            owner = owners.setdefault(parameter, number)
            if owner != number:
                raise ConfigError(
                    f"the parameter {names.get(parameter, '')!r} is in the optimizers of pair "
                    f"{owner} and pair {number}: each parameter is updated by one optimizer"
                )


def as_trained(strategy: Strategy, pairs: int) -> Strategy:
    """The strategy for so many pairs.

    Several pairs send dense gradients only: factors and rows are captured in backward passes, and
    with several pairs not every pass through a model belongs to its optimizer.

    Raises:
        ConfigError: It has no dense route.
    """
    if pairs == 1:
        return strategy
    try:
        rounds = msgspec.structs.replace(strategy.rounds, routes=dense_only(strategy.rounds.routes))
        return msgspec.structs.replace(strategy, method=rounds)
    except ConfigError as error:
        raise ConfigError(f"{strategy.name}: {error}") from error


def prepare_pairs(
    pairs: Sequence[Pair], strategy: Strategy, parts: Sequence[str] = ()
) -> list[Inventory]:
    """The exchanged tensors of each pair; refuses what cannot work, before training starts.

    One pair exchanges all of its model. Of several, each exchanges the parameters of its own
    optimizer, and buffers belong to the first pair that has them.

    Args:
        parts: The modules of the user's own parts.

    Raises:
        ConfigError: A pair, or all of them together, cannot be trained with the strategy.
    """
    check_pairs(pairs, strategy)
    if len(pairs) == 1:
        return [prepare(*pairs[0], strategy, parts)]
    inventories: list[Inventory] = []
    taken: set[int] = set()
    for number, pair in enumerate(pairs):
        inventory = prepare(*pair, strategy, parts)
        inventories.append(inventory.of_optimizer(pair.optimizer, without=taken))
        taken |= {id(tensor) for tensor in inventory.tensors}
        if all(spec.role == "buffer" for spec in inventories[-1].specs):
            raise ConfigError(
                f"the optimizer of pair {number} holds no parameter that requires a gradient"
            )
    return inventories


def check_rounds(strategy: Strategy, pairs: int, workers: int) -> None:
    """Refuse several pairs where rounds need several workers, and a worker may miss some.

    A worker that has missed rounds of one pair would be at another place in the loop. The others
    would wait for its gradients of one pair, and it for theirs of another.

    Raises:
        ConfigError: Such workers could wait for each other for ever.
    """
    if pairs > 1 and (instead := strategy.instead_if_absent(workers)):
        # Rounds of outer gradients close with the first N, and never earlier.
        outer = strategy.rounds.update.inner.travels == "outer gradients"
        usable = instead[:1] if outer else instead
        raise ConfigError(
            f"{strategy.name} with {pairs} pairs: workers that miss rounds of one pair come to "
            "different places of the loop, and would wait for each other there; use "
            f"{', '.join(usable)}, or async_sgd()"
        )


def agree(
    pairs: Sequence[Pair], strategy: Strategy, membership: Membership, key: str
) -> list[Inventory]:
    """``prepare_pairs`` on every rank; an error or a difference raises the same error on all ranks.

    Args:
        key: The name of this gathering, a new one for each call.

    Raises:
        ConfigError: On some rank the pairs cannot be trained with the strategy.
        ModelMismatch: Ranks have different models, optimizers or strategies.
    """
    problem, inventories = None, []
    try:
        inventories = prepare_pairs(pairs, strategy, membership.env.parts)
        check_rounds(strategy, len(pairs), membership.env.world_size)
    except SlipstreamError as error:
        problem = error
    lines: list[str] = []
    if problem is None:
        for number, pair in enumerate(pairs):
            head = f"pair {number}: " if len(pairs) > 1 else ""
            lines += [head + line for line in config_fingerprint(*pair)]
        lines += strategy.config_fingerprint()
        lines.append(f"servers: {membership.env.servers or 'one a host'}")
    said = membership.gathering.gather(key, [str(problem or ""), lines], list[Any])
    if problem is not None:
        raise problem
    for rank, (trouble, other) in enumerate(said):
        if trouble:
            raise ConfigError(f"rank {rank}: {trouble}")
        if other != said[0][1]:
            raise ModelMismatch(difference(rank, said[0][1], other, "rank 0"))
    return inventories
