"""A real torch optimizer over one shard's chunks: elementwise ones work on pieces of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from slipstream.errors import ConfigError, FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.files.state_entries import AVERAGE, WEIGHTS, is_scalar
from slipstream.types import Buffer, Chunk, Entry, Node, OptimizerRecipe, Setting, Settings, Values

ELEMENTWISE = (
    "SGD",
    "Adam",
    "AdamW",
    "RMSprop",
    "Adagrad",
    "Adadelta",
    "Adamax",
    "NAdam",
    "RAdam",
    "ASGD",
    "Rprop",
)


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that servers cannot run on pieces of tensors.

    Raises:
        ConfigError: It is not known to be elementwise.
    """
    kind = type(optimizer)
    if is_elementwise(kind):
        return
    raise ConfigError(
        f"servers run the optimizer on pieces of tensors, and {kind.__name__} is not one known to "
        f"be elementwise ({', '.join(ELEMENTWISE)}): use one of these, or push_pull(), in which "
        "workers update, with any optimizer"
    )


def is_elementwise(kind: type[torch.optim.Optimizer]) -> bool:
    return kind.__module__.startswith("torch.optim") and kind.__name__ in ELEMENTWISE


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Hyperparameters by group, as plain values."""
    return [
        {key: plain(value) for key, value in group.items() if key in optimizer.defaults}
        for group in optimizer.param_groups
    ]


def plain(value: Any) -> Setting:
    """A setting in its wire format.

    Raises:
        ConfigError: It is neither a number, nor text, nor several numbers.
    """
    if isinstance(value, torch.Tensor):
        return float(value)
    if isinstance(value, tuple | list):
        return [float(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ConfigError(
        f"the optimizer setting {value!r} cannot be sent to servers: use push_pull(), in which "
        "workers update"
    )


class ShardOptimizer:
    """Weights and optimizer state of every chunk a server holds; implements
    ``StatefulUpdater``."""

    def __init__(self, plan: Plan, node: Node, recipe: OptimizerRecipe) -> None:
        if recipe.name not in ELEMENTWISE:
            raise ConfigError(f"{recipe.name} is not an elementwise optimizer")
        self._recipe = recipe
        self.chunks = {
            chunk.index: ChunkOptimizer(plan, chunk, recipe) for chunk in plan.chunks_of(node)
        }
        warm_up(recipe)

    def examine(self, settings: Settings | None) -> None:
        """Check settings that came with a gradient; None: unchanged.

        Raises:
            FrameRefused: They are not this optimizer's.
        """
        known = self._recipe.settings
        if settings is None:
            return  # unchanged
        if len(settings) != len(known):
            raise FrameRefused(f"settings for {len(settings)} parameter groups, not {len(known)}")
        for group, expected in zip(settings, known, strict=True):
            if group.keys() - expected.keys() or any(
                kind_of(group[key]) != kind_of(expected[key]) for key in group
            ):
                raise FrameRefused("optimizer settings of other names or kinds")

    def apply(
        self,
        chunk: Chunk,
        mean: Sequence[Values | None],
        settings: Settings | None,
        *,
        rate: float = 1.0,
        whole: bool = False,
    ) -> Sequence[Values | None]:
        """Update a chunk's weights with the mean gradient.

        Args:
            mean: By segment; None: no worker contributed to it.
            settings: The optimizer's, by group; None: unchanged.
            rate: Multiplies learning rates.
            whole: Return all segments, not just those that have changed.

        Returns:
            The new weights, by segment.
        """
        held = self.chunks[chunk.index]
        if any(values is not None for values in mean):
            held.update(mean, settings, rate)
        wanted = [whole or values is not None for values in mean]
        return held.current(wanted)

    def current(self, chunk: Chunk) -> Sequence[Values | None]:
        return self.chunks[chunk.index].current([True] * len(chunk.segments))


def warm_up(recipe: OptimizerRecipe) -> None:
    """One empty step: torch imports many modules on the first, which must not look like a hang."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    getattr(torch.optim, recipe.name)([parameter]).step()


class ChunkOptimizer:
    """One chunk: a parameter for each segment, all views of one flat tensor."""

    def __init__(self, plan: Plan, chunk: Chunk, recipe: OptimizerRecipe) -> None:
        self._chunk = chunk
        self._dtype: torch.dtype = getattr(torch, chunk.dtype)
        self._parameters: list[torch.Tensor] = []
        groups: dict[int, dict[str, Any]] = {}
        for segment in chunk.segments:
            values = torch.zeros(segment.numel, dtype=self._dtype)
            parameter = torch.nn.Parameter(values)
            self._parameters.append(parameter)
            # Buffers belong to no group: their mean is published unchanged.
            if plan.specs[segment.tensor].role == "parameter":
                group = recipe.group_of[segment.tensor]
                settings = {key: restored(v) for key, v in recipe.settings[group].items()}
                groups.setdefault(group, {**settings, "params": []})["params"].append(parameter)
        self._groups = list(groups)
        average = plan.update.average
        self._decay = None if average is None else average.decay
        kind = getattr(torch.optim, recipe.name)
        self._optimizer = kind(list(groups.values()), **groups_defaults(groups)) if groups else None
        self._averages: list[torch.Tensor] = []
        self._begin_averages()

    def update(self, mean: Sequence[Values | None], settings: Settings | None, rate: float) -> None:
        if self._optimizer is None:
            self._replace(mean)
            return
        self._set(settings)
        for parameter, values in zip(self._parameters, mean, strict=True):
            parameter.grad = None if values is None else tensor_of(values.data, self._dtype)
        lrs = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] *= rate
        self._optimizer.step()
        for group, lr in zip(self._optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr
        self._follow()

    def current(self, wanted: Sequence[bool]) -> Sequence[Values | None]:
        return [
            values_of(parameter, self._chunk.dtype) if is_wanted else None
            for parameter, is_wanted in zip(self._parameters, wanted, strict=True)
        ]

    @torch.no_grad()
    def _replace(self, values: Sequence[Values | None]) -> None:
        for parameter, each in zip(self._parameters, values, strict=True):
            if each is not None:
                parameter.copy_(tensor_of(each.data, self._dtype))

    @torch.no_grad()
    def _follow(self) -> None:
        """Move the averaged weights towards the new ones."""
        if self._decay is None:
            return
        for average, parameter in zip(self._averages, self._parameters, strict=True):
            average.lerp_(parameter, 1.0 - self._decay)

    def _set(self, settings: Settings | None) -> None:
        if settings is None or self._optimizer is None:
            return
        for index, group in zip(self._groups, self._optimizer.param_groups, strict=True):
            group.update({key: restored(value) for key, value in settings[index].items()})

    def load(self, weights: Sequence[Buffer], *, anew: bool) -> None:
        """Take weights, by segment; ``anew``: averages begin with them."""
        with torch.no_grad():
            for parameter, content in zip(self._parameters, weights, strict=True):
                parameter.copy_(tensor_of(content, self._dtype))
        if anew:
            self._begin_averages()

    def _begin_averages(self) -> None:
        """Start the averages with the current weights."""
        if self._decay is not None and self._optimizer is not None:
            self._averages = [parameter.detach().clone() for parameter in self._parameters]

    def state(self) -> tuple[list[Entry], list[bytes]]:
        """Weights, averages and every tensor of the optimizer's state, by segment and name."""
        found = [(i, WEIGHTS, parameter) for i, parameter in enumerate(self._parameters)]
        found += [(i, AVERAGE, average) for i, average in enumerate(self._averages)]
        for i, parameter in enumerate(self._parameters):
            state = self._optimizer.state.get(parameter, {}) if self._optimizer else {}
            found += [(i, n, torch.as_tensor(v)) for n, v in state.items() if v is not None]
        entries = [(i, name, str(t.dtype).removeprefix("torch.")) for i, name, t in found]
        return entries, [bytes_of(tensor) for _, _, tensor in found]

    def load_state(self, entries: Sequence[Entry], values: Sequence[Buffer]) -> None:
        """Replace all of the optimizer's state, and averages that are given."""
        if self._optimizer is None:
            return
        self._optimizer.state.clear()
        for (index, name, dtype), content in zip(entries, values, strict=True):
            value = tensor_of(content, getattr(torch, dtype))
            if name == AVERAGE and self._decay is not None:
                self._averages[index] = value
            elif name not in (AVERAGE, WEIGHTS):
                value = value.reshape(()) if is_scalar(name) else value
                self._optimizer.state[self._parameters[index]][name] = value


def groups_defaults(groups: dict[int, dict[str, Any]]) -> dict[str, Any]:
    """Constructor arguments: any group's settings, since each group overrides them."""
    first = next(iter(groups.values()))
    constructor = {key: value for key, value in first.items() if key != "params"}
    constructor.pop("decoupled_weight_decay", None)
    return constructor


def kind_of(value: Setting) -> str:
    """The type of a setting; integers and floats count as one type."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return type(value).__name__
    return "number"


def restored(value: Setting) -> Any:
    """A setting in the optimizer's own type."""
    return tuple(value) if isinstance(value, list) else value


def tensor_of(buffer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Raw memory as a flat tensor; copied if it is read-only."""
    raw = np.frombuffer(buffer, dtype=np.uint8)
    if not raw.flags.writeable:
        raw = raw.copy()
    return torch.from_numpy(raw).view(dtype)


def bytes_of(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def values_of(parameter: torch.Tensor, dtype: str) -> Values:
    """A copy: the next round may close while this one is still being sent."""
    raw = parameter.detach().clone().view(torch.uint8).numpy()
    return Values(raw, dtype)
