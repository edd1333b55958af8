"""What is cut at the start keeps its numbers; units are dealt anew to other members."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kept_plans import CLUSTERS, FILE, MODELS, STRATEGIES, digests

from slipstream.errors import ConfigError, TooManyServers
from slipstream.plan import UnitLayout
from slipstream.systems import parse
from slipstream.types import Cluster

clusters = st.builds(Cluster, st.integers(2, 6), st.integers(1, 4))


@pytest.mark.parametrize("text", STRATEGIES)
def test_plans_are_what_they_were(text: str) -> None:
    kept = json.loads(FILE.read_text())
    assert {model: digests(text, model) for model in MODELS} == kept[text]


def test_plans_that_are_kept_are_of_strategies_that_there_are() -> None:
    assert set(json.loads(FILE.read_text())) == set(STRATEGIES)


@given(
    text=st.sampled_from(STRATEGIES),
    model=st.sampled_from(sorted(MODELS)),
    start=st.sampled_from(CLUSTERS[:3]) | clusters,
    now=clusters,
)
def test_other_members_hold_the_same_units(
    text: str, model: str, start: Cluster, now: Cluster
) -> None:
    try:
        plan = parse(text).plan(MODELS[model], start)
        other = plan.assigned(now)
    except ConfigError:
        assume(False)  # impossible with so few workers, or so many servers
    for field in fields(UnitLayout):
        assert getattr(other, field.name) == getattr(plan, field.name), field.name
    assert other.cluster == now
    nodes = {*now.worker_nodes, *now.server_nodes}
    assert len(other.holders) == len(plan.units)
    assert all(holders and set(holders) <= nodes for holders in other.holders)
    assert other.assigned(start) == plan, "back to the first members"


def test_servers_that_are_left_hold_even_shares() -> None:
    plan = parse("push_pull").plan(MODELS["large"], Cluster(4, 4))
    left = plan.assigned(Cluster(4, 3))
    loads = [sum(chunk.nbytes for chunk in left.chunks_of(node)) for node in range(4, 7)]
    assert max(loads) < 1.3 * min(loads), "cut for four servers, dealt to three"
    assert sum(loads) == sum(chunk.nbytes for chunk in plan.chunks)


def test_more_servers_than_chunks_are_refused_later_too() -> None:
    plan = parse("push_pull").plan(MODELS["tiny"], Cluster(2, 1))
    with pytest.raises(TooManyServers):
        plan.assigned(Cluster(2, 40))
