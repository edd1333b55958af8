"""When fragments are sent and merged, how tensors are dealt to them, and what is refused."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.compat import check
from slipstream.consistency import Asynchronous, Consistency, FirstOf, Lag, StaleSynchronous
from slipstream.errors import ConfigError, IncompatibleParts
from slipstream.methods import Rounds
from slipstream.planning.fragments import deal_fragments
from slipstream.routes import Everywhere, Route
from slipstream.schedules import AfterBackward, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems import diloco, local_sgd, parse
from slipstream.topologies import Sharded
from slipstream.types import Cluster, Spec
from slipstream.updates import LocalSteps, Nesterov, Update, UserOptimizer


@st.composite
def local_steps(draw: st.DrawFn) -> LocalSteps:
    every = draw(st.integers(1, 40))
    fragments = draw(st.integers(1, every))
    return LocalSteps(every, fragments, draw(st.integers(0, every - 1)))


@given(local_steps(), st.integers(0, 3))
def test_every_fragment_is_sent_once_in_h_steps_and_merged_before_it_is_sent_again(
    local: LocalSteps, cycle: int
) -> None:
    steps = range(cycle * local.every + 1, (cycle + 1) * local.every + 1)
    sent = [fragment for step in steps if (fragment := local.sent_after(step)) is not None]
    assert sent == list(range(local.fragments))
    under_way: set[int] = set()
    for step in range(1, 3 * local.every + 1):
        if (fragment := local.sent_after(step)) is not None:
            assert fragment not in under_way
            under_way.add(fragment)
        if (fragment := local.merged_after(step)) is not None:
            under_way.remove(fragment)


@given(local_steps())
def test_fragments_are_sent_evenly(local: LocalSteps) -> None:
    steps = [step for step in range(1, 2 * local.every + 1) if local.sent_after(step) is not None]
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    assert max(gaps) - min(gaps) <= 1


sizes = st.lists(st.tuples(st.integers(1, 500), st.booleans()), min_size=1, max_size=30)


@given(sizes, st.data())
def test_every_tensor_is_in_one_fragment_and_these_are_even(
    tensors: list[tuple[int, bool]], data: st.DataObject
) -> None:
    specs = [
        Spec(f"t{i}", (n,), "float32", i, role="buffer" if is_buffer else "parameter")
        for i, (n, is_buffer) in enumerate([(1, False), *tensors])
    ]
    parameters = {i for i, spec in enumerate(specs) if spec.role == "parameter"}
    fragments = data.draw(st.integers(1, len(parameters)))
    dealt = deal_fragments(specs, fragments)
    assert Counter(t for tensors in dealt for t in tensors) == Counter(range(len(specs)))
    assert all(parameters & set(tensors) for tensors in dealt)
    loads = [sum(specs[t].numel for t in tensors) for tensors in dealt]
    assert max(loads) - min(loads) <= max(spec.numel for spec in specs)


def test_no_chunk_holds_tensors_of_two_fragments() -> None:
    specs = [Spec(f"t{i}", (100 + i,), "float32", i) for i in range(7)]
    plan = diloco(every=6, fragments=3).plan(specs, Cluster(workers=4))
    of_tensor = {t: f for f, tensors in enumerate(plan.fragments) for t in tensors}
    for chunk in plan.chunks:
        assert len({of_tensor[segment.tensor] for segment in chunk.segments}) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("diloco(every=0)", "every=0: exchange after 1 step or more"),
        ("diloco(every=4.5)", "every=4.5: give a whole number"),
        ("diloco(every=4, fragments=5)", "choose from 1 to 4"),
        ("diloco(every=4, overlap_steps=4)", "choose from 0 to 3"),
        ("diloco(every=4, mix=1.0)", "mix=1.0: choose a share, at least 0 and below 1"),
        ("diloco(lr=0)", "lr=0: give an outer learning rate above 0"),
        ("diloco(momentum=1)", "momentum=1: choose at least 0 and below 1"),
        ("diloco(wire='int3')", "wire='int3': choose one of"),
        ("local_sgd(first=0)", "first=0: at least one worker must make a round"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text)
    assert message in str(refused.value)


def test_more_fragments_than_tensors_are_refused() -> None:
    specs = [Spec("weight", (8, 8), "float32", 0), Spec("bias", (8,), "float32", 1)]
    with pytest.raises(ConfigError, match=r"2 parameter tensor\(s\) to deal: ask for at most 2"):
        diloco(every=50, fragments=3).plan(specs, Cluster(workers=2))


def composed(**changes: Any) -> Strategy:
    parts = {
        "update": Update(LocalSteps(), Nesterov()),
        "schedule": AfterBackward(),
        **changes,
    }
    return Strategy("mine", Rounds(Everywhere(Route(Sharded())), **parts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"update": Update(LocalSteps(), UserOptimizer())},
            "use outer=Nesterov(), or inner=Gradients()",
        ),
        ({"update": Update(outer=Nesterov())}, "use inner=LocalSteps(), or outer=UserOptimizer()"),
        ({"schedule": WaitFree()}, "known only after the optimizer's step; use AfterBackward()"),
        ({"consistency": Consistency(Asynchronous())}, "would mix those of several"),
        ({"consistency": Consistency(StaleSynchronous())}, "would mix those of several"),
        ({"consistency": Consistency(gate=Lag(2))}, "use Lag(0), and overlap_steps="),
        (
            {
                "consistency": Consistency(FirstOf(2)),
                "update": Update(LocalSteps(4, 2), Nesterov(at="server")),
            },
            "use LocalSteps() without fragments=, overlap_steps= and mix=",
        ),
    ],
)
def test_parts_that_do_not_go_together_are_refused(changes: dict[str, Any], message: str) -> None:
    check(composed())
    with pytest.raises(IncompatibleParts) as refused:
        check(composed(**changes))
    assert message in str(refused.value)


def test_local_sgd_is_diloco_with_the_plain_mean() -> None:
    assert local_sgd(every=7).rounds.update == diloco(every=7, lr=1.0, momentum=0.0).rounds.update
