"""A learner whose weights and gradients are carried by another thread."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from slipstream._native import Rings, format_segment, segment_nbytes
from slipstream.errors import RuntimeFault
from slipstream.planning.segment import ABSENT, DENSE, ROWS, SegmentPlan
from slipstream.torch.capture.replaced_weights import FirstWeights
from slipstream.torch.modes.carried_updates import CarriedUpdates
from slipstream.torch.modes.learner_slots import Slot, SlotWriter, slots_of
from slipstream.torch.modes.shared_weights import SharedWeights, shared_tensors
from slipstream.torch.tensors.fingerprint import digest_of
from slipstream.torch.tensors.staging import ImmediateCopies, Pairs
from slipstream.transports.shared_memory import SharedMemory


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 3, sparse=True)
        self.norm = nn.BatchNorm1d(3)
        self.out = nn.Linear(3, 2)
        self.unused = nn.Linear(1, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.rows(ids)))


class Watched(ImmediateCopies):
    """Marks are numbers, as if work were queued on a device; copies are made when waited for."""

    def __init__(self) -> None:
        self.meanwhile: Callable[[Pairs], None] = lambda _: None
        self.marks = 0
        self.copies: list[tuple[Pairs, Any]] = []

    def mark(self) -> Any:
        self.marks += 1
        return self.marks

    def start(self, pairs: Pairs, after: Any = None) -> Callable[[], None]:
        self.meanwhile(pairs)
        self.copies.append((pairs, after))
        return lambda: ImmediateCopies.start(self, pairs, after)()


class Bench:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.plan = SegmentPlan.of(shared_tensors(self.model, self.optimizer), 1)
        shape = (1, 2, self.plan.slot_nbytes, self.plan.weights_nbytes)
        self.memory = SharedMemory.create(segment_nbytes(*shape))
        format_segment(self.memory.memory, *shape)
        self.rings = Rings(self.memory.memory)
        self.weights = SharedWeights(self.model, self.plan, self.memory, self.rings.weights_at)
        self.weights.fill()
        self.delivered: list[tuple[Slot, list[int], int]] = []
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.held = 0
        self.fails = False
        self.trained_by: set[str] = set()
        self.way = Watched()
        turns = itertools.count()

        def reserve() -> int:
            self.goes_on.wait(10)
            return next(turns) % 2

        slots = SlotWriter(
            self.model,
            self.optimizer,
            self.plan,
            slots_of(self.memory, self.rings, self.plan, 0),
            reserve=reserve,
            deliver=self._deliver,
            version=lambda: self.rings.version,
        )
        self.others_train = False
        self.shared: list[object] = []
        first = FirstWeights(lambda: self.others_train, self._share)
        self.updates = CarriedUpdates(slots, self.weights, self.way, self._holding, first)

    def _share(self, value: object) -> object:
        """As the launcher does: the first value is everybody's."""
        self.shared.append(value)
        return self.shared[0]

    def _deliver(self, slot: Slot) -> None:
        if self.fails:
            raise ZeroDivisionError("on purpose")
        self.trained_by.add(threading.current_thread().name)
        forms, _, version = slot.front
        self.delivered.append((slot, forms, version))

    @contextmanager
    def _holding(self) -> Iterator[None]:
        self.held += 1
        yield

    def step(self) -> list[torch.Tensor | None]:
        self.model(torch.tensor([1, 4, 4])).sum().backward()
        gradients = [p.grad for p in self.model.parameters()]
        self.updates.end_step()
        return gradients

    def change(self, amount: float) -> None:
        for view in self.weights.trained():
            view.add_(amount)
        self.rings.advance()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.goes_on.set()
    bench.updates.close()


def test_gradients_come_into_slots_in_every_form(bench: Bench) -> None:
    for _ in range(3):
        gradients = bench.step()
        bench.updates.finish()
        slot, forms, _ = bench.delivered[-1]
        assert forms == [ROWS + 3, DENSE, DENSE, DENSE, DENSE, ABSENT, ABSENT]
        assert slot.numbers[0][:3].tolist() == [1, 4, 4]
        for view, gradient in zip(slot.gradients, gradients, strict=True):
            if gradient is not None:
                whole = gradient.to_dense() if gradient.is_sparse else gradient
                assert torch.equal(view, whole)
        slot.gradients[0].numpy()[:] = 0.0  # as the server does, without torch's knowledge
        assert all(p.grad is None for p in bench.model.parameters())
    assert bench.trained_by == {"carrier"}


def test_the_next_step_does_not_wait_for_the_carrier(bench: Bench) -> None:
    bench.goes_on.clear()
    bench.step()
    bench.step()
    assert bench.delivered == []
    bench.goes_on.set()
    bench.updates.finish()
    assert len(bench.delivered) == 2


def test_weights_are_brought_once_a_version(bench: Bench) -> None:
    before = bench.model.out.weight.detach().clone()
    bench.step()
    bench.updates.finish()
    assert (bench.updates.pulls, bench.held) == (0, 1)  # once, at the beginning
    assert bench.updates.skipped >= 2
    bench.change(1.0)
    assert torch.equal(bench.model.out.weight, before)  # not under the learner's hands
    bench.updates.finish()
    assert torch.equal(bench.model.out.weight, before + 1.0)
    assert (bench.updates.pulls, bench.held) == (1, 2)
    bench.step()
    bench.updates.finish()
    assert bench.delivered[-1][2] == 1  # the version it was computed on
    assert bench.updates.pulls == 1
    for _ in range(3):
        bench.change(1.0)
        bench.updates.finish()
    assert torch.equal(bench.model.out.weight, before + 4.0)


def test_the_model_is_never_pointed_at_what_is_being_filled(bench: Bench) -> None:
    """New weights were offered and not taken yet; newer ones go into the same buffer."""
    used = []

    def tick(pairs: Pairs) -> None:
        bench.updates._take_fresh()  # the training thread ends a step just now
        own = {p.data_ptr() for p in bench.model.parameters()}
        used.extend(target.data_ptr() in own for target, _ in pairs)

    for _ in range(3):
        bench.change(1.0)
        bench.updates._copy_weights()
    bench.way.meanwhile = tick
    bench.change(1.0)
    bench.updates._copy_weights()
    assert used
    assert not any(used)


def test_a_buffer_is_not_filled_before_the_step_that_used_it_is_done(bench: Bench) -> None:
    bench.change(1.0)
    bench.updates.finish()
    bench.step()
    bench.updates.finish()
    bench.change(1.0)
    bench.updates.finish()
    bench.goes_on.clear()  # the carrier is busy with the step before
    bench.step()
    left = {p.data_ptr() for p in bench.model.parameters()}
    bench.change(1.0)
    bench.updates._copy_weights()
    bench.step()  # the model is switched, with the device at work on this step
    ends = bench.way.marks
    bench.way.copies.clear()
    bench.change(1.0)
    bench.updates._copy_weights()
    pairs, after = bench.way.copies[-1]
    assert {target.data_ptr() for target, _ in pairs} <= left
    assert after == ends


def test_weights_that_were_replaced_are_all_taken(bench: Bench) -> None:
    for view in bench.weights.views:
        view.fill_(3)
    bench.rings.version = 70
    bench.updates.begin_anew()
    assert (bench.model.out.weight == 3).all()
    assert (bench.model.norm.running_mean == 3).all()
    assert bench.model.norm.num_batches_tracked == 3
    bench.step()
    bench.updates.finish()
    assert bench.delivered[-1][2] == 70


def test_buffers_are_everybodys(bench: Bench) -> None:
    bench.step()
    bench.updates.finish()
    shared = dict(zip((t.name for t in bench.plan.tensors), bench.weights.views, strict=True))
    assert torch.equal(shared["norm.running_mean"], bench.model.norm.running_mean)
    assert shared["norm.running_mean"].any()


def test_trouble_reaches_the_loop(bench: Bench) -> None:
    bench.fails = True
    bench.step()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        bench.updates.finish()
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        bench.step()


def test_weights_that_are_loaded_before_the_first_step_are_shared(bench: Bench) -> None:
    nn.init.constant_(bench.model.out.weight, 3.0)
    bench.step()
    bench.updates.finish()
    assert any((view == 3.0).all() for view in bench.weights.trained())
    for number in range(3):  # new weights are not the user's change
        bench.change(0.25)
        bench.updates.finish()
        bench.step()
        assert (bench.model.out.weight == 3.25 + 0.25 * number).all()


def test_weights_that_another_learner_has_loaded_and_trained_stay(bench: Bench) -> None:
    nn.init.constant_(bench.model.out.weight, 3.0)
    bench.shared.append([["out.weight", digest_of([bench.model.out.weight])], "another learner's"])
    bench.others_train = True
    before = [view.clone() for view in bench.weights.trained()]
    bench.step()
    bench.updates.finish()
    for view, old in zip(bench.weights.trained(), before, strict=True):
        assert torch.equal(view, old)
    assert not (bench.model.out.weight == 3.0).any()  # nor is it trained with any longer


def test_weights_that_no_other_learner_has_loaded_come_too_late(bench: Bench) -> None:
    nn.init.constant_(bench.model.out.weight, 3.0)
    bench.others_train = True
    with pytest.warns(UserWarning, match="'out.weight'.*do not count"):
        bench.step()


def test_the_model_stays_with_its_buffer_while_it_has_other_weights(bench: Bench) -> None:
    bench.step()
    bench.updates.finish()
    with bench.updates.keeping_apart():
        own = bench.model.out.weight.data
        before = own.clone()
        bench.model.out.weight.data = torch.full_like(own, 7.0)
        for _ in range(3):
            bench.change(1.0)
            bench.updates.finish()
        assert (bench.model.out.weight == 7.0).all()
        bench.model.out.weight.data = own
    bench.step()
    bench.updates.finish()
    torch.testing.assert_close(bench.model.out.weight.data, before + 3.0)


def test_memory_that_is_replaced_before_the_first_step_is_shared(bench: Bench) -> None:
    mine = torch.full_like(bench.model.out.weight, 3.0)
    bench.model.out.weight.data = mine
    bench.step()
    bench.updates.finish()
    assert any((view == 3.0).all() for view in bench.weights.trained())
    for number in range(2):
        bench.change(0.25)
        bench.updates.finish()
        bench.step()
        assert (bench.model.out.weight == 3.25 + 0.25 * number).all()
    assert (mine == 3.0).all()  # the loop's own


def test_memory_that_is_replaced_later_is_refused_by_name(bench: Bench) -> None:
    bench.step()
    bench.model.out.weight.data = bench.model.out.weight.data.clone()
    assert bench.updates.replaced() == ["out.weight"]
    with pytest.raises(RuntimeFault, match=r"'out.weight' was replaced.*p.data.copy_"):
        bench.step()


def test_weights_that_are_changed_later_are_refused(bench: Bench) -> None:
    bench.step()
    nn.init.constant_(bench.model.out.weight, 3.0)
    with pytest.raises(RuntimeFault, match="consistent=False"):
        bench.step()
