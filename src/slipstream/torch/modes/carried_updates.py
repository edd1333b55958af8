"""A learner with its own copy of the weights: a thread copies weights and gradients.

For models on a device, and on the CPU where weights must not change during a pass
(``consistent=True``). When a step ends, its gradients are handed to a thread and the next step
begins. The thread copies them into a slot, and the shared weights into the one of two buffers that
the model does not use, unless it has copied that version before. At the end of a later step the
model switches to the new buffer without a copy.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import RuntimeFault
from slipstream.torch.capture.replaced_weights import FirstWeights, Memory, refuse_replaced
from slipstream.torch.modes.learner_slots import SlotWriter
from slipstream.torch.modes.shared_weights import SharedWeights
from slipstream.torch.tensors.staging import CopyEngine, Pairs

AHEAD = 1  # steps whose gradients wait to be copied
TICK_S = 0.2


def pin(memory: Tensor) -> None:
    """Register host memory with the device, so that copies need no intermediate buffer."""
    if torch.cuda.is_available():
        cudart: Any = torch.cuda.cudart()
        cudart.cudaHostRegister(memory.data_ptr(), memory.numel() * memory.element_size(), 0)


@dataclass(slots=True)
class FinishedStep:
    """What a step hands over to the copying thread."""

    gradients: list[Tensor | None]
    buffers: Pairs
    settings: list[float]
    version: int
    number: int  # of the step
    mark: Any


@dataclass(slots=True)
class FreshWeights:
    """A buffer with newer weights, which the model may be pointed at."""

    buffer: int
    version: int


class CarriedUpdates:
    """Ends steps by handing gradients over; its thread fills slots with them.

    Args:
        weights: The shared weights; the model has copies of them.
        holding: Within this context, the shared weights do not change, if the strategy requires it.
        first: Decides about weights that the loop has put in place before its first step.
    """

    def __init__(
        self,
        slots: SlotWriter,
        weights: SharedWeights,
        copies: CopyEngine,
        holding: Callable[[], AbstractContextManager[object]],
        first: FirstWeights,
    ) -> None:
        self._slots, self._weights, self._copies = slots, weights, copies
        self._holding, self._first = holding, first
        self._versions: list[int] = []
        self._seen = self._copied = self._take_all()
        # The model uses one, the copying thread fills the other.
        self._buffers = [weights.own_tensors(), weights.spare_tensors()]
        self._memories = [Memory(buffer) for buffer in self._buffers]
        self._used, self._stays = 0, False
        self._left: Any = None  # after this mark the other buffer is no longer read
        self._fresh: FreshWeights | None = None
        self._lock = threading.Lock()
        self._finished: queue.Queue[FinishedStep | None] = queue.Queue(AHEAD)
        self._error: BaseException | None = None
        self.steps = 0
        self.pulls = 0
        self.skipped = 0
        self._thread = threading.Thread(target=self._run, name="carrier", daemon=True)
        self._thread.start()

    # ---- the training thread

    def end_step(self) -> None:
        """Hand the gradients over.

        Raises:
            RuntimeFault: The loop has changed weights, which would be lost.
        """
        self._slots.refuse_untracked()
        self._take_changed_weights()
        step = FinishedStep(
            [parameter.grad for parameter in self._slots.parameters],
            [(view, own.detach().clone()) for view, own in self._weights.buffers()],
            self._slots.settings(),
            self._seen,
            self.steps,
            self._copies.mark(),
        )
        for parameter in self._slots.parameters:
            parameter.grad = None
        self._hand_over(step)
        self.steps += 1
        self._take_fresh()

    def _take_changed_weights(self) -> None:
        """Share weights that were changed before the first step: all learners have loaded them."""
        memory = self._memories[self._used]
        replaced = memory.replaced(self._slots.parameters)
        if not replaced and self._versions == self._versions_now():
            return
        names, parameters = self._slots.names, self._slots.parameters
        if self.steps and replaced:
            raise refuse_replaced(names[replaced[0]])
        if self.steps:
            raise RuntimeFault(
                "weights were changed outside of the optimizer, but this learner has a copy of the "
                "shared ones, which replaces them: with consistent=False a model on the CPU has "
                "the shared ones themselves; load weights before the first step"
            )
        changed = self._changed(replaced)
        memory.take(names, parameters, replaced)
        memory.restore(parameters, replaced)
        if self._first.count(list(changed), list(changed.values())):
            self._weights.fill()
        else:
            self._copied = -1  # the shared ones are newer than this version of them
        self._versions = self._versions_now()

    def _changed(self, replaced: Sequence[int]) -> dict[str, Tensor]:
        """By name: the parameters that were replaced, or written in place."""
        written = {
            id(parameter)
            for parameter, version in zip(self._slots.constant, self._versions, strict=True)
            if parameter._version != version
        }
        named = enumerate(zip(self._slots.names, self._slots.parameters, strict=True))
        return {name: p for i, (name, p) in named if i in replaced or id(p) in written}

    def replaced(self) -> list[str]:
        """The names of parameters that the loop has replaced since the last step."""
        replaced = self._memories[self._used].replaced(self._slots.parameters)
        return [self._slots.names[i] for i in replaced]

    def _versions_now(self) -> list[int]:
        """Neither switching buffers nor filling them changes a parameter's version."""
        return [parameter._version for parameter in self._slots.constant]

    def finish(self) -> None:
        """Wait until everything is copied; the model then has the current weights."""
        while self._finished.unfinished_tasks:
            self._raise_error()
            with self._finished.all_tasks_done:
                self._finished.all_tasks_done.wait(TICK_S)
        self._raise_error()
        self._copy_weights()
        self._take_fresh()

    def begin_anew(self) -> None:
        """The weights and all state that belongs to them have been replaced."""
        self.finish()
        memory, parameters = self._memories[self._used], self._slots.parameters
        memory.restore(parameters, memory.replaced(parameters))
        self._seen = self._copied = self._take_all()

    def _take_all(self) -> int:
        with self._holding():
            version = self._slots.version()
            self._weights.copy_in()
        self._versions = self._versions_now()
        return version

    def _hand_over(self, step: FinishedStep | None) -> None:
        while True:
            self._raise_error()
            try:
                self._finished.put(step, timeout=TICK_S)
            except queue.Full:
                continue
            return

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    @contextmanager
    def keeping_apart(self) -> Iterator[None]:
        """Within, the model stays with the buffer that it uses."""
        before, self._stays = self._stays, True
        try:
            yield
        finally:
            self._stays = before

    def _take_fresh(self) -> None:
        if self._stays:
            return
        with self._lock:
            fresh, self._fresh = self._fresh, None
            if fresh is None:
                return
            self._used, self._seen = fresh.buffer, fresh.version
            self._left = self._copies.mark()
        self._weights.point_at(self._buffers[fresh.buffer])

    def close(self) -> None:
        if self._thread.is_alive() and self._error is None:
            self._hand_over(None)
            self._thread.join()

    # ---- the copying thread

    def _run(self) -> None:
        while True:
            step = self._finished.get()
            try:
                if step is None:
                    return
                if self._error is None:
                    self._push(step)
                    self._copy_weights()
            except BaseException as error:  # raised again by the training thread
                self._error = error
            finally:
                self._finished.task_done()

    @torch.no_grad()
    def _push(self, step: FinishedStep) -> None:
        slot = self._slots.next()
        pairs: list[tuple[Tensor, Tensor]] = []
        forms = []
        for index, gradient in enumerate(step.gradients):
            form, more = slot.place(index, gradient)
            forms.append(form)
            pairs += more
        pairs += step.buffers
        self._copies.start(pairs, step.mark)()
        self._slots.examine(slot, forms, step.number)
        self._slots.deliver(slot, forms, step.settings, step.version)

    @torch.no_grad()
    def _copy_weights(self) -> None:
        """Copy the newest weights into the unused buffer, each version once."""
        with self._lock:
            if self._slots.version() == self._copied:
                self.skipped += 1
                return
            self._fresh = None  # the model keeps its buffer meanwhile
            free, left = 1 - self._used, self._left
        with self._holding():
            version = self._slots.version()
            pairs = list(zip(self._buffers[free], self._weights.trained(), strict=True))
            self._copies.start(pairs, left)()
        self._copied = version
        self.pulls += 1
        with self._lock:
            self._fresh = FreshWeights(free, version)
