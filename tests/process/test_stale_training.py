"""Workers that run ahead of each other, by real processes; and what is refused beforehand."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
from backup_parts import Part, Told, assert_equal_at_the_end, flawless, see_out, start
from backup_worker import ELEMENTS
from fork_server import ForkServer, Run

from slipstream.errors import ConfigError
from slipstream.systems import parse

pytestmark = pytest.mark.process

ALL = sum(ELEMENTS)
RAMP_UP = 60
HALF, END = 20, 40

COUNTED = Part(
    "counted", "async_sgd(chunk_bytes=1024)", "by_own_count", "counter", "count",
    servers=2, own=(60, 25, 40), jitter_s=0.004,
)  # fmt: skip
LAYERS = Part(
    "layers", "async_sgd(chunk_bytes=1024)", optimizer="plain",
    total=300, jitter_s=0.003, abreast=2, stats=True,
)  # fmt: skip
OTHERS = 2
APART = LAYERS.abreast + 3  # updates: two may be under way, and one is made while others leave
BY_AGE = Part(
    "by age", "async_sgd(lr_by_staleness=True)", "by_own_count", "counter", "count",
    own=(60, 60, 60), pause_s=(0.004,) * 3,
)  # fmt: skip
CLIPPED = Part(
    "clipped", "async_sgd(clip_norm=0.5)", "by_own_count", "counter", "count",
    own=(20, 30, 10), pause_s=(0.002,) * 3,
)  # fmt: skip
RAMPED = Part(
    "ramped", f"async_sgd(ramp_up={RAMP_UP})", "ramped_up", "counter", "count",
    own=(80, 80, 80), pause_s=(0.004,) * 3,
)  # fmt: skip
BOUND = 2
BOUNDED = Part(
    "bounded", f"bounded_staleness(s={BOUND}, chunk_bytes=1024)", "within_bound",
    optimizer="plain", total=80, pause_s=(0.0, 0.002, 0.006), behind=(0, 1, 1), jitter_s=0.004,
)  # fmt: skip
BOUNDED_COUNTED = Part(
    "bounded counted", f"bounded_staleness(s={BOUND})", "by_own_count",
    "large counter", "count", own=(12, 12, 12), pause_s=(0.0, 0.0, 0.05),
)  # fmt: skip
AVERAGED = "async_sgd(averaged=0.9, chunk_bytes=2048)"
# One of two leaves at once, so that every update is the other's.
WHOLE = Part(
    "whole", AVERAGED, "by_averages", optimizer="adam", own=(END, 0), look=True, save_every=HALF
)
AGAIN = Part("again", AVERAGED, "by_averages", optimizer="adam", own=(END, 0), look=True, servers=2)
LENT = Part("lent", "bounded_staleness(s=2, averaged=0.9)", "tried_within", optimizer="plain")
OF_TWO = (WHOLE, AGAIN, LENT)
# On three workers.
WRONG = {
    "backup_workers(first=9)": ("first=9", "3 workers"),
    "backup_workers(backup=3)": ("backup=3", "3 workers"),
    "backup_workers(first=2, update='worker')": ("does not take update",),
    "bounded_staleness(s=-1)": ("bound of -1",),
}
WRONG_ANYWHERE = {
    "backup_workers(first=0)": "first=0",
    "backup_workers(first=2, backup=1)": "not both",
    "backup_workers(first=2, min_first=3)": "min_first=3",
    "backup_workers(first=2, close_after_s=0)": "close_after_s=0",
    "backup_workers(first=2, averaged=1.0)": "averaged=1.0",
    "backup_workers(first='most')": "'most'",
    "backup_workers(first=2.5)": "first=2.5",
    "backup_workers(backup='one')": "backup='one'",
    "backup_workers(first=2, close_after_s='soon')": "close_after_s='soon'",
    "backup_workers(first=2, averaged='much')": "averaged='much'",
    "bounded_staleness(s=1.5)": "bound of 1.5",
    "async_sgd(clip_norm=0)": "clip_norm=0",
    "async_sgd(ramp_up=-1)": "ramp_up=-1",
}
REFUSED = [Part(f"wrong {i}", strategy, total=3) for i, strategy in enumerate(WRONG)]
TOO_LATE = [
    Part("rounds", "backup_workers(first=2)", "refuses"),
    Part("asynchronous", "async_sgd()", "refuses"),
]
LOADS_LATE = Part("loads late", "bounded_staleness(s=2)", "loads_late", "counter", "count")
OF_THREE = (
    COUNTED, LAYERS, BY_AGE, CLIPPED, RAMPED, BOUNDED, BOUNDED_COUNTED, LOADS_LATE,
    *TOO_LATE, *REFUSED,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stale")


@pytest.fixture(scope="module")
def runs(fork_server: ForkServer, folder: Path) -> dict[int, Run]:
    """By number of workers, all at the same time: most of it is servers that start."""
    WHOLE.save = str(folder / "whole")
    AGAIN.load = f"{WHOLE.save}.{HALF}"
    parts = {3: OF_THREE, 2: OF_TWO}
    return {workers: start(fork_server, folder, workers, *p) for workers, p in parts.items()}


@pytest.fixture(scope="module")
def of_three(runs: dict[int, Run]) -> dict[str, list[Told]]:
    return see_out(runs[3], *OF_THREE)


def ages_of(told: list[Told]) -> dict[str, Counter[int]]:
    """By tensor: how many gradients were how old, at all servers."""
    ages: dict[str, Counter[int]] = {}
    for account in told[0]["accounts"]:
        for name, counts in account["staleness"].items():
            counted = {int(age): number for age, number in counts.items()}
            ages.setdefault(name, Counter()).update(counted)
    return ages


# ---- asynchronous


def test_every_gradient_counts(of_three: dict[str, list[Told]]) -> None:
    told = flawless(of_three[COUNTED.name])
    updates = sum(COUNTED.own)
    assert [each["counts"] for each in told] == [[updates, updates]] * 3
    # Whoever made the last update was told its number.
    assert max(each["step"] for each in told) == updates
    assert_equal_at_the_end(told)


def test_staleness_of_every_layer(of_three: dict[str, list[Told]]) -> None:
    told = flawless(of_three[LAYERS.name])
    taken = sum(len(each["rounds"]) for each in told)
    assert LAYERS.total <= taken <= LAYERS.total + 3
    staleness = told[0]["summary"]["staleness"]
    weights = [f"{layer}.weight" for layer in (0, 3, 6)]
    assert staleness.keys() >= set(weights)
    assert set(told[1]["stats"]["staleness"]) == set(staleness)
    for name, figures in staleness.items():
        ages = ages_of(told)[name]
        assert set(figures) == {"min", "mean", "median", "max", "std", "count"}
        assert figures["count"] % taken == 0  # once for every chunk
        assert figures["count"] == ages.total()
        assert figures["min"] == min(ages) <= figures["median"] <= figures["max"] == max(ages)
        # A worker reads weights just after its own update. So its ages add up to the updates that
        # others made before its last one: twice its own, but for how far apart workers are.
        assert OTHERS - OTHERS * 3 * APART / taken <= figures["mean"] <= OTHERS
        assert figures["max"] <= 2 * OTHERS * APART
    losses = [loss for each in told for loss in each["losses"][-10:]]
    assert sum(losses) / len(losses) < told[0]["losses"][0] / 2
    assert_equal_at_the_end(told)


def test_learning_rate_is_divided_by_age(of_three: dict[str, list[Told]]) -> None:
    told = flawless(of_three[BY_AGE.name])
    ages = ages_of(told)["0.value"]
    assert ages.total() == sum(BY_AGE.own)
    assert max(ages) >= 2
    moved = sum(number / max(1, age) for age, number in ages.items())
    for each in told:
        assert each["counts"] == pytest.approx([moved, moved], rel=1e-4)
    assert moved < sum(BY_AGE.own)


def test_gradient_is_clipped_as_a_whole(of_three: dict[str, list[Told]]) -> None:
    told = flawless(of_three[CLIPPED.name])
    moved = sum(CLIPPED.own) * 0.5 / ALL**0.5
    for each in told:
        assert each["counts"] == pytest.approx([moved, moved], rel=1e-4)


def test_workers_join_one_after_the_other(of_three: dict[str, list[Told]]) -> None:
    told = flawless(of_three[RAMPED.name])
    makers = [(round_, ranks) for a in told[0]["accounts"] for round_, ranks in a["makers"]]
    for rank in range(3):
        begun = min(round_ for round_, ranks in makers if rank in ranks)
        assert begun >= rank * RAMP_UP // 3
    counted = sum(len(ranks) for _, ranks in makers)
    # What came before its turn: one gradient of a worker, since it then waits for its turn.
    assert 1 <= sum(RAMPED.own) - counted <= OTHERS
    for each in told:
        assert each["counts"] == [counted, counted]
    assert_equal_at_the_end(told)


def test_momentum_is_warned_of(of_three: dict[str, list[Told]]) -> None:
    told = flawless(of_three["asynchronous"])
    assert any("momentum 0.9" in said for said in told[0]["warnings"])
    assert not any("momentum" in said for said in flawless(of_three[LAYERS.name])[0]["warnings"])


# ---- bounded


def test_nobody_is_further_ahead_than_the_bound(of_three: dict[str, list[Told]]) -> None:
    told = flawless(of_three[BOUNDED.name])
    ahead = [each["ahead"] for each in told]
    assert [len(each) for each in ahead] == [BOUNDED.total] * 3
    assert max(max(each) for each in ahead) <= BOUND
    assert max(ahead[0]) > 0  # it does run ahead
    losses = [loss for each in told for loss in each["losses"][-10:]]
    assert sum(losses) / len(losses) < told[0]["losses"][0] / 2
    assert_equal_at_the_end(told)


def test_bounded_every_gradient_counts(of_three: dict[str, list[Told]]) -> None:
    """Also those that are still on their way, or wait for others, when their worker leaves."""
    told = flawless(of_three[BOUNDED_COUNTED.name])
    steps = sum(BOUNDED_COUNTED.own)
    for ages in ages_of(told).values():
        assert ages.total() % steps == 0
        assert max(ages) <= BOUND
    for each in told:
        least, most = each["counts"]
        # A mean over all workers; over fewer when the first have left.
        assert steps / 3 - 0.01 <= least <= most <= steps / 3 + BOUND + 1
    assert_equal_at_the_end(told)


# ---- what is refused


@pytest.mark.parametrize("strategy", WRONG)
def test_strategy_that_cannot_be(of_three: dict[str, list[Told]], strategy: str) -> None:
    part = next(part for part in REFUSED if part.strategy == strategy)
    errors = [each.get("error", "none") for each in of_three[part.name]]
    kinds, reasons = zip(*(error.split(": ", 1) for error in errors), strict=True)
    assert {"ConfigError", "UnknownStrategy"} & set(kinds)
    # A rank that was still joining heard of it, and of where, from one that was not.
    heard = r"^rank \d failed: |\n  on rank \d, at .*"
    assert len({re.sub(heard, "", reason) for reason in reasons}) == 1
    for words in WRONG[strategy]:
        assert words in reasons[0]


@pytest.mark.parametrize(("strategy", "says"), WRONG_ANYWHERE.items())
def test_strategy_that_can_never_be(strategy: str, says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        parse(strategy)


@pytest.mark.parametrize("kind", [part.name for part in TOO_LATE])
def test_refused_while_training(of_three: dict[str, list[Told]], kind: str) -> None:
    """On every rank, which then trains on."""
    told = flawless(of_three[kind])
    for each in told:
        late, unasked = each["refused"]
        assert late.startswith("ConfigError: ")
        assert "before the first step" in late
        assert unasked.startswith("ConfigError: ")
        assert "averaged=" in unasked
    assert_equal_at_the_end(told)


def test_late_load_is_refused_or_right(of_three: dict[str, list[Told]]) -> None:
    """Gradients that were waiting must not be applied to the weights of a checkpoint."""
    told = flawless(of_three[LOADS_LATE.name])
    if told[0]["refused"] == ["no error"]:
        assert [each["counts"] for each in told] == [[0.0, 0.0]] * 3
    assert len({each["refused"][0] for each in told}) == 1
    assert_equal_at_the_end(told)


# ---- averaged weights


@pytest.fixture(scope="module")
def of_two(runs: dict[int, Run]) -> dict[str, list[Told]]:
    return see_out(runs[2], *OF_TWO)


def test_averaged_weights_follow_every_update(of_two: dict[str, list[Told]]) -> None:
    first = flawless(of_two[WHOLE.name])[0]
    assert len(first["averages"]) == END / 5
    for compared in first["averages"].values():
        assert compared["away"] <= 1e-6
        assert compared["moved"] > 1e-4
        assert compared["own_again"]
    assert_equal_at_the_end(of_two[WHOLE.name])


def test_averages_go_on_from_a_checkpoint(of_two: dict[str, list[Told]]) -> None:
    before, after = flawless(of_two[WHOLE.name])[0], flawless(of_two[AGAIN.name])[0]
    assert after["loaded"] == {"step": HALF, "digest": before["digests"][str(HALF)]}
    assert after["loaded_averages"] == before["averages"][str(HALF)]["digest"]
    assert after["digests"] == {s: d for s, d in before["digests"].items() if int(s) > HALF}
    for step, compared in after["averages"].items():
        assert compared["digest"] == before["averages"][step]["digest"]


def test_lent_weights_stay_while_others_arrive(of_two: dict[str, list[Told]]) -> None:
    told = flawless(of_two[LENT.name])
    assert told[0]["lent_unchanged"]
    assert_equal_at_the_end(told)
