"""The live tensors of a plan: what each worker contributes, and where results go."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slipstream._native import largest
from slipstream.codecs import Dense
from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.routes import Collective
from slipstream.torch.tensors.finite_gradients import FiniteGradients, magnitude_of
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.staging import Staging
from slipstream.types import Values


class GradientPlaces(Protocol):
    """By tensor number: where a gradient is. A list, or the parameters' own ``.grad``."""

    def __getitem__(self, tensor: int, /) -> Tensor | None: ...

    def __setitem__(self, tensor: int, gradient: Tensor | None, /) -> None: ...


class ExchangedGradients(Protocol):
    """What a worker contributes by tensor, and where results go; ``LiveTensors`` has them."""

    @property
    def contributions(self) -> GradientPlaces: ...

    @property
    def results(self) -> GradientPlaces: ...

    @property
    def finite(self) -> FiniteGradients: ...


class OwnGradients:
    """The parameters' own ``.grad``; implements ``GradientPlaces``."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, tensor: int) -> Tensor | None:
        return self._tensors[tensor].grad

    def __setitem__(self, tensor: int, gradient: Tensor | None) -> None:
        self._tensors[tensor].grad = gradient


class LiveTensors:
    """Parameters (through their gradients) and buffers of one model; implements ``Slots``.

    Where workers update, a parameter's result is its mean gradient; where servers update, it is
    the parameter's new value. A gradient that servers will read later is copied, because the next
    backward pass may reuse its memory before it has left.

    Args:
        results: Where results go, if not where the plan's kind of update has them.

    Attributes:
        contributions: What parameters contribute. Where the optimizer's steps or outer gradients
            travel, whoever ends a step puts them there.
        results: Where what comes back goes. Where a worker runs ahead of results, they are of
            another clock than the gradients of the loop, and have memory of their own. So have
            those of outer rounds.
    """

    def __init__(
        self,
        plan: Plan,
        inventory: Inventory,
        staging: Staging,
        finite: FiniteGradients | None = None,
        results: GradientPlaces | None = None,
    ) -> None:
        self.finite = finite or FiniteGradients()
        self._specs = plan.specs
        self._travels_as = wire_dtypes(plan)
        self._tensors = inventory.tensors
        self._places = inventory.places
        self._is_buffer = [spec.role == "buffer" for spec in plan.specs]
        self._weights_return = plan.update.holder_applies
        self._gradients = staging
        self._weights = Staging()
        # Batch norm changes its statistics without autograd's knowledge: compare their contents.
        self._known = {
            i: tensor.detach().clone()
            for i, tensor in enumerate(self._tensors)
            if self._is_buffer[i]
        }
        own = OwnGradients(self._tensors)
        apart: list[Tensor | None] = [None] * len(self._tensors)
        trains_locally = plan.local_steps is not None
        steps_travel = plan.runs_ahead and plan.update.inner.travels == "steps"
        self.contributions: GradientPlaces = list(apart) if steps_travel or trains_locally else own
        if results is None:
            results = apart if plan.runs_ahead or trains_locally else own
        self.results: GradientPlaces = results
        self._copies_buffers = trains_locally
        self._weights_replace = plan.update.holder_applies and not trains_locally
        self._stays = set() if plan.cluster.members else over_collectives(plan)
        self._fetched: dict[int, torch.Tensor] = {}
        self._counts: dict[int, bool] = {}  # by tensor, of those that were checked
        # Gradients whose results replace them: to find a tensor's memory takes torch some time.
        self._sources: dict[int, tuple[Tensor, Values]] = {}
        # A layer's factors are of one pass, while a dense contribution is all of ``.grad``: where
        # factors come back dense, a gradient of earlier passes is added.
        self._adds = set() if plan.update.holder_applies else sent_as_factors(plan)
        self._earlier: dict[int, Tensor] = {}

    def _live(self, tensor: int) -> torch.Tensor:
        place = self._places[tensor]
        if place is None:
            return self._tensors[tensor]
        module, attribute = place
        live: torch.Tensor = getattr(module, attribute)
        known = self._known[tensor]
        if live.shape != known.shape or live.dtype != known.dtype:
            raise RuntimeFault(
                f"the buffer {self._specs[tensor].name!r} was {tuple(known.shape)} {known.dtype} "
                f"at job.distribute and is {tuple(live.shape)} {live.dtype} now: convert the model "
                "before job.distribute"
            )
        return live

    def fetch(self, tensor: int) -> None:
        """The contribution is final: start the copy to host memory, if it is read there."""
        if tensor in self._stays:
            return
        content = self._contribution(tensor)
        if content is not None:
            self._fetched[tensor] = content
            self._gradients.fetch(tensor, content, always=self._weights_return)

    def _contribution(self, tensor: int) -> torch.Tensor | None:
        if not self._is_buffer[tensor]:
            gradient = self.contributions[tensor]
            if gradient is not None and gradient.is_sparse:
                gradient = gradient.to_dense()
            return gradient
        live = self._live(tensor)
        if torch.equal(live, self._known[tensor]):
            return None
        # Where results are merged later, the next forward changes the buffer while it is sent.
        return live.detach().clone() if self._copies_buffers else live.detach()

    def source(self, tensor: int) -> Values | None:
        """This worker's contribution, in host memory; None if it has none that counts.

        Raises:
            NonFiniteGradient: It is not finite, and the job is set to stop.
        """
        if tensor not in self._fetched:
            self.fetch(tensor)
        content = self._fetched.get(tensor)
        if content is None or self._counts.get(tensor) is False:
            return None
        values = self._gradients.readable(tensor, content)
        if tensor not in self._counts:
            self._counts[tensor] = self._admits(tensor, values)
            if not self._counts[tensor]:
                self._leave_out(tensor)
                return None
            if self.results is self.contributions and not self._gradients.is_copied(tensor):
                self._sources[tensor] = content, values
        return values

    def _admits(self, tensor: int, values: Values) -> bool:
        if self._is_buffer[tensor]:
            return not self.finite.refuses or self._has_stayed_finite(tensor, values)
        magnitude = largest(values.data, values.dtype)
        return self.finite.admits(self._specs[tensor].name, magnitude, self._travels_as[tensor])

    def _has_stayed_finite(self, buffer: int, values: Values) -> bool:
        """Also true for a buffer that was not finite before: that is intended, for example for a
        running minimum that starts with infinity."""
        if math.isfinite(largest(values.data, values.dtype)):
            return True
        return not math.isfinite(magnitude_of(self._known[buffer]))

    def _leave_out(self, tensor: int) -> None:
        """Treat the tensor as unused: if no other worker contributes, no result comes back."""
        if self._is_buffer[tensor]:
            self._live(tensor).data.copy_(self._known[tensor])
        else:
            self.contributions[tensor] = None

    def sink(self, tensor: int) -> Values:
        if tensor in self._adds and tensor not in self._earlier:
            earlier = self.results[tensor]
            if earlier is not None:
                self._earlier[tensor], self.results[tensor] = earlier, None
        target = self._target(tensor)
        content, values = self._sources.get(tensor, (None, None))
        if content is target and values is not None:
            return values
        return self._weights.writable(tensor, target)

    def finish(self, tensor: int) -> None:
        self._sources.pop(tensor, None)
        self._weights.commit(tensor, self._target(tensor))
        if tensor in self._earlier:
            self.results[tensor] = self._earlier.pop(tensor).detach().add_(self._target(tensor))
        if self._is_buffer[tensor]:
            self._known[tensor].copy_(self._target(tensor))

    def forget(self) -> None:
        """The round is over: the next one reads the tensors again."""
        self._fetched.clear()
        self._counts.clear()

    def replace_buffer(self, tensor: int, value: Tensor) -> None:
        """Give the model another value of a buffer."""
        self._live(tensor).data.copy_(value)

    def know_buffers(self) -> None:
        """The model's buffers are the same on all workers now: later changes are contributions."""
        for tensor, known in self._known.items():
            known.copy_(self._live(tensor))

    def changed_buffers(self) -> list[int]:
        """The buffers of which this worker has others than all had in common last."""
        return [i for i, known in self._known.items() if not torch.equal(self._live(i), known)]

    def known_buffers(self) -> dict[str, Tensor]:
        """By name: the buffers that all workers had in common last."""
        return {self._specs[tensor].name: known for tensor, known in self._known.items()}

    def _target(self, tensor: int) -> torch.Tensor:
        live = self._live(tensor)
        apart = self._copies_buffers  # results are merged later
        if (self._is_buffer[tensor] and not apart) or self._weights_replace:
            return live.data  # whose changes autograd does not count: they are not the user's
        # The mean over workers is dense, even where each one's gradient is sparse.
        result = self.results[tensor]
        if result is None or result.is_sparse:
            result = self.results[tensor] = torch.empty_like(live, requires_grad=False)
        return result


def sent_as_factors(plan: Plan) -> set[int]:
    """Tensors of layers whose factors or rows are sent, and whose results come back dense."""
    units = (unit for unit in plan.units if unit.layer is not None and unit.chunks)
    return {segment.tensor for unit in units for chunk in unit.chunks for segment in chunk.segments}


def over_collectives(plan: Plan) -> set[int]:
    """Tensors that collectives read where they are, and nothing else reads."""
    found: dict[bool, set[int]] = {True: set(), False: set()}
    for chunk in plan.chunks:
        by_collective = isinstance(plan.routes[chunk.route].over, Collective)
        found[by_collective].update(segment.tensor for segment in chunk.segments)
    return found[True] - found[False]


def wire_dtypes(plan: Plan) -> list[str]:
    """By tensor: the dtype to which a contribution is cast, whose range may be too small."""
    found = [spec.dtype for spec in plan.specs]
    for chunk in plan.chunks:
        codec = plan.routes[chunk.route].up
        if isinstance(codec, Dense):  # other codecs keep finite values finite
            for segment in chunk.segments:
                found[segment.tensor] = codec.wire_dtype(chunk.dtype)
    return found
