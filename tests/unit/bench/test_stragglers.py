from __future__ import annotations

import math
from statistics import fmean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.bench.stragglers import (
    Lognormal,
    Pareto,
    SlowWorker,
    Stragglers,
    parse_stragglers,
    uniform,
)
from slipstream.errors import ConfigError

recipes = st.lists(
    st.one_of(
        st.builds(Lognormal, st.floats(0.01, 2)),
        st.builds(Pareto, st.floats(1.1, 10)),
        st.builds(SlowWorker, st.integers(0, 3), st.floats(1, 10)),
    ),
    max_size=4,
).map(lambda some: Stragglers(tuple(some)))


def test_what_a_command_line_says_is_read() -> None:
    assert parse_stragglers("lognormal:0.5") == Stragglers((Lognormal(0.5),))
    assert parse_stragglers("worker:3:x2.5, pareto:2") == Stragglers(
        (SlowWorker(3, 2.5), Pareto(2))
    )
    assert parse_stragglers("").delay_s(0, 0, seed=0, base_s=1) == 0


@pytest.mark.parametrize(
    ("text", "way_out"),
    [
        ("slow", "write lognormal:SIGMA, pareto:ALPHA or worker:RANK:xTIMES"),
        ("lognormal", "'' is not a number"),
        ("lognormal:wide", "'wide' is not a number"),
        ("lognormal:0", "above 0"),
        ("lognormal:nan", "above 0"),
        ("pareto:1", "above 1"),
        ("pareto:inf", "above 1"),
        ("worker:1:3", "such as worker:2:x3"),
        ("worker:one:x3", "such as worker:2:x3"),
        ("worker:1:x0.5", "1 or more"),
        ("lognormal:0.3,gamma:2", "no stragglers 'gamma:2'"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_way_out(text: str, way_out: str) -> None:
    with pytest.raises(ConfigError, match=way_out):
        parse_stragglers(text)


def test_a_worker_that_is_not_there() -> None:
    stragglers = parse_stragglers("lognormal:0.1,worker:4:x2")
    stragglers.check(5)
    with pytest.raises(ConfigError, match="there are 4 workers; name one of 0 to 3"):
        stragglers.check(4)


@given(stragglers=recipes, rank=st.integers(0, 3), step=st.integers(0, 10**6), seed=st.integers())
def test_delays_repeat_scale_and_never_hasten(
    stragglers: Stragglers, rank: int, step: int, seed: int
) -> None:
    delay = stragglers.delay_s(rank, step, seed=seed, base_s=0.1)
    assert delay == stragglers.delay_s(rank, step, seed=seed, base_s=0.1)
    assert 0 <= delay < math.inf
    assert stragglers.delay_s(rank, step, seed=seed, base_s=0.2) == pytest.approx(2 * delay)


def test_recipes_multiply() -> None:
    both = parse_stragglers("worker:1:x3,worker:1:x2,lognormal:0.4")
    noise = Stragglers((SlowWorker(9, 2), SlowWorker(9, 2), Lognormal(0.4)))
    for step in range(20):
        step_s = 1 + both.delay_s(1, step, seed=5, base_s=1)
        assert step_s == pytest.approx(6 * (1 + noise.delay_s(1, step, seed=5, base_s=1)))
        assert both.delay_s(0, step, seed=5, base_s=1) == noise.delay_s(0, step, seed=5, base_s=1)


def slowdowns(text: str) -> list[float]:
    stragglers = parse_stragglers(text)
    return [
        1 + stragglers.delay_s(rank, step, seed=1, base_s=1)
        for rank in range(4)
        for step in range(2500)
    ]


def test_the_distributions_are_what_they_are_called() -> None:
    normal = sorted(slowdowns("lognormal:0.5"))
    assert normal[4900] == 1
    assert normal[8413] == pytest.approx(math.exp(0.5), rel=0.03)  # one deviation above
    assert normal[9772] == pytest.approx(math.exp(1.0), rel=0.05)
    pareto = slowdowns("pareto:3")
    assert median(pareto) == pytest.approx(2 ** (1 / 3), rel=0.02)
    assert fmean(pareto) == pytest.approx(3 / 2, rel=0.05)


def test_draws_differ_by_seed_rank_step_and_recipe() -> None:
    draws = {
        uniform(s, r, t, i) for s in range(4) for r in range(4) for t in range(4) for i in (0, 1)
    }
    assert len(draws) == 128
    assert all(0 < draw < 1 for draw in draws)
    assert uniform(1, 2, 3, 0) == pytest.approx(0.4, abs=0.5)
