"""What servers tell of gradients' age, and all servers' figures as one."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.runtime.servers.accounts import (
    ServerFigures,
    median,
    merge_figures,
    merge_pairs,
    staleness_text,
    summarized,
)

AGES = st.dictionaries(st.integers(0, 60), st.integers(1, 40), min_size=1, max_size=12)


@given(AGES)
def test_a_summary_is_what_numpy_says_of_the_ages_one_by_one(ages: dict[int, int]) -> None:
    every = np.repeat(list(ages), list(ages.values()))
    told = summarized(ages)
    assert told["min"] == every.min()
    assert told["max"] == every.max()
    assert told["count"] == len(every)
    assert told["median"] == np.median(every)
    assert told["mean"] == pytest.approx(every.mean(), rel=1e-12)
    assert told["std"] == pytest.approx(every.std(), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [({3: 1}, 3), ({0: 1, 9: 1}, 4.5), ({0: 2, 9: 1}, 0), ({1: 2, 2: 2}, 1.5)],
)
def test_the_median_of_counted_values(counts: dict[int, int], expected: float) -> None:
    assert median(sorted(counts.items()), sum(counts.values())) == expected


@given(st.lists(AGES, min_size=1, max_size=4))
def test_shards_of_a_tensor_are_summed_before_they_are_summarized(
    shards: list[dict[int, int]],
) -> None:
    accounts = [ServerFigures({"weight": ages}, []) for ages in shards]
    total: Counter[int] = Counter()
    for ages in shards:
        total.update(ages)
    assert merge_figures(accounts)["staleness"] == {"weight": summarized(total)}


def test_a_tensor_that_has_had_no_gradient_is_left_out() -> None:
    assert merge_figures([ServerFigures({"a": {}, "b": {1: 2}}, [])])["staleness"].keys() == {"b"}


def test_rounds_are_told_by_the_server_that_decides() -> None:
    deciding = ServerFigures(
        {},
        [(0, [0])],
        made={0: 4},
        dropped={1: 2},
        late=[(3, 1)],
        first=[(0, 2)],
        durations_s={0: [0.5]},
        arrivals={1: [(0.5, 4)]},
    )
    told = merge_figures([deciding, ServerFigures({}, [(0, [0])])])
    assert told["rounds"] == {
        "made": {0: 4},
        "dropped": {1: 2},
        "late": [(3, 1)],
        "first": [(0, 2)],
        "arrivals_s": {1: [(0.5, 4)]},
        "durations_s": {0: [0.5]},
    }
    assert "rounds" not in merge_figures([ServerFigures({}, [])])


def test_refusals_of_a_server_count_once_whatever_the_number_of_pairs() -> None:
    """Each report of a server has all of its refusals."""
    servers = [
        ServerFigures({}, [], refused=3, last_refusal="rank 1: a frame"),
        ServerFigures({}, []),
    ]
    told = merge_pairs([servers, servers])
    assert told["refused_by_servers"] == {"messages": 3, "last": ["rank 1: a frame"]}


def test_the_table_has_a_row_a_tensor() -> None:
    rows = staleness_text({"weight": summarized({1: 1, 2: 3}), "b": summarized({0: 1})}).split("\n")
    assert [row.split() for row in rows] == [
        ["tensor", "min", "mean", "median", "max", "std", "count"],
        ["weight", "1", "1.75", "2", "2", "0.433", "4"],
        ["b", "0", "0", "0", "0", "0", "1"],
    ]
    assert len({len(row) for row in rows}) == 1
