"""Mixes of parts by real processes: exact where they must be, and nothing is lost where it may."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from fork_server import ForkServer
from mix_strategies import MIXES
from mix_worker import BATCH, HIDDEN, INPUTS, OUTPUTS, RATE, STEPS, batch, build

from slipstream.codecs import Dense, Quantized

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("mix_worker.py")
RANKS = 3
Told = list[dict[str, Any]]
Run = Callable[..., Told]


@pytest.fixture
def run(fork_server: ForkServer, tmp_path: Path) -> Run:
    def start(name: str, dtype: str = "float32") -> Told:
        run = fork_server.run(WORKER, name, str(tmp_path), dtype, ranks=RANKS)
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        return [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]

    return start


def vector(values: dict[str, Any]) -> torch.Tensor:
    return torch.cat([torch.tensor(v, dtype=torch.float64).reshape(-1) for v in values.values()])


def alone(dtype: torch.dtype, clip: float | None = None, decay: float | None = None) -> Any:
    """One process on the batches of all workers; the weights, and their average."""
    model = build(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    average = vector({n: p.detach().tolist() for n, p in model.named_parameters()})
    for step in range(STEPS):
        total = [torch.zeros_like(p) for p in model.parameters()]
        for rank in range(RANKS):
            inputs, targets = batch(rank, step, dtype)
            model.zero_grad()
            F.mse_loss(model(inputs), targets).backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            for summed, parameter in zip(total, model.parameters(), strict=True):
                summed += parameter.grad
        for summed, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad = summed / RANKS
        optimizer.step()
        now = vector({n: p.detach().tolist() for n, p in model.named_parameters()})
        average = now if decay is None else decay * average + (1 - decay) * now
    return now, average


def test_factors_of_all_workers_are_exact_where_servers_update(run: Run) -> None:
    told = run("factors, all workers", "float64")
    wanted, _ = alone(torch.float64)
    assert all((vector(each["weights"]) - wanted).abs().max() <= 1e-12 for each in told)
    assert "factors/sharded" in told[1]["stats"]["bytes"]["by_scheme"]


@pytest.mark.parametrize(
    "name",
    [
        "factors on a mesh, staleness",
        "factors at servers, staleness",
        "one bit on a mesh",
        "8 bits both ways",
        "4 bits by chance, on a mesh",
        "shares of workers, 8 bits, staleness",
        "factors of 8 bits on a mesh",
        "4 bits of the largest, shares of workers",
        "low rank, staleness",
    ],
)
def test_workers_have_the_same_weights_to_the_last_bit(name: str, run: Run) -> None:
    told = run(name)
    assert len({each["digest"] for each in told}) == 1
    assert vector(told[0]["weights"]).isfinite().all()


def test_stale_factors_on_a_mesh_learn_like_dense_ones(run: Run) -> None:
    """Nobody is slow here, so that staleness moves weights a little only."""
    told = run("factors on a mesh, staleness", "float64")
    wanted, _ = alone(torch.float64)
    moved = (wanted - vector(told[0]["begun"])).norm()
    assert (vector(told[0]["weights"]) - wanted).norm() < 0.3 * moved


def test_factors_with_backup_workers_count_who_is_in_time(run: Run) -> None:
    told = run("factors, backup workers")
    rounds = told[0]["stats"]["rounds"]
    assert sum(rounds["made"].values()) == 2 * STEPS
    assert len({each["digest"] for each in told}) == 1, "all take the last weights"


@pytest.mark.parametrize(
    "name",
    [
        "filter, backup workers",
        "one bit, backup workers",
        "8 bits, backup workers",
        "4 bits of the largest, backup workers",
        "low rank, backup workers",
    ],
)
def test_what_a_dropped_push_held_is_not_lost(name: str, run: Run) -> None:
    """W₀ − W = (lr / N) Σ over workers of (all its gradients − what it still holds back)."""
    told = run(name)
    moved = vector(told[0]["begun"]) - vector(told[0]["weights"])
    counted = sum(vector(each["given"]) - vector(each["owed"]) for each in told)
    assert isinstance(counted, torch.Tensor)
    assert sum(told[0]["stats"]["rounds"]["dropped"].values()) > 0, "nobody was late"
    assert torch.allclose(moved, RATE / 2 * counted, rtol=1e-3, atol=2e-5)


def test_filtered_slices_all_arrive_in_the_end(run: Run) -> None:
    told = run("filtered slices")
    assert len({each["digest"] for each in told}) == 1
    dense = RANKS * (RANKS - 1) * STEPS * 4 * len(vector(told[0]["weights"])) / RANKS
    assert told[0]["stats"]["bytes"]["sent"] < dense


@pytest.mark.parametrize(
    ("name", "away"),
    [
        ("8 bits both ways", 0.01),
        ("4 bits by chance, on a mesh", 0.1),
        ("shares of workers, 8 bits up, 4 down", 0.1),
        ("shares of workers, 8 bits, staleness", 0.5),
        ("factors of 8 bits on a mesh", 0.02),
    ],
)
def test_quantised_gradients_learn_like_exact_ones(name: str, away: float, run: Run) -> None:
    """With error feedback: what is missing is a step's rounding, not the sum of all of them."""
    told = run(name)
    wanted, _ = alone(torch.float32)
    moved = (wanted - vector(told[0]["begun"])).norm()
    assert (vector(told[0]["weights"]) - wanted).norm() < away * moved


@pytest.mark.parametrize(
    ("name", "up", "down"),
    [
        ("shares of workers", Dense(), Dense()),
        ("shares of workers, 8 bits up, 4 down", Quantized(8, 64), Quantized(4, 32)),
    ],
)
def test_workers_that_hold_shares_send_what_a_ring_would(
    name: str, up: Any, down: Any, run: Run
) -> None:
    """(n − 1)/n of what goes up, and (n − 1)/n of what comes down; shares differ by a chunk."""
    told = run(name)
    assert len({each["digest"] for each in told}) == 1
    held = [told[0]["held"][str(rank)] for rank in range(RANKS)]
    assert sum(map(sum, held)) == len(vector(told[0]["weights"]))
    assert max(map(sum, held)) - min(map(sum, held)) <= 128
    sizes = [[sum(map(bytes_of(codec), share)) for share in held] for codec in (up, down)]
    for rank, each in enumerate(told):
        others = sum(sizes[0]) - sizes[0][rank]
        spread = (RANKS - 1) * sizes[1][rank]
        assert each["stats"]["bytes"]["sent"] == STEPS * (others + spread)
        taken = (RANKS - 1) * sizes[0][rank] + sum(sizes[1]) - sizes[1][rank]
        assert each["stats"]["bytes"]["received"] == STEPS * taken


def bytes_of(codec: Any) -> Callable[[int], int]:
    return codec.nbytes if isinstance(codec, Quantized) else lambda numel: 4 * numel


def test_factors_of_8_bits_take_a_quarter_of_the_bytes(run: Run) -> None:
    """And of each matrix a header, and a scale for every 256 values."""
    told = run("factors of 8 bits on a mesh")
    shapes = ((INPUTS, HIDDEN), (HIDDEN, OUTPUTS))
    sizes = [BATCH * width for shape in shapes for width in shape]
    taken = sum(16 + size + 4 * -(-size // 256) for size in sizes)
    assert told[0]["stats"]["bytes"]["sent"] == (RANKS - 1) * STEPS * taken


def test_shares_of_workers_are_exact(run: Run) -> None:
    told = run("shares of workers", "float64")
    wanted, _ = alone(torch.float64)
    assert all((vector(each["weights"]) - wanted).abs().max() <= 1e-12 for each in told)


@pytest.mark.parametrize("name", ["low rank both ways", "low rank on a mesh"])
def test_low_rank_gradients_learn_like_exact_ones_but_for_what_is_held_back(
    name: str, run: Run
) -> None:
    told = run(name)
    assert len({each["digest"] for each in told}) == 1
    wanted, _ = alone(torch.float32)
    moved = (wanted - vector(told[0]["begun"])).norm()
    held_back = sum(vector(each["owed"]) for each in told)
    assert isinstance(held_back, torch.Tensor)
    now = vector(told[0]["weights"])
    later = now - RATE / RANKS * held_back
    assert (now - wanted).norm() < 0.4 * moved
    assert (later - wanted).norm() < 0.2 * (now - wanted).norm()


def test_bfloat16_on_a_mesh_rounds_contributions_only(run: Run) -> None:
    told = run("bf16 on a mesh")
    wanted, _ = alone(torch.float32)
    assert len({each["digest"] for each in told}) == 1
    assert (vector(told[0]["weights"]) - wanted).abs().max() < 2e-3
    size = len(vector(told[0]["weights"]))
    assert told[0]["stats"]["bytes"]["sent"] == (RANKS - 1) * STEPS * 2 * size


def test_workers_average_weights_after_every_step(run: Run) -> None:
    told = run("averaged at workers", "float64")
    wanted, average = alone(torch.float64, decay=0.8)
    for each in told:
        assert (vector(each["weights"]) - wanted).abs().max() <= 1e-12
        assert (vector(each["averaged"]) - average).abs().max() <= 1e-12


def test_each_worker_clips_its_own_gradient_before_it_leaves(run: Run) -> None:
    told = run("clipped at workers", "float64")
    wanted, _ = alone(torch.float64, clip=0.05)
    unclipped, _ = alone(torch.float64)
    assert (vector(told[0]["weights"]) - wanted).abs().max() <= 1e-12
    assert (wanted - unclipped).abs().max() > 1e-4, "nothing was clipped"


def test_clipping_and_averaging_where_workers_run_ahead(run: Run) -> None:
    told = run("clipped, stale, at workers", "float64")
    assert len({each["digest"] for each in told}) == 1
    moved = vector(told[0]["begun"]) - vector(told[0]["weights"])
    assert moved.norm() <= RATE * 0.05 * STEPS * 1.01, "more than clipped gradients add up to"
    assert vector(told[0]["averaged"]).isfinite().all()


def test_the_mixes_are_what_they_say() -> None:
    assert {m.name for m in MIXES.values()} >= {"factors_backup", "filter_backup", "factors_lag"}
    assert BATCH < 12, "factors must be worth it"
