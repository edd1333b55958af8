from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.apps.bench.comparison import model_shapes
from slipstream.apps.bench.tables import table
from slipstream.apps.bench.trial import Trial
from slipstream.apps.bench.workloads import WORKLOADS, Workload, emulated, parse_sizes, workload
from slipstream.errors import ConfigError

SMALL_GPT = {"layers": 1, "width": 32, "heads": 2, "context": 16}
SCALES = {"vgg": 1 / 64, "alexnet": 1 / 256}


@pytest.fixture(scope="module", params=WORKLOADS)
def any_workload(request: pytest.FixtureRequest) -> Workload:
    return workload(request.param, scale=SCALES.get(request.param))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def step(work: Workload, model: nn.Module, optimizer: Any, batch: Any) -> Tensor:
    inputs, targets = batch
    optimizer.zero_grad()
    loss = work.loss(model(inputs), targets)
    loss.backward()
    optimizer.step()
    return loss.detach()


def train(work: Workload, steps: int, *, batch: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = work.model()
    optimizer = work.optimizer(model)
    for rows in itertools.islice(work.batches(0, 1, batch, 0), steps):
        step(work, model, optimizer, rows)
    return model


def test_every_workload_steps(any_workload: Workload) -> None:
    model = any_workload.model()
    optimizer = any_workload.optimizer(model)
    batch = next(any_workload.batches(0, 1, any_workload.batch, 0))
    assert len(batch[1]) == any_workload.batch
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert step(any_workload, model, optimizer, batch).isfinite()
    assert all(parameter.grad is not None for parameter in model.parameters())
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert any(changed)


def rows_of(work: Workload, rank: int, world: int, batch: int, steps: int) -> list[list[int]]:
    """Which examples a worker takes, told by taking indices instead of rows."""

    class Told:
        def __len__(self) -> int:
            return 50

        def take(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            return indices, indices

    told = Workload(
        work.name, work.what, 1, work.model, Told(), work.loss, work.optimizer, work.goal
    )
    batches = told.batches(rank, world, batch, seed=7)
    return [rows.tolist() for rows, _ in itertools.islice(batches, steps)]


@pytest.mark.parametrize("world", [2, 3, 6])
def test_all_workers_rows_do_not_depend_on_their_number(world: int) -> None:
    work, steps = workload("conv"), 10
    alone = rows_of(work, 0, 1, 12, steps)
    parts = [rows_of(work, rank, world, 12, steps) for rank in range(world)]
    for index in range(steps):
        together = [row for part in parts for row in part[index]]
        assert sorted(together) == sorted(alone[index])
        assert {len(part[index]) for part in parts} == {12 // world}


def test_epochs_take_every_row_once_and_are_shuffled_anew() -> None:
    rows = rows_of(workload("conv"), 0, 1, 10, 10)
    first, second = ([*itertools.chain(*part)] for part in (rows[:5], rows[5:]))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second


@pytest.mark.parametrize(
    ("rank", "world", "batch", "said"),
    [
        (4, 4, 8, "rank 4 of 4 workers; ranks are 0 to 3"),
        (0, 3, 16, "dealt evenly to 3 workers; take 18"),
        (0, 3, 0, "take 3"),
        (0, 1, 100_000, "more than the 512 rows of conv"),
    ],
)
def test_shares_that_cannot_be_are_refused_at_once(
    rank: int, world: int, batch: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        workload("conv").batches(rank, world, batch, 0)


def test_names_and_arguments_are_checked() -> None:
    with pytest.raises(
        ConfigError, match=r"there are fc, conv, .*text, .*; did you mean 'fashion'"
    ):
        workload("fashon")
    with pytest.raises(ConfigError, match=r"fc takes no data: alexnet, mnist, .*text, .* do"):
        workload("fc", data=Path("data"))
    with pytest.raises(ConfigError, match="mnist takes no scale: vgg, alexnet do"):
        workload("mnist", scale=0.5)
    with pytest.raises(ConfigError, match="give a factor in"):
        workload("vgg", scale=2).model()
    with pytest.raises(ConfigError, match="fc only measures steps"):
        workload("fc").evaluate(nn.Identity())


def test_models_have_the_sizes_they_are_known_for() -> None:
    assert parameters(workload("fc").model()) == 2 * (2048 * 2048 + 2048) + 2048 * 1000 + 1000
    conv = workload("conv").model()
    assert parameters(conv) == pytest.approx(9.74e6, rel=0.01)
    with torch.device("meta"):
        assert parameters(workload("vgg").model()) == table("vgg19").parameters
        assert parameters(workload("alexnet").model()) == table("alexnet").parameters
        sixteenth = workload("vgg", scale=1 / 16).model()
    assert parameters(sixteenth) == pytest.approx(table("vgg19").parameters / 16, rel=0.01)


def test_alexnet_has_an_output_a_class_however_small() -> None:
    work = workload("alexnet", scale=1e-5)
    inputs, targets = next(work.batches(0, 1, 4, 0))
    assert work.model()(inputs).shape == (4, 10)
    assert work.loss(work.model()(inputs), targets).isfinite()


def test_an_emulated_workload_is_its_tables_net() -> None:
    net = table("alexnet").scaled(1 / 1024).slowed(1e-6)
    work = emulated(net)
    assert work.batch == net.batch == 8
    assert "emulated device" in work.what
    assert net.origin in work.what
    model = train(work, 2, batch=work.batch)
    assert parameters(model) == net.parameters


# Enough to tell learning from guessing, not to reach the goal: tests have to be quick.
@pytest.mark.parametrize(
    ("name", "steps", "batch", "better_than"),
    [
        ("mnist", 60, 32, 0.5),
        ("fashion", 60, 32, 0.5),
        ("alexnet", 150, 64, 0.5),
        ("lr", 150, 512, 0.7),
        ("text", 120, 16, 0.4),
    ],
)
def test_accuracy_rises(name: str, steps: int, batch: int, better_than: float) -> None:
    work = workload(name, scale=SCALES.get(name))
    model = train(work, steps, batch=batch)
    accuracy = work.evaluate(model)
    assert better_than < accuracy <= 1
    assert model.training
    assert work.goal is not None
    assert work.goal.metric == "accuracy"
    assert work.goal.reached(1.0)
    assert not work.goal.reached(0.5)


def test_error_falls() -> None:
    work = workload("mf")
    assert work.goal is not None
    before, after = (work.evaluate(train(work, n, batch=1024)) for n in (0, 300))
    assert after < 0.7 * before
    assert work.goal.metric == "rmse"
    assert work.goal.reached(0.1)
    assert not work.goal.reached(before)


@pytest.mark.parametrize(
    ("name", "sizes", "steps", "batch", "share"),
    [("gpt", SMALL_GPT, 150, 64, 0.8), ("recommender", {}, 120, 1024, 0.7)],
)
def test_held_out_loss_falls(
    name: str, sizes: dict[str, int], steps: int, batch: int, share: float
) -> None:
    work = workload(name, sizes=sizes)
    assert work.goal is not None
    assert (work.goal.metric, work.goal.higher_is_better) == ("loss", False)
    before, after = (work.evaluate(train(work, n, batch=batch)) for n in (0, steps))
    assert after < share * before
    assert not work.goal.reached(before)
    # The loss that is trained on is the one that is judged: the mean over all held-out rows.
    model = train(work, 0, batch=batch)
    inputs, targets = work.goal.test.take(torch.arange(len(work.goal.test)))
    assert work.loss(model(inputs), targets).item() == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize(("name", "sizes"), [("gpt", SMALL_GPT), ("recommender", {"width": 4})])
def test_training_is_repeatable_and_held_out_rows_are_always_the_same(
    name: str, sizes: dict[str, int]
) -> None:
    first, again = (workload(name, sizes=sizes) for _ in range(2))
    assert first.goal is not None
    assert again.goal is not None
    rows = torch.arange(len(first.goal.test))
    assert torch.equal(first.goal.test.take(rows)[1], again.goal.test.take(rows)[1])
    one, two = (first.evaluate(train(work, 5, batch=16)) for work in (first, again))
    assert one == two
    assert first.evaluate(train(first, 5, batch=16, seed=1)) != one


def test_sizes_are_taken_by_name() -> None:
    small, tied = (
        Trial(workload="gpt", sizes=f"layers=1,width=32,heads=2,context=16{more}").load()
        for more in ("", ", tied=1")
    )
    inputs, targets = next(small.batches(0, 1, 4, 0))
    assert inputs.shape == targets.shape == (4, 16)
    assert parameters(small.model()) - parameters(tied.model()) == 27 * 32
    linear = {shape.matrix: shape.rows for shape in model_shapes(small, 4) if shape.matrix}
    assert linear[128, 32] == 4 * 16  # a row a character
    assert (27, 32) in linear
    # Tied to the embedding, its gradient is more than its rows give.
    assert (27, 32) not in {shape.matrix for shape in model_shapes(tied, 4)}
    wide = workload("recommender", sizes={"width": 8, "hidden": 4}).model()
    assert parameters(wide) == (600 + 900 + 12) * 8 + 4 * (40 + 1) + 4 + 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("layers", "write NAME=NUMBER"),
        ("layers=2.5", "write NAME=NUMBER"),
        ("layers=1,layers=2", "each name once"),
        ("data=3", "write NAME=NUMBER"),
    ],
)
def test_sizes_of_another_form_are_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_sizes(text)


def test_sizes_that_a_workload_has_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="mnist takes no layers: gpt does"):
        workload("mnist", sizes={"layers": 2})
    with pytest.raises(ConfigError, match="gpt has no size 'depth': it has layers, width, heads"):
        workload("gpt", sizes={"depth": 2})
    with pytest.raises(ConfigError, match="does not divide into 3 heads"):
        workload("gpt", sizes={"heads": 3})
    with pytest.raises(ConfigError, match="recommender: hidden=0"):
        workload("recommender", sizes={"hidden": 0})


@pytest.mark.parametrize(
    ("name", "folder", "steps", "batch", "bound"),
    [
        ("alexnet", "fashion-mnist", 150, 64, 0.7),
        ("lr", "a9a", 150, 512, 0.83),
        ("mf", "ml-latest-small", 150, 1024, 0.95),
        ("recommender", "ml-latest-small", 100, 1024, 0.95),
        ("gpt", "tinyshakespeare", 60, 16, 3.0),
    ],
)
def test_real_data_is_learnt_too(
    real_data: Callable[[str], Path], name: str, folder: str, steps: int, batch: int, bound: float
) -> None:
    work = workload(name, data=real_data(folder), scale=SCALES.get(name))
    value = work.evaluate(train(work, steps, batch=batch))
    assert work.goal is not None
    assert value > bound if work.goal.higher_is_better else value < bound
