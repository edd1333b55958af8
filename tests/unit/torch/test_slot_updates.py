"""What a learner writes into its slots against the gradients that torch makes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream._native import Rings, format_segment, segment_nbytes
from slipstream.errors import RuntimeFault
from slipstream.planning.segment import ABSENT, DENSE, ROWS, SegmentPlan
from slipstream.torch.capture.replaced_weights import FirstWeights
from slipstream.torch.modes.learner_slots import Slot, SlotWriter, slots_of
from slipstream.torch.modes.shared_weights import SharedWeights, shared_tensors
from slipstream.torch.modes.slot_updates import SlotUpdates
from slipstream.torch.optimizers.loop_optimizer import LoopOptimizer
from slipstream.torch.tensors.fingerprint import digest_of
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.transports.shared_memory import SharedMemory

WORDS, WIDTH = 30, 8


class Reader(nn.Module):
    """An embedding, a convolution, a wide layer that is captured and a narrow one that is not."""

    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0, sparse=sparse)
        self.mix = nn.Conv1d(WIDTH, 16, 2)
        self.wide = nn.Linear(16, 5000)
        self.congested = nn.Linear(5000, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, rows: Tensor) -> Tensor:
        mixed = self.mix(self.words(rows).transpose(1, 2)).amax(2)
        return self.congested(self.wide(mixed).relu())


class Bench:
    def __init__(
        self, model: nn.Module, finite: FiniteGradients | None = None, **settings: float
    ) -> None:
        self.twin = copy.deepcopy(model)
        self.model = model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **settings)  # type: ignore[arg-type]
        self.plan = SegmentPlan.of(shared_tensors(model, optimizer), 1)
        shape = (1, 2, self.plan.slot_nbytes, self.plan.weights_nbytes)
        self.memory = SharedMemory.create(segment_nbytes(*shape))
        format_segment(self.memory.memory, *shape)
        self.rings = Rings(self.memory.memory)
        self.weights = SharedWeights(model, self.plan, self.memory, self.rings.weights_at)
        self.weights.fill()
        self.weights.bind()
        turns = itertools.count()
        self.delivered: list[tuple[Slot, list[int]]] = []
        slots = SlotWriter(
            model,
            optimizer,
            self.plan,
            slots_of(self.memory, self.rings, self.plan, 0),
            reserve=lambda: next(turns) % 2,
            deliver=lambda slot: self.delivered.append((slot, slot.front[0])),
            version=lambda: self.rings.version,
            finite=finite,
        )
        self.others_train = False
        self.shared: list[object] = []
        first = FirstWeights(lambda: self.others_train, self._share)
        self.updates = SlotUpdates(model, self.plan, slots, self.weights, first)
        self.optimizer = LoopOptimizer(optimizer)
        self.optimizer.attach(self.updates.end_step)

    def _share(self, value: object) -> object:
        """As the launcher does: the first value is everybody's."""
        self.shared.append(value)
        return self.shared[0]

    def view(self, name: str) -> Tensor:
        """The shared weights under a name."""
        return self.weights.views[[tensor.name for tensor in self.plan.tensors].index(name)]

    def forms(self) -> dict[str, int]:
        names = [self.plan.tensors[gradient.tensor].name for gradient in self.plan.gradients]
        return dict(zip(names, self.delivered[-1][1], strict=True))

    def assert_gradients(self, expected: nn.Module) -> None:
        """The last slot holds the gradients of ``expected``, to the last bit or nearly so."""
        slot, forms = self.delivered[-1]
        known = dict(expected.named_parameters())
        applied = []
        for view, numbers, gradient, form in zip(
            slot.gradients, slot.numbers, self.plan.gradients, forms, strict=True
        ):
            wanted = known[self.plan.tensors[gradient.tensor].name].grad
            if form == ABSENT:
                assert wanted is None
                continue
            assert wanted is not None
            wanted = wanted.to_dense() if wanted.is_sparse else wanted
            torch.testing.assert_close(view, wanted, rtol=1e-5, atol=1e-6)
            if form >= ROWS:
                named = numbers[: form - ROWS]
                rest = torch.ones(len(view), dtype=torch.bool)
                rest[named] = False
                assert not view[rest].any()
                applied.append((view, named))
        for view, named in applied:  # as the server does, without torch's knowledge
            view.numpy()[named.numpy()] = 0.0


def batch(seed: int, most: int = WORDS) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, most, (4, 6), generator=generator)
    return rows, torch.randint(0, 3, (4,), generator=generator)


def backward(model: nn.Module, seed: int) -> None:
    rows, labels = batch(seed)
    F.cross_entropy(model(rows), labels).backward()


@pytest.fixture(params=[False, True], ids=["dense", "sparse"])
def bench(request: pytest.FixtureRequest) -> Bench:
    torch.manual_seed(0)
    return Bench(Reader(sparse=request.param))


def both(bench: Bench, act: Callable[[nn.Module], None]) -> None:
    act(bench.model)
    act(bench.twin)


def test_step_after_step_slots_hold_the_gradients(bench: Bench) -> None:
    for seed in range(6):
        bench.optimizer.zero_grad()
        bench.twin.zero_grad()
        both(bench, lambda model, seed=seed: backward(model, seed))
        assert bench.model.words.weight.grad is not None
        bench.optimizer.step()
        bench.assert_gradients(bench.twin)
        assert ROWS < bench.forms()["words.weight"] <= ROWS + WORDS
        assert bench.forms()["wide.weight"] == DENSE
        assert bench.forms()["unused.weight"] == ABSENT
        assert all(p.grad is None for p in bench.model.parameters())
        whole = [
            p for n, p in bench.twin.named_parameters() if n.split(".")[0] in "mix wide congested"
        ]
        rows = bench.forms()["words.weight"] - ROWS
        written = 4 * (sum(p.numel() for p in whole) + rows * WIDTH)
        assert bench.delivered[-1][0].filled_nbytes == written


def test_settings_and_the_version_travel_with_them(bench: Bench) -> None:
    bench.rings.version = 7
    both(bench, lambda model: backward(model, 0))
    bench.optimizer.step()
    assert bench.delivered[0][0].front[2] == 0  # what there was when the step began
    bench.optimizer.param_groups[0]["lr"] = 0.25
    both(bench, lambda model: backward(model, 1))
    bench.optimizer.step()
    slot = bench.delivered[1][0]
    _, numbers, version = slot.front
    assert version == 7
    assert numbers[0] == 0.25


def test_several_backwards_add_up(bench: Bench) -> None:
    for seed in range(3):
        both(bench, lambda model, seed=seed: backward(model, seed))
    bench.optimizer.step()
    bench.assert_gradients(bench.twin)
    # And nothing of it stays in the slot.
    for seed in range(3, 6):
        bench.twin.zero_grad()
        both(bench, lambda model, seed=seed: backward(model, seed))
        bench.optimizer.step()
        bench.assert_gradients(bench.twin)
        assert bench.forms()["words.weight"] > ROWS


def test_gradients_may_be_clipped() -> None:
    torch.manual_seed(0)
    bench = Bench(Reader())
    for seed in range(3):
        bench.twin.zero_grad()
        both(bench, lambda model, seed=seed: backward(model, seed))
        both(bench, lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.01) and None)
        bench.optimizer.step()
        bench.assert_gradients(bench.twin)
        assert bench.forms()["words.weight"] == DENSE  # it was changed: it may be anything


def test_gradients_may_be_set_by_the_loop(bench: Bench) -> None:
    both(bench, lambda model: backward(model, 0))
    for model in (bench.model, bench.twin):
        model.mix.weight.grad = torch.ones_like(model.mix.weight)
        model.words.weight.grad = torch.ones_like(model.words.weight)
    bench.optimizer.step()
    bench.assert_gradients(bench.twin)
    # And nothing of it stays in the slot.
    for seed in (1, 2):
        bench.twin.zero_grad()
        both(bench, lambda model, seed=seed: backward(model, seed))
        bench.optimizer.step()
        bench.assert_gradients(bench.twin)


@pytest.mark.parametrize("to_none", [True, False])
def test_a_step_that_is_given_up_leaves_nothing(bench: Bench, to_none: bool) -> None:
    both(bench, lambda model: backward(model, 0))
    bench.optimizer.zero_grad(set_to_none=to_none)
    bench.twin.zero_grad(set_to_none=to_none)
    both(bench, lambda model: backward(model, 1))
    bench.optimizer.step()
    bench.assert_gradients(bench.twin)


@pytest.mark.parametrize("change", ["backward", "noise"])
def test_what_was_given_up_after_a_change_leaves_nothing(change: str) -> None:
    torch.manual_seed(0)
    bench = Bench(Reader())
    backward(bench.model, 0)
    if change == "backward":
        backward(bench.model, 5)
    else:
        bench.model.words.weight.grad += 1.0
    bench.optimizer.zero_grad()
    for seed in (1, 2, 3):
        bench.twin.zero_grad()
        both(bench, lambda model, seed=seed: backward(model, seed))
        bench.optimizer.step()
        bench.assert_gradients(bench.twin)


def test_a_gradient_that_was_changed_between_two_backwards_is_taken_whole() -> None:
    torch.manual_seed(0)
    bench = Bench(Reader())
    both(bench, lambda model: backward(model, 0))
    for model in (bench.model, bench.twin):
        model.words.weight.grad += 0.5
    both(bench, lambda model: backward(model, 1))
    bench.optimizer.step()
    bench.assert_gradients(bench.twin)
    assert bench.forms()["words.weight"] == DENSE
    for seed in (2, 3):
        bench.twin.zero_grad()
        both(bench, lambda model, seed=seed: backward(model, seed))
        bench.optimizer.step()
        bench.assert_gradients(bench.twin)


def test_what_was_frozen_since_has_no_gradient(bench: Bench) -> None:
    for model in (bench.model, bench.twin):
        model.wide.weight.requires_grad_(False)
    both(bench, lambda model: backward(model, 0))
    bench.optimizer.step()
    bench.assert_gradients(bench.twin)
    assert bench.forms()["wide.weight"] == ABSENT
    assert bench.forms()["wide.bias"] == DENSE


def test_what_is_unfrozen_afterwards_is_refused() -> None:
    model = Reader()
    model.mix.requires_grad_(False)
    bench = Bench(model)
    backward(bench.model, 0)
    bench.optimizer.step()
    model.mix.requires_grad_(True)
    backward(bench.model, 0)
    with pytest.raises(RuntimeFault, match=r"unfreeze parameters before job\.distribute"):
        bench.optimizer.step()


class Averaging(nn.Module):
    """Puts another tensor into its buffer's place in every step, and counts them."""

    average: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2, 1)
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.5 * self.average + 0.5 * x.detach().mean(0)
        self.count += 1
        return self.out(x - self.average)


def test_buffers_that_a_module_replaces_are_shared() -> None:
    bench = Bench(Averaging())
    for _ in range(3):
        bench.model(torch.ones(4, 2)).sum().backward()
        bench.optimizer.step()
    shared = dict(zip((t.name for t in bench.plan.tensors), bench.weights.views, strict=True))
    assert shared["average"].tolist() == [0.875, 0.875]
    assert int(shared["count"]) == 3
    shared["average"].fill_(5.0)
    shared["count"].fill_(70)
    bench.weights.copy_in_unbound()
    assert bench.model.average.tolist() == [5.0, 5.0]
    assert bench.model.count == 70


def test_values_of_rows_may_lie_in_any_order() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, WIDTH)
            self.mix = nn.Conv1d(WIDTH, 3, 2)

        def forward(self, rows: Tensor) -> Tensor:
            return self.mix(self.words(rows).transpose(1, 2)).amax(2)

    bench = Bench(Turned())
    for seed in range(4):
        rows, labels = batch(seed)
        bench.twin.zero_grad()
        both(bench, lambda m, r=rows, y=labels: F.cross_entropy(m(r[:1]), y[:1]).backward())
        bench.optimizer.step()
        bench.assert_gradients(bench.twin)
        assert bench.forms()["words.weight"] == ROWS + 6


def test_buffers_of_another_shape_are_left_alone() -> None:
    bench = Bench(Averaging())
    bench.model(torch.ones(4, 2)).sum().backward()
    bench.model.average = torch.ones(3)
    bench.optimizer.step()
    shared = dict(zip((t.name for t in bench.plan.tensors), bench.weights.views, strict=True))
    assert shared["average"].tolist() == [0.0, 0.0]
    bench.model.average = None
    bench.model.out(torch.ones(4, 2)).sum().backward()
    bench.optimizer.step()
    assert int(shared["count"]) == 1


def test_sparse_gradients_of_other_layers_are_taken_whole() -> None:
    class OwnBag(nn.EmbeddingBag):
        def forward(self, rows: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(rows)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = OwnBag(WORDS, WIDTH, sparse=True)
            self.out = nn.Linear(WIDTH, 3)

        def forward(self, rows: Tensor) -> Tensor:
            return self.out(self.bag(rows))

    torch.manual_seed(0)
    bench = Bench(Bag())
    for seed in (0, 1):
        bench.twin.zero_grad()
        both(bench, lambda model, seed=seed: backward(model, seed))
        bench.optimizer.step()
        bench.assert_gradients(bench.twin)
    assert bench.forms()["bag.weight"] == DENSE


def test_a_layer_used_twice(bench: Bench) -> None:
    def twice(model: nn.Module) -> None:
        (one, labels), (other, _) = batch(0), batch(1)
        F.cross_entropy(model(one) + model(other), labels).backward()

    both(bench, twice)
    bench.optimizer.step()
    bench.assert_gradients(bench.twin)


def test_weights_are_the_shared_ones_until_the_end(bench: Bench) -> None:
    parameter = bench.model.mix.weight
    view = bench.weights.views[1]
    view.fill_(3.0)
    assert (parameter == 3.0).all()
    assert "forward" in vars(bench.model.words)
    bench.updates.close()
    assert "forward" not in vars(bench.model.words)
    bench.weights.unbind()
    view.fill_(4.0)
    assert (parameter == 3.0).all()
    backward(bench.model, 0)
    assert bench.delivered == []
    assert parameter.grad is not None


def test_numbers_of_rows_fit_what_the_server_reads(bench: Bench) -> None:
    """A slot that another learner died with may hold anything: it is cleaned before it is used."""
    raw = bench.memory.view(bench.rings.slot_at(0, 0), bench.plan.slot_nbytes)
    np.frombuffer(raw, np.uint8)[:] = 255
    both(bench, lambda model: backward(model, 0))
    bench.optimizer.step()
    bench.assert_gradients(bench.twin)


def test_refused_gradients_are_absent_and_leave_clean_slots() -> None:
    torch.manual_seed(0)
    bench = Bench(Reader(), finite=FiniteGradients("refuse", rank=1))
    for step in range(6):
        backward(bench.model, step)
        backward(bench.twin, step)
        bad = step in (2, 3)  # in each of two slots
        if bad:
            with torch.no_grad():  # written without torch's knowledge: still rows, one infinite
                bench.model.words.weight.grad.numpy()[batch(step)[0][0, 0]] = np.inf
            bench.model.wide.weight.grad[7, 7] = torch.nan
            bench.twin.words.weight.grad = bench.twin.wide.weight.grad = None
        if step == 2:
            with pytest.warns(UserWarning, match="rank 1: .* is not finite at step 2"):
                bench.optimizer.step()
        else:
            bench.optimizer.step()
        assert (bench.forms()["words.weight"] == ABSENT) == bad
        assert (bench.forms()["wide.weight"] == ABSENT) == bad
        bench.assert_gradients(bench.twin)
        bench.twin.zero_grad()


# ---- parameters whose memory the loop replaces


def test_memory_that_is_replaced_before_the_first_step_is_shared(bench: Bench) -> None:
    mine = torch.full_like(bench.model.mix.bias, 3.0)
    bench.model.mix.bias.data = mine
    bench.optimizer.step()
    assert (bench.view("mix.bias") == 3.0).all()
    bench.view("mix.bias").fill_(4.0)
    assert (bench.model.mix.bias == 4.0).all()
    assert (mine == 3.0).all()  # the loop's own


def test_memory_that_is_replaced_where_others_train_does_not_count_and_says_so(
    bench: Bench,
) -> None:
    before, bench.others_train = bench.view("mix.bias").clone(), True
    bench.model.mix.bias.data = torch.full_like(bench.model.mix.bias, 3.0)
    with pytest.warns(UserWarning, match="'mix.bias'.*do not count"):
        bench.optimizer.step()
    assert torch.equal(bench.model.mix.bias, before)
    assert bench.model.mix.bias.data_ptr() == bench.view("mix.bias").data_ptr()


def test_memory_that_another_learner_has_replaced_alike_is_left_as_it_was_trained(
    bench: Bench,
) -> None:
    """Also by this learner itself, before it was started again."""
    before, bench.others_train = bench.view("mix.bias").clone(), True
    bench.model.mix.bias.data = torch.full_like(bench.model.mix.bias, 3.0)
    bench.shared.append([["mix.bias", digest_of([bench.model.mix.bias])], "another learner's"])
    bench.optimizer.step()
    assert torch.equal(bench.model.mix.bias, before)


@pytest.mark.parametrize("name", ["mix.bias", "unused.weight"])
def test_memory_that_is_replaced_later_is_refused_by_name(bench: Bench, name: str) -> None:
    bench.optimizer.step()
    parameter = bench.model.get_parameter(name)
    parameter.data = parameter.data.clone()
    assert bench.updates.replaced() == [name]
    with pytest.raises(RuntimeFault, match=rf"'{name}' was replaced.*p.data.copy_"):
        bench.optimizer.step()


@pytest.mark.parametrize(
    ("values", "what"),
    [(torch.zeros(4), "shape"), (torch.zeros(16, dtype=torch.float64), "dtype")],
)
def test_memory_of_another_kind_is_refused_by_name(bench: Bench, values: Tensor, what: str) -> None:
    bench.model.mix.bias.data = values
    with pytest.raises(RuntimeFault, match=rf"'mix.bias' has {what}"):
        bench.optimizer.step()


def test_empty_parameters_and_replaced_buffers_are_no_replaced_memory() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model.register_parameter("nothing", nn.Parameter(torch.empty(0)))
    bench = Bench(model)
    for mean in (1.0, 2.0):
        model.nothing.data = torch.empty(0)
        model[1].running_mean = torch.full((2,), mean)
        bench.optimizer.step()
        assert bench.updates.replaced() == []
        assert (bench.view("1.running_mean") == mean).all()
    bench.updates.begin_anew()
    model[0].weight.data = torch.zeros(2, 3)
    bench.updates.begin_anew()
    assert bench.updates.replaced() == []
    assert torch.equal(model[0].weight, bench.view("0.weight"))
    assert model[0].weight.any()
