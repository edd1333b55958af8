"""A torch optimizer on pieces of tensors must not notice that they are pieces."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import make_plan
from state_messages import StateMessages

from slipstream.errors import ConfigError, FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.files.state_entries import FIRST_WEIGHTS, STATE
from slipstream.torch.optimizers.shard_optimizer import (
    ELEMENTWISE,
    WEIGHTS,
    ShardOptimizer,
    bytes_of,
    check_elementwise,
    settings_of,
    tensor_of,
)
from slipstream.transports.wire import State, checksum
from slipstream.types import OptimizerRecipe, Settings, Spec, Values

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "SGD": ("SGD", {"lr": 0.1}),
    "momentum": ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "dampening": 0.1}),
    "Nesterov": ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "Adam": ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    "AMSGrad": ("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "AdamW": ("AdamW", {"lr": 0.01, "betas": (0.8, 0.95)}),
    "RMSprop": ("RMSprop", {"lr": 0.01, "momentum": 0.5, "centered": True}),
    "Adagrad": ("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.1}),
    "Adadelta": ("Adadelta", {}),
    "Adamax": ("Adamax", {}),
    "NAdam": ("NAdam", {"decoupled_weight_decay": True, "weight_decay": 0.1}),
    "RAdam": ("RAdam", {"lr": 0.01}),
    "ASGD": ("ASGD", {"t0": 3.0}),
    "Rprop": ("Rprop", {}),
}
SHAPES = [(20, 15), (), (7,), (3, 5, 11), (150,)]
SPECS = [Spec(f"t{i}", shape, "float32", i) for i, shape in enumerate(SHAPES)]


class Whole:
    """The same training by one optimizer over whole tensors, each in one of two groups."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        kind, options = OPTIMIZERS[name]
        generator = torch.Generator().manual_seed(7)
        self.weights = [
            torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            for shape in SHAPES
        ]
        groups = [{"params": self.weights[::2]}, {"params": self.weights[1::2]}]
        self.optimizer = getattr(torch.optim, kind)(groups, **options)

    def recipe(self) -> OptimizerRecipe:
        name = type(self.optimizer).__name__
        return OptimizerRecipe(name, settings_of(self.optimizer), [i % 2 for i in range(5)])

    def step(self, nth: int) -> tuple[list[torch.Tensor | None], Settings]:
        """One step with changing settings; the gradients and settings it used."""
        for g, group in enumerate(self.optimizer.param_groups):
            group["lr"] = group["lr"] * (0.9 if g else 1.05)
        generator = torch.Generator().manual_seed(nth)
        for i, weight in enumerate(self.weights):
            gradient = torch.randn(weight.shape, generator=generator).to(weight.dtype)
            weight.grad = None if (nth + i) % 4 == 0 else gradient
        gradients = [None if w.grad is None else w.grad.clone() for w in self.weights]
        told = settings_of(self.optimizer)
        self.optimizer.step()
        return gradients, told


class Shards:
    """All servers of a plan, fed as holders would feed them."""

    def __init__(self, plan: Plan, recipe: OptimizerRecipe) -> None:
        self.plan = plan
        self.nodes = {n: ShardOptimizer(plan, n, recipe) for n in plan.cluster.server_nodes}

    def holder(self, chunk: int) -> ShardOptimizer:
        (node,) = self.plan.holders[chunk]
        return self.nodes[node]

    def load(self, weights: Sequence[torch.Tensor]) -> None:
        for chunk in self.plan.chunks:
            frames = [
                bytes_of(weights[s.tensor].detach().reshape(-1)[s.start : s.stop])
                for s in chunk.segments
            ]
            self.holder(chunk.index).chunks[chunk.index].load(frames, anew=True)

    def step(
        self, gradients: Sequence[torch.Tensor | None], told: Settings
    ) -> list[torch.Tensor | None]:
        """New weights, put together from all chunks; None where there was no gradient."""
        results = [None if g is None else torch.full((g.numel(),), torch.nan) for g in gradients]
        for chunk in self.plan.chunks:
            mean = []
            for s in chunk.segments:
                gradient = gradients[s.tensor]
                part = None if gradient is None else gradient.reshape(-1)[s.start : s.stop].clone()
                mean.append(
                    None if part is None else Values(part.view(torch.uint8).numpy(), chunk.dtype)
                )
            applied = self.holder(chunk.index).apply(chunk, mean, told)
            for s, values in zip(chunk.segments, applied, strict=True):
                target = results[s.tensor]
                assert (values is None) == (target is None)
                if values is not None and target is not None:
                    piece = tensor_of(values.data, getattr(torch, chunk.dtype))
                    results[s.tensor] = target.to(piece.dtype)
                    results[s.tensor][s.start : s.stop] = piece  # type: ignore[index]
        return results

    def state(self) -> dict[tuple[int, str], list[tuple[int, torch.Tensor]]]:
        """Every entry of every tensor's state: pieces with their places."""
        pieces: dict[tuple[int, str], list[tuple[int, torch.Tensor]]] = {}
        for chunk in self.plan.chunks:
            entries, frames = self.holder(chunk.index).chunks[chunk.index].state()
            for (s, name, dtype), frame in zip(entries, frames, strict=True):
                segment = chunk.segments[s]
                entry = (segment.start, tensor_of(frame, getattr(torch, dtype)))
                pieces.setdefault((segment.tensor, name), []).append(entry)
        return pieces

    def restore(self, state: dict[int, dict[str, torch.Tensor]]) -> None:
        for chunk in self.plan.chunks:
            entries, frames = [], []
            for s, segment in enumerate(chunk.segments):
                for name, value in state.get(segment.tensor, {}).items():
                    part = value
                    if value.dim() or name not in ("step", "mu_product", "eta", "mu"):
                        part = value.reshape(-1)[segment.start : segment.stop]
                    entries.append((s, name, str(part.dtype).removeprefix("torch.")))
                    frames.append(bytes_of(part))
            if entries:
                self.holder(chunk.index).chunks[chunk.index].load_state(entries, frames)


def cut(chunk_bytes: int, servers: int = 2, dtype: str = "float32") -> Plan:
    specs = [Spec(s.name, s.shape, dtype, s.order) for s in SPECS]
    return make_plan(specs, servers=servers, at_holder=True, chunk_bytes=chunk_bytes)


def agree(whole: Whole, weights: Sequence[torch.Tensor | None]) -> None:
    for expected, got in zip(whole.weights, weights, strict=True):
        if got is not None:
            assert torch.equal(got, expected.detach().reshape(-1))


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("chunk_bytes", [52, 1004, 1 << 20])
def test_weights_are_the_same_bits_wherever_tensors_are_cut(name: str, chunk_bytes: int) -> None:
    whole = Whole(name)
    shards = Shards(cut(chunk_bytes, servers=1 if chunk_bytes > 1004 else 3), whole.recipe())
    shards.load(whole.weights)
    for nth in range(20):
        gradients, told = whole.step(nth)
        agree(whole, shards.step(gradients, told))


@given(st.sampled_from(["momentum", "Adam", "RMSprop"]), st.integers(16, 800), st.integers(1, 3))
@settings(max_examples=15)
def test_any_cut_will_do(name: str, chunk_bytes: int, servers: int) -> None:
    whole = Whole(name)
    shards = Shards(cut(chunk_bytes, servers), whole.recipe())
    shards.load(whole.weights)
    for nth in range(4):
        gradients, told = whole.step(nth)
        agree(whole, shards.step(gradients, told))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_precisions_too(dtype: str) -> None:
    whole = Whole("Adam", getattr(torch, dtype))
    shards = Shards(cut(1004, dtype=dtype), whole.recipe())
    shards.load(whole.weights)
    for nth in range(10):
        gradients, told = whole.step(nth)
        agree(whole, shards.step(gradients, told))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_moves_into_other_cuts_and_training_goes_on_to_the_same_bits(name: str) -> None:
    whole = Whole(name)
    before = Shards(cut(1004, servers=3), whole.recipe())
    before.load(whole.weights)
    for nth in range(5):
        before.step(*whole.step(nth))
    state: dict[int, dict[str, torch.Tensor]] = {}
    for (tensor, entry), pieces in before.state().items():
        if entry == WEIGHTS:
            continue
        expected = torch.as_tensor(whole.optimizer.state[whole.weights[tensor]][entry])
        values = [piece for _, piece in sorted(pieces, key=lambda pair: pair[0])]
        joined = values[0].reshape(()) if expected.dim() == 0 else torch.cat(values)
        if expected.dim() or whole.weights[tensor].dim() == 0:
            joined = joined.reshape(expected.shape)
        assert torch.equal(joined, expected), entry
        state.setdefault(tensor, {})[entry] = joined
    after = Shards(cut(4096, servers=1), whole.recipe())
    after.load(whole.weights)
    after.restore(state)
    for nth in range(5, 12):
        gradients, told = whole.step(nth)
        agree(whole, after.step(gradients, told))


def test_settings_of_every_group_travel_with_each_push() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(
        [{"params": model.weight, "lr": 0.5}, {"params": model.bias}], lr=torch.tensor(0.25)
    )
    told = settings_of(optimizer)
    assert [group["lr"] for group in told] == [0.5, 0.25]
    assert "params" not in told[0]
    assert settings_of(torch.optim.Adam(model.parameters(), betas=(0.5, 0.75)))[0]["betas"] == [
        0.5,
        0.75,
    ]


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_optimizers_are_taken(name: str) -> None:
    check_elementwise(getattr(torch.optim, name)([torch.zeros(1, requires_grad=True)]))


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_others_are_refused_with_the_way_out(name: str) -> None:
    optimizer = getattr(torch.optim, name)([torch.zeros(1, requires_grad=True)])
    with pytest.raises(ConfigError, match=rf"{name} is not one known .*push_pull\(\)"):
        check_elementwise(optimizer)


def test_a_users_own_optimizer_of_a_known_name_is_refused() -> None:
    class SGD(torch.optim.SGD):
        """Does something else entirely."""

    with pytest.raises(ConfigError, match="SGD is not one known"):
        check_elementwise(SGD([torch.zeros(1, requires_grad=True)]))
    with pytest.raises(ConfigError, match="LBFGS is not an elementwise"):
        ShardOptimizer(cut(1004), 2, OptimizerRecipe("LBFGS", [{}], [0] * 5))


def test_a_setting_that_cannot_travel_is_refused() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    optimizer.param_groups[0]["lr"] = object()
    with pytest.raises(ConfigError, match="cannot be sent to servers"):
        settings_of(optimizer)


# ---- messages that do not fit


@pytest.fixture
def shards() -> Shards:
    whole = Whole("Adam")
    shards = Shards(cut(4096, servers=1), whole.recipe())
    shards.load(whole.weights)
    shards.step(*whole.step(1))
    return shards


def messages_to(shards: Shards) -> StateMessages:
    (node,) = shards.nodes
    return StateMessages(shards.plan, node, shards.holder(0))


def test_weights_that_do_not_fit_are_refused_and_change_nothing(shards: Shards) -> None:
    messages = messages_to(shards)
    sizes = [4 * segment.numel for segment in shards.plan.chunks[0].segments]
    right = [bytes(size) for size in sizes]
    total, frame = sum(sizes), bytes(sum(sizes))
    damaged = State(FIRST_WEIGHTS, 0, 0, total, checksum(right) ^ 1)
    wrong: dict[str, Callable[[], None]] = {
        "wrong checksum": lambda: messages.post(damaged, frame),
        "99 from rank 0 is not expected": lambda: messages.send(FIRST_WEIGHTS, 99, right),
        f"of {total - sizes[-1]}, expected {total}": (
            lambda: messages.send(FIRST_WEIGHTS, 0, right[:-1])
        ),
        f"of {total + 1}, expected {total}": (
            lambda: messages.send(FIRST_WEIGHTS, 0, [*right, b"0"])
        ),
        f"of {total - sizes[0] + 4}, expected {total}": (
            lambda: messages.send(FIRST_WEIGHTS, 0, [bytes(4), *right[1:]])
        ),
    }
    before = shards.state()
    for why, send in wrong.items():
        with pytest.raises(FrameRefused, match=why):
            send()
        assert str(shards.state()) == str(before), why


@pytest.mark.parametrize(
    ("entries", "frames"),
    [
        ([(0, "exp_avg", "float32")], []),
        ([], [bytes(4)]),
        ([(99, "exp_avg", "float32")], [bytes(4)]),
        ([(0, "exp_avg", "float33")], [bytes(4)]),
        ([(0, "exp_avg", "Tensor")], [bytes(4)]),
        ([(0, "exp_avg", "float32")], [bytes(8)]),
        ([(0, "exp_avg", "float32")], [bytes(5)]),
        ([(0, "exp_avg", "float32")], [b""]),
        ([(0, "step", "float32"), (0, "exp_avg", "float32")], [bytes(4), bytes(12)]),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(
    entries: list[tuple[int, str, str]], frames: list[bytes], shards: Shards
) -> None:
    before = str(shards.state())
    with pytest.raises(FrameRefused):
        messages_to(shards).send(STATE, 0, frames, entries)
    assert str(shards.state()) == before


def test_damaged_or_misplaced_state_is_refused(shards: Shards) -> None:
    messages, entries = messages_to(shards), [(0, "step", "float32")]
    with pytest.raises(FrameRefused, match="checksum"):
        messages.post(State(STATE, 0, 0, 4, 1, entries), bytes(4))
    with pytest.raises(FrameRefused, match="state 99 from rank 0 is not expected"):
        messages.send(STATE, 99, [bytes(4)], entries)


def test_settings_for_too_few_groups_are_refused(shards: Shards) -> None:
    holder = shards.holder(0)
    with pytest.raises(FrameRefused, match="settings for 0 parameter groups"):
        holder.examine([])
    with pytest.raises(FrameRefused, match="other names or kinds"):
        holder.examine([{"lr": "fast"}, {}])
    with pytest.raises(FrameRefused, match="other names or kinds"):
        holder.examine([{"speed": 1.0}, {}])
