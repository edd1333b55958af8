"""Chunks must hold every element exactly once, whatever the tensors are like."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import HUGE_SHAPES, SHAPES, spec_lists, vector

from slipstream.planning import layout as planning
from slipstream.planning.layout import (
    CHUNK_BYTES,
    CHUNKS_PER_SHARE,
    SMALLEST_CHUNK_BYTES,
    Group,
)
from slipstream.types import ITEM_BYTES, Chunk, Spec

CHUNK_SIZES = st.sampled_from([8, 12, 13, 100, 4096, 4097, 10_000, 1 << 16, CHUNK_BYTES])


def lay_out(
    specs: Sequence[Spec], groups: Sequence[Group], *, shares: int, chunk_bytes: int = CHUNK_BYTES
) -> tuple[Chunk, ...]:
    """All groups for the same number of holders."""
    shared = {group: replace(group, shares=shares) for group in groups}
    return planning.lay_out(specs, [shared[g] for g in groups], chunk_bytes=chunk_bytes)


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Spec], list[Group], int, int]:
    specs = draw(spec_lists())
    routes = draw(st.lists(st.integers(0, 2), min_size=len(specs), max_size=len(specs)))
    apart = draw(st.tuples(*[st.booleans()] * 3))
    groups = [
        Group(route, spec.dtype, spec.role, spec.name if apart[route] else "")
        for spec, route in zip(specs, routes, strict=True)
    ]
    return specs, groups, draw(st.integers(0, 7)), draw(CHUNK_SIZES)


def pieces(chunks: Sequence[Chunk]) -> dict[int, list[tuple[int, int]]]:
    table = defaultdict(list)
    for chunk in chunks:
        for segment in chunk.segments:
            table[segment.tensor].append((segment.start, segment.stop))
    return table


@given(cases())
def test_every_element_is_in_exactly_one_chunk(
    case: tuple[list[Spec], list[Group], int, int],
) -> None:
    specs, groups, shares, chunk_bytes = case
    cut = pieces(lay_out(specs, groups, shares=shares, chunk_bytes=chunk_bytes))
    for tensor, spec in enumerate(specs):
        reached = 0
        for start, stop in sorted(cut[tensor]):
            assert start == reached < stop
            reached = stop
        assert reached == spec.numel


@given(cases())
def test_chunks_are_within_their_size_and_some_tensors_have_chunks_of_their_own(
    case: tuple[list[Spec], list[Group], int, int],
) -> None:
    specs, groups, shares, chunk_bytes = case
    for chunk in lay_out(specs, groups, shares=shares, chunk_bytes=chunk_bytes):
        assert chunk.nbytes <= max(chunk_bytes, ITEM_BYTES[chunk.dtype])
        if groups[chunk.segments[0].tensor].layer:
            assert len(chunk.segments) == 1


@given(cases())
def test_chunks_never_mix_routes_dtypes_or_roles(
    case: tuple[list[Spec], list[Group], int, int],
) -> None:
    specs, groups, shares, chunk_bytes = case
    layout = lay_out(specs, groups, shares=shares, chunk_bytes=chunk_bytes)
    assert [chunk.index for chunk in layout] == list(range(len(layout)))
    for chunk in layout:
        assert chunk.segments
        (group,) = {groups[segment.tensor] for segment in chunk.segments}
        assert (chunk.route, chunk.dtype) == (group.route, group.dtype)


@given(cases())
def test_chunks_of_a_group_follow_the_backward_pass(
    case: tuple[list[Spec], list[Group], int, int],
) -> None:
    specs, groups, shares, chunk_bytes = case
    walks: dict[Group, list[tuple[int, int]]] = defaultdict(list)
    for chunk in lay_out(specs, groups, shares=shares, chunk_bytes=chunk_bytes):
        walks[groups[chunk.segments[0].tensor]] += [
            (-specs[segment.tensor].order, segment.start) for segment in chunk.segments
        ]
    for walk in walks.values():
        assert all(before < after for before, after in pairwise(walk))


@given(
    total=st.integers(1, 1 << 30),
    shares=st.integers(1, 8),
    dtype=st.sampled_from(list(ITEM_BYTES)),
    chunk_bytes=st.sampled_from([1 << 20, CHUNK_BYTES, 3_000_001]),
)
def test_shares_are_equal_to_within_a_few_elements(
    total: int, shares: int, dtype: str, chunk_bytes: int
) -> None:
    chunks = chunks_of(total, shares=shares, dtype=dtype, chunk_bytes=chunk_bytes)
    sizes = Counter(chunk.numel for chunk in chunks)
    # All chunks are equal but the last, so that each of the shares gets as many as the others.
    assert len(sizes) <= 2
    assert all(chunk.numel == chunks[0].numel for chunk in chunks[:-1])
    if total >= len(chunks) ** 2 and chunks[0].nbytes > SMALLEST_CHUNK_BYTES:
        assert len(chunks) % shares == 0
        assert chunks[0].numel - chunks[-1].numel < len(chunks)


def chunks_of(total: int, *, shares: int, dtype: str, chunk_bytes: int) -> tuple[Chunk, ...]:
    group = Group(0, dtype, "parameter")
    spec = vector("w", total, dtype=dtype)
    return lay_out([spec], [group], shares=shares, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("shares", [1, 4])
def test_a_small_model_leaves_in_several_chunks_per_share(shares: int) -> None:
    whole = chunks_of(800_000, shares=shares, dtype="float32", chunk_bytes=8 << 20)
    assert len(whole) == CHUNKS_PER_SHARE * shares
    few = chunks_of(70_000 * shares, shares=shares, dtype="float32", chunk_bytes=8 << 20)
    assert len(few) == 2 * shares, "no chunk below what is worth a message"
    layer = [Group(0, "float32", "parameter", layer="fc")]
    alone = lay_out([vector("w", 800_000)], layer, shares=1, chunk_bytes=8 << 20)
    assert len(alone) == 1, "a layer leaves at once"


def test_small_models_are_not_cut_into_crumbs() -> None:
    sizes = [c.nbytes for c in chunks_of(3000, shares=8, dtype="float32", chunk_bytes=CHUNK_BYTES)]
    assert sizes == [SMALLEST_CHUNK_BYTES, SMALLEST_CHUNK_BYTES, 12_000 - 2 * SMALLEST_CHUNK_BYTES]


@given(HUGE_SHAPES, SHAPES, st.integers(1, 4))
def test_tensors_beyond_32_bits_are_planned_without_touching_memory(
    huge: tuple[int, ...], small: tuple[int, ...], shares: int
) -> None:
    specs = [Spec("huge", huge, "float32", 0), Spec("small", small, "float32", 1)]
    groups = [Group(0, "float32", "parameter")] * 2
    layout = lay_out(specs, groups, shares=shares, chunk_bytes=1 << 30)
    assert sum(chunk.numel for chunk in layout) == specs[0].numel + specs[1].numel
    assert max(chunk.nbytes for chunk in layout) <= 1 << 30
    spans = sorted(pieces(layout)[0])
    assert spans[0][0] == 0
    assert spans[-1][1] == specs[0].numel
    assert all(before[1] == after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize("layer", ["", "fc"])
def test_tensors_without_elements_are_in_no_chunk(layer: str) -> None:
    specs = [vector("none", 0, order=0), vector("some", 3, order=1), vector("nil", 0, order=2)]
    groups = [Group(0, "float32", "parameter", layer)] * 3
    layout = lay_out(specs, groups, shares=2)
    assert {s.tensor for chunk in layout for s in chunk.segments} == {1}
    assert lay_out([], [], shares=1) == ()


def test_a_scalar_is_one_element() -> None:
    layout = lay_out([Spec("s", (), "float64", 0)], [Group(0, "float64", "parameter")], shares=1)
    assert [chunk.nbytes for chunk in layout] == [8]
