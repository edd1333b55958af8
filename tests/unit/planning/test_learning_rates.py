"""The rules of the paper on synchronous SGD, A.3, and how they plug into torch's schedules."""

import math
from collections.abc import Callable

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from slipstream.errors import ConfigError
from slipstream.planning.learning_rates import asynchronous_rate, decayed_rate, synchronous_rate

IMAGENET_BATCHES = 1_281_167 / 32  # the paper's T


def test_the_papers_rate_for_a_hundred_workers() -> None:
    assert synchronous_rate(0.045, 100) == pytest.approx(4.5)


def test_workers_that_do_not_wait_share_one_workers_rate() -> None:
    assert asynchronous_rate(0.1, 8) == 0.0125


@pytest.mark.parametrize("rule", [synchronous_rate, asynchronous_rate])
def test_one_worker_has_the_base_rate(rule: Callable[[float, int], float]) -> None:
    assert rule(0.045, 1) == 0.045


def test_a_factor_of_decay_every_two_passes_over_the_data() -> None:
    def after(epochs: float) -> float:
        step = round(epochs * 1000)
        return decayed_rate(0.8, step=step, batches_per_epoch=1000, decay=0.5)

    assert [after(epochs) for epochs in (0, 2, 4)] == [0.8, 0.4, 0.2]
    assert after(1) == pytest.approx(0.8 * math.sqrt(0.5))


def test_decays_agree_after_as_many_examples() -> None:
    """A synchronous step of 50 workers has seen what 50 asynchronous steps have."""
    synchronous = decayed_rate(1.0, step=400, batches_per_epoch=IMAGENET_BATCHES, workers=50)
    asynchronous = decayed_rate(1.0, step=400 * 50, batches_per_epoch=IMAGENET_BATCHES)
    assert synchronous == pytest.approx(asynchronous)
    assert synchronous == pytest.approx(0.94 ** (400 * 50 / (2 * IMAGENET_BATCHES)))


def test_as_a_torch_schedule() -> None:
    workers, batches = 4, 8
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=synchronous_rate(0.045, workers))
    schedule = LambdaLR(
        optimizer,
        lambda step: decayed_rate(1.0, step=step, batches_per_epoch=batches, workers=workers),
    )
    rates = []
    for _ in range(5):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates == pytest.approx(
        [
            decayed_rate(0.18, step=step, batches_per_epoch=batches, workers=workers)
            for step in range(5)
        ]
    )
    assert rates[4] == pytest.approx(0.18 * 0.94)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: synchronous_rate(0.0, 4), "base=0.0: a learning rate is a number above 0"),
        (lambda: synchronous_rate(math.nan, 4), "base=nan"),
        (lambda: synchronous_rate(math.inf, 4), "base=inf"),
        (lambda: synchronous_rate(0.1, 0), "workers=0: give 1 or more"),
        (lambda: asynchronous_rate(-0.1, 4), "base=-0.1"),
        (lambda: asynchronous_rate(0.1, -2), "workers=-2"),
        (lambda: decayed_rate(0.0, step=0, batches_per_epoch=5), "initial=0.0"),
        (lambda: decayed_rate(0.1, step=-1, batches_per_epoch=5), "step=-1: count updates from 0"),
        (lambda: decayed_rate(0.1, step=0, batches_per_epoch=0), "examples in the data set over"),
        (lambda: decayed_rate(0.1, step=0, batches_per_epoch=5, workers=0), "workers=0"),
        (lambda: decayed_rate(0.1, step=0, batches_per_epoch=5, decay=1.1), "decay=1.1"),
        (lambda: decayed_rate(0.1, step=0, batches_per_epoch=5, decay=0.0), "decay=0.0"),
    ],
)
def test_what_makes_no_sense_is_refused(ask: Callable[[], float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ask()
