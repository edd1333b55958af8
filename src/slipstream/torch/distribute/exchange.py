"""Tensors that no torch module holds: another framework's, by ``ready`` and ``finish``."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from slipstream.errors import ConfigError, RuntimeFault
from slipstream.methods import PartialExchange, SharedMemoryUpdates
from slipstream.strategy import Strategy
from slipstream.torch.tensors.inventory import dtype_name
from slipstream.types import ITEM_BYTES

ALIGNED_BYTES = 64  # frameworks copy memory that begins elsewhere
MOST_FREE = 2  # memories that are kept for later steps
OWN_OPTIMIZER = "the framework's own optimizer runs at every worker"
INSTEAD = "use push_pull(), allreduce(), all_to_all(), poseidon(), one_bit() or low_rank()"


class Exchange:
    """Mean gradients of a framework's tensors, step by step; ``job.exchange`` makes it.

    In every step a framework calls ``ready`` for each tensor whose gradient it has, in any order,
    and then ``finish``. A gradient is sent as soon as it is ready, so the last tensors of a forward
    pass come first. Arrays are shared by DLPack, and never copied: gradients are read where they
    are, and are not changed. Every rank must make the same steps.

    >>> import slipstream
    >>> with slipstream.init() as job:
    ...     exchange = job.exchange({"w": torch.ones(2)})
    ...     exchange.ready(0, torch.tensor([1.0, 3.0]))
    ...     exchange.finish()
    [tensor([1., 3.])]

    Attributes:
        names: of the tensors, by number.
    """

    def __init__(
        self, held: HeldTensors, on_ready: Callable[[int], None], end_step: Callable[[], Any]
    ) -> None:
        self.names = held.names
        self._held, self._on_ready, self._end_step = held, on_ready, end_step
        self._ready: set[int] = set()

    def weights(self) -> list[Tensor]:
        """Rank 0's tensors, which all ranks begin with; once, since they are not kept."""
        return self._held.release()

    def ready(self, tensor: int, gradient: Any) -> None:
        """This worker's gradient of a tensor is final.

        Args:
            tensor: Its number, in the order that ``job.exchange`` was given.
            gradient: A tensor, or any array with ``__dlpack__``, of the tensor's shape and dtype;
                not to be changed until ``finish`` returns.

        Raises:
            RuntimeFault: It has another shape or dtype, or was ready before in this step.
        """
        if not 0 <= tensor < len(self.names):
            raise RuntimeFault(f"there is no tensor {tensor}: job.exchange got {len(self.names)}")
        given = as_tensor(gradient)
        shape, dtype = self._held.layouts[tensor]
        if given.shape != shape or given.dtype != dtype:
            raise RuntimeFault(
                f"the gradient of {self.names[tensor]!r} is {given.dtype} of shape "
                f"{tuple(given.shape)}, but the tensor was {dtype} of shape {tuple(shape)} at "
                "job.exchange: both stay the same during training"
            )
        if tensor in self._ready:
            raise RuntimeFault(
                f"the gradient of {self.names[tensor]!r} is ready twice in one step: add gradients "
                "up first, and call finish() once a step"
            )
        self._ready.add(tensor)
        held = self._held.tensors[tensor]
        held.grad = given if given.ndim == held.ndim else given.reshape(held.shape)
        self._on_ready(tensor)

    def places(self) -> list[HostMemory]:
        """By tensor: the memory that ``finish`` returns in this step, not written yet.

        A framework can take it over by DLPack while gradients are under way. A job of one process
        does not use it.
        """
        places = enumerate(self._held.results.all())
        return [HostMemory(self._held.as_given(i, place)) for i, place in places]

    def finish(self) -> list[Tensor | None]:
        """End the step: wait for the mean gradients.

        Returns:
            By tensor: the mean over all workers, in memory that is the caller's; None if no worker
            had a gradient. A job of one process returns the gradients that it was given.
        """
        self._end_step()
        self._ready.clear()
        return self._held.take()


class HostMemory:
    """A tensor's memory for another framework, by DLPack; takes less time than the tensor does."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU

    def __dlpack__(self, *, stream: Any = None, **_: Any) -> Any:
        return to_dlpack(self._tensor)


class HeldTensors(nn.Module):
    """Stands for another framework's tensors where slipstream expects a module.

    Args:
        named: Rank 0's are copied to all ranks.
        alone: Whether there is no other worker.
        outputs_last: Whether a kernel's outputs are its last dimension, and not its first.

    Attributes:
        layouts: By tensor: shape and dtype, as the framework has them.
        tensors: The same as slipstream exchanges them: kernels are matrices if outputs are last.
    """

    def __init__(
        self, named: Mapping[str, Tensor], *, alone: bool, outputs_last: bool = False
    ) -> None:
        super().__init__()
        self.names = list(named)
        self.layouts = [(tensor.shape, tensor.dtype) for tensor in named.values()]
        self.released = False
        for number, tensor in enumerate(named.values()):
            given = tensor.detach()
            if not alone:
                given = given.clone(memory_format=torch.contiguous_format)
            if outputs_last and given.ndim > 2:  # codecs take the first for the outputs
                # Rows are computed, not inferred with -1, so empty tensors work.
                given = given.reshape(math.prod(given.shape[:-1]), given.shape[-1])
            self.register_parameter(str(number), nn.Parameter(given))
        self.tensors = list(self.parameters())
        self.results = FreshResults(self.tensors)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        """By the framework's own names, which may hold dots."""
        for number, tensor in super().named_parameters(*args, **kwargs):
            yield self.names[int(number)], tensor

    def release(self) -> list[Tensor]:
        """Give the tensors away: from now on only their shapes and dtypes are known here."""
        if self.released:
            raise ConfigError("exchange.weights() was called before: keep what it has returned")
        self.released = True
        given = [self.as_given(i, tensor.detach()) for i, tensor in enumerate(self.tensors)]
        for tensor in self.tensors:
            tensor.data = tensor.data.new_empty(()).expand(tensor.shape)
        return given

    def take(self) -> list[Tensor | None]:
        """The results of this step; the next one begins."""
        made = self.results.take()
        found = [tensor.grad for tensor in self.tensors] if made is None else made
        for tensor in self.tensors:
            tensor.grad = None
        return [None if t is None else self.as_given(i, t) for i, t in enumerate(found)]

    def as_given(self, number: int, tensor: Tensor) -> Tensor:
        """A tensor in the shape that the framework knows."""
        shape, _ = self.layouts[number]
        return tensor if tensor.ndim == len(shape) else tensor.view(shape)


class FreshResults:
    """Memory for results, apart from the gradients; implements ``GradientPlaces``.

    One piece of memory holds all tensors of a step, so that a step allocates little. It is used
    again when its reader has freed all of them.
    """

    def __init__(self, like: Sequence[Tensor]) -> None:
        self._shapes = [tuple(tensor.shape) for tensor in like]
        self._dtypes = [tensor.dtype for tensor in like]
        sizes = [-(-tensor.nbytes // ALIGNED_BYTES) * ALIGNED_BYTES for tensor in like]
        self._starts = [sum(sizes[:number]) for number in range(len(sizes))]
        self._ends = [start + t.nbytes for start, t in zip(self._starts, like, strict=True)]
        self._pool = MemoryPool(sum(sizes))
        self._made: list[Tensor] = []
        self._written: dict[int, Tensor] = {}

    def all(self) -> list[Tensor]:
        """The places of all results of this step."""
        if not self._made:
            memory = torch.from_numpy(self._pool.take())
            rooms = zip(self._starts, self._ends, self._dtypes, self._shapes, strict=True)
            self._made = [
                memory[start:end].view(dtype).view(shape) for start, end, dtype, shape in rooms
            ]
        return self._made

    def __getitem__(self, tensor: int) -> Tensor:
        """Where to write a result: channels ask when they have one."""
        if tensor not in self._written:
            self._written[tensor] = self.all()[tensor]
        return self._written[tensor]

    def __setitem__(self, tensor: int, result: Tensor | None) -> None:
        raise RuntimeFault(f"the place of result {tensor} is fixed")

    def take(self) -> list[Tensor | None] | None:
        """By tensor, what was written; None if nothing was."""
        written, self._written, self._made = self._written, {}, []
        return [written.get(tensor) for tensor in range(len(self._shapes))] if written else None


class MemoryPool:
    """Pieces of memory of one size; one is free when nothing refers to the array of it."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._pieces: list[tuple[Any, weakref.ref[Any]]] = []

    def take(self) -> Any:
        """A piece that is free, as an array of bytes."""
        free = [piece for piece, lent in self._pieces if lent() is None]
        self._pieces = [(piece, lent) for piece, lent in self._pieces if lent() is not None]
        piece = free.pop() if free else np.empty(self._nbytes + ALIGNED_BYTES, np.uint8)
        never = weakref.ref(np.empty(0))
        self._pieces += [(each, never) for each in free[: MOST_FREE - 1]]
        start = -piece.ctypes.data % ALIGNED_BYTES
        lent = piece[start : start + self._nbytes]
        self._pieces.append((piece, weakref.ref(lent)))
        return lent


class EndsStep(torch.optim.Optimizer):
    """An optimizer that changes nothing: its hooks exchange gradients and count steps."""

    def __init__(self, held: HeldTensors) -> None:
        super().__init__(held.tensors, {})

    def step(self, closure: Any = None) -> Any:
        """Nothing: the framework's own optimizer updates the weights."""


def as_tensor(array: Any) -> Tensor:
    """An array of any framework, which keeps its memory."""
    # Not the array itself: for memory of the host, nothing else of it is needed.
    return array if isinstance(array, Tensor) else from_dlpack(array.__dlpack__())


def checked(named: Mapping[str, Any]) -> dict[str, Tensor]:
    """The arrays as tensors; refuses what cannot be averaged.

    Raises:
        ConfigError: There is no tensor, or one is not of floating-point numbers in host memory.
    """
    if not named:
        raise ConfigError("job.exchange was given no tensors")
    tensors = {}
    for name, array in named.items():
        try:
            tensors[name] = as_tensor(array)
        except (AttributeError, BufferError, TypeError) as error:
            raise ConfigError(
                f"{name!r} is a {type(array).__name__} that DLPack cannot share ({error}): give "
                "tensors, or arrays that may be written"
            ) from error
    for name, tensor in tensors.items():
        if dtype_name(tensor) not in ITEM_BYTES:
            raise ConfigError(
                f"{name!r} is {dtype_name(tensor)}: only floating-point numbers have gradients "
                f"({', '.join(ITEM_BYTES)}); keep other values out of what is exchanged"
            )
        if tensor.device.type != "cpu":
            raise ConfigError(f"{name!r} is on {tensor.device}: copy it to host memory first")
    return tensors


def check_exchangeable(strategy: Strategy) -> None:
    """Refuse strategies that do more than to give every worker the mean gradient of the step.

    Raises:
        ConfigError: With the reason and an alternative.
    """
    update, reason = strategy.rounds.update, ""
    if isinstance(strategy.method, SharedMemoryUpdates) or update.holder_applies:
        reason = f"{OWN_OPTIMIZER}, but with this strategy servers update the weights"
    elif update.inner.travels != "gradients" or isinstance(strategy.method, PartialExchange):
        reason = (
            "only gradients can be given to it, but with this strategy changes of weights are sent"
        )
    elif not strategy.rounds.consistency.lockstep:
        reason = "a step ends with its own mean gradient, but with this strategy workers run ahead"
    elif update.clip_norm is not None:
        raise ConfigError(
            f"{strategy.name} with clip_norm: an exchange does not change the gradients that it is "
            "given; clip them before, or clip the mean, and leave clip_norm out"
        )
    elif update.average is not None:
        raise ConfigError(
            f"{strategy.name} with averaged weights: an exchange does not know the weights; "
            "average them in your loop, and leave averaged out"
        )
    if reason:
        raise ConfigError(
            f"{strategy.name} cannot carry an exchange of gradients: {reason}; {INSTEAD}"
        )
