"""Local steps and outer rounds by real processes: exact, and every step counts once."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from local_steps_worker import HIDDEN, INPUTS, STEPS, build, inner, real, step_once
from test_mixes import vector

from slipstream.codecs import Above, Drop, Filter, Quantized
from slipstream.methods import Rounds
from slipstream.outer_optimizers import Adam
from slipstream.routes import Everywhere, Route
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.systems import parse
from slipstream.topologies import Mesh, PeerSharded, Sharded
from slipstream.updates import LocalSteps, Nesterov, Update

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("local_steps_worker.py")
RANKS = 3
Told = list[dict[str, Any]]
Run = Callable[..., Told]


def runner(fork_server: ForkServer, folder: Path, ranks: Any) -> Run:
    """Starts the worker on these ranks; returns what each has told."""

    def start(strategy: str, dtype: str = "float64", **options: Any) -> Told:
        arguments = strategy, str(folder), dtype, json.dumps(options)
        run = fork_server.run(WORKER, *arguments, ranks=ranks)
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]

    return start


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Run:
    return runner(fork_server, tmp_path, RANKS)


def reference(outer: Nesterov | Adam, theta: torch.Tensor) -> torch.optim.Optimizer:
    """Torch's own optimizer with the same equation."""
    if isinstance(outer, Adam):
        return torch.optim.Adam([theta], outer.lr, (outer.beta1, outer.beta2), outer.eps)
    nesterov = outer.momentum > 0
    return torch.optim.SGD([theta], outer.lr, momentum=outer.momentum, nesterov=nesterov)


def alone(
    local: LocalSteps,
    outer: Nesterov | Adam,
    fragments: list[list[str]],
    kind: str = "SGD",
    model: str = "plain",
) -> torch.Tensor:
    """The same in one process, with a copy of the model for every worker."""
    models = [build(torch.float64, model) for _ in range(RANKS)]
    optimizers = [inner(each, kind) for each in models]
    theta = copy.deepcopy(models[0].state_dict())
    applied = {name: reference(outer, value) for name, value in theta.items()}
    sent: dict[str, torch.Tensor] = {}

    def mean_gradient(name: str) -> torch.Tensor:
        own = [each.state_dict()[name] for each in models]
        return torch.stack([theta[name] - each for each in own]).mean(0)

    def merge(name: str) -> None:
        gradient = sent.pop(name)
        (theirs,) = applied[name].param_groups[0]["params"]
        theirs.grad = gradient
        applied[name].step()
        for each in models:
            own = each.state_dict()[name]
            own.copy_(local.mix * own + (1 - local.mix) * theta[name])

    for step in range(STEPS):
        for rank, (each, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            step_once(each, optimizer, (rank, step))
        if (fragment := local.sent_after(step + 1)) is not None:
            sent |= {name: mean_gradient(name) for name in fragments[fragment]}
        if (fragment := local.merged_after(step + 1)) is not None:
            for name in fragments[fragment]:
                merge(name)
    for name in list(sent):
        merge(name)
    final = [theta[name] - mean_gradient(name) for name, _ in models[0].named_parameters()]
    return torch.cat([real(each).reshape(-1) for each in final])


STREAMED = "diloco(every=4, fragments=3, overlap_steps=2, mix=0.25)"


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
@pytest.mark.parametrize("strategy", ["diloco(every=5)", "local_sgd(every=3)", STREAMED])
def test_every_outer_round_is_what_one_process_makes_of_it(
    strategy: str, kind: str, run: Run
) -> None:
    told = run(strategy, inner=kind)
    update = parse(strategy).rounds.update
    assert isinstance(update.inner, LocalSteps)
    assert isinstance(update.outer, Nesterov)
    wanted = alone(update.inner, update.outer, told[0]["fragments"], kind)
    assert len({each["digest"] for each in told}) == 1, "all end with the same weights"
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12
    assert len({each["outer"] for each in told}) == 1, "outer weights are the same"


def composed(route: Route, update: Update) -> str:
    """Outer rounds over one route, as JSON."""
    return Strategy(
        "composed", Rounds(Everywhere(route), update=update, schedule=AfterBackward())
    ).to_json()


@pytest.mark.parametrize("topology", [Mesh(), Sharded()])
def test_links_make_the_same_outer_rounds_as_collectives(
    topology: Mesh | Sharded, run: Run
) -> None:
    local, outer = LocalSteps(4, 3, 2, 0.25), Nesterov()
    told = run(composed(Route(topology), Update(local, outer)))
    wanted = alone(local, outer, told[0]["fragments"])
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12
    assert len({each["digest"] for each in told}) == 1


@pytest.mark.parametrize(
    ("topology", "at"), [(Mesh(), "worker"), (Sharded(), "server")], ids=["workers", "servers"]
)
def test_adam_applies_outer_gradients(topology: Mesh | Sharded, at: Any, run: Run) -> None:
    local, outer = LocalSteps(4), Adam(lr=0.05, at=at)
    told = run(composed(Route(topology), Update(local, outer)))
    wanted = alone(local, outer, told[0]["fragments"])
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12
    assert len({each["outer"] for each in told}) == 1


def test_one_local_step_and_the_plain_mean_is_data_parallel_training(run: Run) -> None:
    told = run("diloco(every=1, lr=1.0, momentum=0.0)")
    reference = run("push_pull()", plain=True)
    assert (vector(told[0]["weights"]) - vector(reference[0]["weights"])).abs().max() <= 1e-12
    assert len({each["digest"] for each in told}) == 1


def test_between_rounds_workers_have_weights_of_their_own(run: Run) -> None:
    told = run("diloco(every=5)")  # 12 steps: two after the last round
    assert len({each["own"] for each in told}) == RANKS
    assert len({each["outer"] for each in told}) == 1


def counted(told: Told, by: int) -> torch.Tensor:
    """(1/N) Σ over workers of what each has moved, but for what waits in its residual."""
    total = sum(vector(each["moved"]) + vector(each["owed"]) for each in told)
    assert isinstance(total, torch.Tensor)
    return total / by


@pytest.mark.parametrize("up", [Quantized(8), Quantized(4, block=64), Filter(Above(Drop(0.9)))])
def test_with_error_feedback_every_step_counts_once(up: Any, run: Run) -> None:
    """With η = 1 and μ = 0 weights move as far as the mean of the workers' steps."""
    update = Update(LocalSteps(4, fragments=2), Nesterov(lr=1.0, momentum=0.0))
    told = run(composed(Route(Sharded(), up=up), update), "float32")
    moved = vector(told[0]["flushed"]) - vector(told[0]["begun"])
    assert len({each["digest"] for each in told}) == 1
    assert vector(told[0]["owed"]).abs().max() > 0, "nothing was kept back"
    assert torch.allclose(moved, counted(told, RANKS), rtol=0, atol=1e-6)


def test_what_waits_in_a_residual_is_not_kept_in_the_weights_too(run: Run) -> None:
    """Workers with the same batches have the same weights, so that it is all one how much of them
    is kept; unless what a codec has not sent yet counts twice."""
    route, outer = Route(Sharded(), up=Quantized(4, block=64)), Nesterov(lr=1.0, momentum=0.0)
    first, second = (
        run(composed(route, Update(LocalSteps(3, mix=mix), outer)), "float32", alike=True, steps=11)
        for mix in (0.0, 0.75)
    )
    moved = vector(first[0]["weights"]) - vector(first[0]["begun"])
    apart = vector(second[0]["weights"]) - vector(first[0]["weights"])
    assert apart.norm() < 1e-4 * moved.norm()


@pytest.mark.parametrize("steps", [11, 59])
def test_what_waits_at_the_holder_counts_once_in_the_end(steps: int, run: Run) -> None:
    """Where workers keep their own weights in part, what a result has not brought yet is in these,
    and counts twice; the next round takes it back. So after any number of rounds the outer weights
    lack one rounding error of the last result, and no more."""
    few_bits, outer = Quantized(4, block=64), Nesterov(lr=1.0, momentum=0.0)
    route = Route(PeerSharded(), up=few_bits, down=few_bits)
    told = run(composed(route, Update(LocalSteps(3, mix=0.75), outer)), "float32", steps=steps)
    lacking = vector(told[0]["flushed"]) - vector(told[0]["begun"]) - counted(told, RANKS)
    last = vector(told[0]["flushed"]) - vector(told[0]["outer_before"])
    assert 0 < lacking.abs().max() < 0.2 * last.abs().max()
    assert len({each["outer"] for each in told}) == 1


def test_streamed_outer_rounds_in_few_bits_are_of_few_bytes_both_ways(run: Run) -> None:
    told = run("diloco(every=4, fragments=2, overlap_steps=1, wire='int4')", "float32")
    assert len({each["outer"] for each in told}) == 1, "outer weights are the same"
    assert len({each["digest"] for each in told}) == 1
    sent_and_received = sum(each["stats"]["bytes"]["by_scheme"]["int4/peers"] for each in told)
    # A value goes to its holder, and its result to all others; the first matrix is large enough.
    values = 2 * 2 * (RANKS - 1) * INPUTS * HIDDEN * (STEPS // 4)
    assert sent_and_received / values < 0.2 * 4, "of 4 bytes each"


def expected_of_first(
    told: Told, first: int, hosts: Sequence[Sequence[int]]
) -> tuple[torch.Tensor, list[int]]:
    """How far the outer weights move, worked out from what rounds answered to each host.

    A round moves them by the mean over all blocks of local steps that it contains: the last ones of
    its workers, and those of theirs that earlier rounds had dropped.

    Args:
        first: How many hosts make a round.
        hosts: The ranks of each; the first of them speaks for the others.

    Returns:
        The way, and the number of blocks that each round contains.
    """
    rounds: dict[int, list[tuple[int, torch.Tensor]]] = {}
    for ranks in hosts:
        made = zip(*(told[rank]["blocks"] for rank in ranks), strict=True)
        blocks = [torch.stack([vector(total) for *_, total in each]).sum(0) for each in made]
        counted = 0
        for number, (round_, dropped, _) in enumerate(told[ranks[0]]["blocks"], start=1):
            if not dropped:
                way = blocks[number - 1] - (blocks[counted - 1] if counted else 0)
                rounds.setdefault(round_, []).append((len(ranks) * (number - counted), way))
                counted = number
    sizes = [sum(covered for covered, _ in rounds[round_]) for round_ in sorted(rounds)]
    ways = [torch.stack([way for _, way in rounds[round_]]).sum(0) for round_ in sorted(rounds)]
    assert all(len(parts) == first for parts in rounds.values()), "the first ones make a round"
    return torch.stack([w / n for w, n in zip(ways, sizes, strict=True)]).sum(0), sizes


@pytest.mark.parametrize("wire", ["same", "int8"])
def test_what_a_late_worker_did_counts_later_and_each_local_step_alike(wire: str, run: Run) -> None:
    """With η = 1 and μ = 0: no difference counts twice or is lost, and weights sum to one."""
    strategy = f"diloco(every=2, lr=1.0, momentum=0.0, first=2, wire={wire!r})"
    told = run(strategy, "float32", late=2)
    moved = vector(told[0]["weights"]) - vector(told[0]["begun"])
    wanted, sizes = expected_of_first(told, 2, [[0], [1], [2]])
    assert max(sizes) > 2, "no late contribution has counted"
    assert len({each["digest"] for each in told}) == 1
    # What rounding has kept back at the end is a step of 8 bits.
    largest = wanted.abs().max().item()
    assert torch.allclose(moved, wanted, rtol=0, atol=largest / 60 if wire == "int8" else 1e-5)


@pytest.mark.parametrize(
    "strategy", ["diloco(every=4)", "diloco(every=4, first=3)", "local_sgd(every=4)"]
)
def test_a_checkpoint_continues_as_the_run_did(strategy: str, run: Run, tmp_path: Path) -> None:
    dtype = "float32" if "first" in strategy else "float64"
    plain = run(strategy, dtype)
    whole = run(strategy, dtype, save_after=8)
    assert whole[0]["digest"] == plain[0]["digest"], "saving changes nothing"
    resumed = run(strategy, dtype, load=str(tmp_path / "saved.safetensors"))
    assert {each["digest"] for each in resumed} == {whole[0]["digest"]}


def test_weights_that_are_not_contiguous_are_saved(run: Run, tmp_path: Path) -> None:
    whole = run("diloco(every=4)", model="turned", save_after=6)
    resumed = run("diloco(every=4)", model="turned", load=str(tmp_path / "saved.safetensors"))
    assert {each["digest"] for each in resumed} == {whole[0]["digest"]}


def test_a_checkpoint_within_a_round_keeps_the_count_of_steps(run: Run, tmp_path: Path) -> None:
    run("diloco(every=5)", "float32", save_after=7)
    told = run("diloco(every=3, first=3)", "float32", load=str(tmp_path / "saved.safetensors"))
    assert len({each["digest"] for each in told}) == 1
    assert all(each["steps"] == list(range(7, STEPS)) for each in told)


def test_a_checkpoint_loads_where_layers_are_frozen(run: Run, tmp_path: Path) -> None:
    run("diloco(every=3)", save_after=6)
    # Its optimizer has no state; that of the frozen layer would not fit.
    told = run("diloco(every=3)", load=str(tmp_path / "saved.safetensors"), model="frozen")
    assert len({each["digest"] for each in told}) == 1


@pytest.mark.parametrize("strategy", [STREAMED, "diloco(every=3, wire='int8')"])
def test_buffers_change_while_they_are_sent(strategy: str, run: Run) -> None:
    told = run(strategy, "float32", model="norm")
    assert len({each["digest"] for each in told}) == 1


@pytest.mark.parametrize("strategy", ["diloco(every=4, overlap_steps=1)", "diloco(every=3)"])
def test_a_worker_whose_weights_broke_takes_the_outer_ones(strategy: str, run: Run) -> None:
    told = run(strategy, nonfinite="refuse", broken=[1, 1])
    assert len({each["digest"] for each in told}) == 1
    assert all(each["own_is_finite"] for each in told), "before all take the same weights"
    assert all(vector(each["weights"]).isfinite().all() for each in told)


def test_several_models_synchronise_and_train_on(fork_server: ForkServer, tmp_path: Path) -> None:
    run = fork_server.run(Path(__file__).with_name("local_pairs_worker.py"), str(tmp_path), ranks=2)
    assert set(run.codes.values()) == {0}, run.told()
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    for what in ("flushed", "ended"):
        assert told[0][what] == told[1][what]
    assert told[0]["flushed"] != told[0]["ended"]
    assert told[0]["own"] != told[1]["own"], "between rounds"
    again = fork_server.run(WORKER.with_name("local_pairs_worker.py"), str(tmp_path), "on", ranks=2)
    assert set(again.codes.values()) == {0}, again.told()
    for rank, before in enumerate(told):
        resumed = json.loads((tmp_path / f"{rank}.json").read_text())
        assert {what: resumed[what] for what in ("own", "ended")} == {
            what: before[what] for what in ("own", "ended")
        }


# Rank r makes 12 + 2 r steps; rank 0 or rank 1 notices first.
FINISHED = (
    r"rank 0 has finished after 12 steps, and others still train and wait for it \(rank "
    r"|rank 1 has finished after 14 steps, and others still train and wait for it \(rank 2\)"
)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ("diloco(every=10)", "different numbers of steps: rank 0 12, rank 1 14, rank 2 16; every"),
        # Without a word, gloo would sum fragments of different sizes, and abort the process.
        ("diloco(every=4, fragments=4)", FINISHED),
        ("diloco(every=4, fragments=4, overlap_steps=2, wire='int8')", FINISHED),
        ("local_sgd(every=4)", FINISHED),
    ],
)
def test_workers_that_make_different_numbers_of_steps_are_told_so(
    strategy: str, message: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    options = json.dumps({"uneven": True, "flush": False})
    run = fork_server.run(WORKER, strategy, str(tmp_path), "float32", options, ranks=RANKS)
    assert 0 not in set(run.codes.values())
    assert re.search(message, run.told()), run.told()
    assert "DistributedSampler(drop_last=True)" in run.told(), "the way out"
    assert "the end of the `with` block" not in run.told(), "all ranks come to it"
