"""A learner that computes on weights of its own: another thread carries them, and its gradients.

For models on a device, and on the CPU where weights must not change under a learner
(``consistent=True``). When a step ends, its gradients are handed to the carrier and the next step
begins: the carrier copies them into a slot, and the shared weights into the one of two buffers that
the model does not use, unless it has brought that version before. At the end of a later step the
model is pointed at the new buffer; nothing is copied for that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.planning.segment import SegmentPlan
from slipstream.torch.finite_gradients import FiniteGradients
from slipstream.torch.shared_weights import Settings, SharedWeights
from slipstream.torch.slot_updates import FiniteSlots, Slot, check_strangers, strangers

Pairs = Sequence[tuple[Tensor, Tensor]]  # to, from
AHEAD = 1  # steps whose gradients wait for the carrier
LOOK_S = 0.2


class Way(Protocol):
    """Between a device and the host's memory."""

    def mark(self) -> Any:
        """All that the training thread has asked of the device so far."""

    def copy(self, pairs: Pairs, after: Any = None) -> None:
        """Done when it returns; begins when what was marked is."""


class HostWay:
    """The device is the host itself."""

    def mark(self) -> None:
        return None

    def copy(self, pairs: Pairs, after: Any = None) -> None:
        for target, source in pairs:
            target.copy_(source)


class CudaWay:
    """A side stream, so that copies run beside the computing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)

    def mark(self) -> Any:
        event: Any = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(self, pairs: Pairs, after: Any = None) -> None:
        if after is not None:
            self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
                if source.is_cuda:
                    source.record_stream(self._stream)
        self._stream.synchronize()


def pin(memory: Tensor) -> None:
    """Tell the device of memory on the host, so that copies need no other in between."""
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()
        cudart.cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)


@dataclass(slots=True)
class Load:
    """What a step hands over."""

    gradients: list[Tensor | None]
    buffers: Pairs
    settings: list[float]
    version: int
    step: int
    mark: Any


@dataclass(slots=True)
class Offer:
    """Weights that the model may be pointed at."""

    buffer: int
    version: int


class CarriedUpdates:
    """Ends steps by handing gradients over; ``deliver`` is called by the carrier."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: SegmentPlan,
        slots: Sequence[Slot],
        weights: SharedWeights,
        way: Way,
        *,
        reserve: Callable[[], int],
        deliver: Callable[[Slot], None],
        version: Callable[[], int],
        holding: Callable[[], AbstractContextManager[object]],
        finite: FiniteGradients | None = None,
    ) -> None:
        named = dict(model.named_parameters())
        self._parameters = [named[plan.tensors[g.tensor].name] for g in plan.gradients]
        self._strangers = strangers(optimizer, self._parameters)
        self._settings = Settings(optimizer)
        self._finite = FiniteSlots(plan, finite or FiniteGradients())
        self._slots, self._weights, self._way = slots, weights, way
        self._reserve, self._deliver, self._version = reserve, deliver, version
        self._holding = holding
        self._seen = self._brought = self._take_all()
        # The model uses one, the carrier fills the other.
        self._buffers = [weights.own_tensors(), weights.spare_tensors()]
        self._used = 0
        self._left: Any = None  # the mark after which the other is read no more
        self._offer: Offer | None = None
        self._lock = threading.Lock()
        self._loads: queue.Queue[Load | None] = queue.Queue(AHEAD)
        self._trouble: BaseException | None = None
        self.steps = 0
        self.pulls = 0
        self.skipped = 0
        self._thread = threading.Thread(target=self._carry, name="carrier", daemon=True)
        self._thread.start()

    # ---- the training thread

    def end_step(self) -> None:
        check_strangers(self._strangers)
        load = Load(
            [parameter.grad for parameter in self._parameters],
            [(view, own.detach().clone()) for view, own in self._weights.buffers()],
            self._settings(),
            self._seen,
            self.steps,
            self._way.mark(),
        )
        for parameter in self._parameters:
            parameter.grad = None
        self._hand_over(load)
        self.steps += 1
        self._take_offer()

    def settle(self) -> None:
        """Until all is carried; then the model has the weights of now."""
        while self._loads.unfinished_tasks:
            self._raise_trouble()
            with self._loads.all_tasks_done:
                self._loads.all_tasks_done.wait(LOOK_S)
        self._raise_trouble()
        self._bring()
        self._take_offer()

    def begin_anew(self) -> None:
        """The weights have been replaced, and all that is beside them."""
        self.settle()
        self._seen = self._brought = self._take_all()

    def _take_all(self) -> int:
        with self._holding():
            version = self._version()
            self._weights.copy_in()
        return version

    def _hand_over(self, load: Load | None) -> None:
        while True:
            self._raise_trouble()
            try:
                self._loads.put(load, timeout=LOOK_S)
            except queue.Full:
                continue
            return

    def _raise_trouble(self) -> None:
        if self._trouble is not None:
            raise self._trouble

    def _take_offer(self) -> None:
        with self._lock:
            offer, self._offer = self._offer, None
            if offer is None:
                return
            self._used, self._seen = offer.buffer, offer.version
            self._left = self._way.mark()
        self._weights.point_at(self._buffers[offer.buffer])

    def close(self) -> None:
        if self._thread.is_alive() and self._trouble is None:
            self._hand_over(None)
            self._thread.join()

    # ---- the carrier

    def _carry(self) -> None:
        while True:
            load = self._loads.get()
            try:
                if load is None:
                    return
                if self._trouble is None:
                    self._push(load)
                    self._bring()
            except BaseException as error:  # raised again by the training thread
                self._trouble = error
            finally:
                self._loads.task_done()

    @torch.no_grad()
    def _push(self, load: Load) -> None:
        slot = self._slots[self._reserve()]
        pairs: list[tuple[Tensor, Tensor]] = []
        forms = []
        for index, gradient in enumerate(load.gradients):
            form, more = slot.place(index, gradient)
            forms.append(form)
            pairs += more
        pairs += load.buffers
        self._way.copy(pairs, load.mark)
        self._finite.leave_out(slot, forms, load.step)
        slot.describe(forms, load.settings, load.version)
        self._deliver(slot)

    @torch.no_grad()
    def _bring(self) -> None:
        """The newest weights, into the buffer that is not used; not twice."""
        with self._lock:
            if self._version() == self._brought:
                self.skipped += 1
                return
            self._offer = None  # the model stays where it is meanwhile
            free, left = 1 - self._used, self._left
        with self._holding():
            version = self._version()
            pairs = list(zip(self._buffers[free], self._weights.trained(), strict=True))
            self._way.copy(pairs, left)
        self._brought = version
        self.pulls += 1
        with self._lock:
            self._offer = Offer(free, version)
