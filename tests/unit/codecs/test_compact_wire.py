import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.codecs import CompactWire
from slipstream.codecs import compact as compact_codec
from slipstream.errors import FrameRefused
from slipstream.planning.costs import LayerShape
from slipstream.types import ITEM_BYTES, LARGEST_CHUNK_BYTES

LINEAR = LayerShape("fc", "factors", 3, 5)
TABLE = LayerShape("words", "rows", 7, 5)
WIRE = CompactWire()
COUNTS = st.integers(0, 40)
DTYPES = st.sampled_from(sorted(ITEM_BYTES))


def cut(nbytes: int) -> list[bytes]:
    return [bytes(size) for size in CompactWire.sizes(nbytes)]


def factors(rows: int, first: str = "float32", second: str = "float32") -> list[bytes]:
    return [*cut(rows * 5 * ITEM_BYTES[first]), *cut(rows * 3 * ITEM_BYTES[second])]


@given(rows=COUNTS, first=DTYPES, second=DTYPES)
def test_two_whole_matrices_are_taken(rows: int, first: str, second: str) -> None:
    WIRE.examine(LINEAR, True, rows, (first, second), factors(rows, first, second))


@given(ids=st.lists(st.integers(0, 6), max_size=30), dtype=DTYPES)
def test_rows_of_the_table_are_taken(ids: list[int], dtype: str) -> None:
    frames = [np.array(ids, np.int64).tobytes()] if ids else []
    frames += cut(len(ids) * 5 * ITEM_BYTES[dtype])
    WIRE.examine(TABLE, True, len(ids), ("int64", dtype), frames)


@given(
    ids=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=30).filter(
        lambda ids: min(ids) < 0 or max(ids) >= 7
    )
)
def test_other_rows_are_refused(ids: list[int]) -> None:
    frames = [np.array(ids, np.int64).tobytes(), bytes(len(ids) * 20)]
    with pytest.raises(FrameRefused, match="ids of rows"):
        WIRE.examine(TABLE, True, len(ids), ("int64", "float32"), frames)


@given(
    shape=st.sampled_from([LINEAR, TABLE]),
    present=st.booleans(),
    rows=st.one_of(COUNTS, st.integers(0, 2**62 - 1)),
    dtypes=st.tuples(*[st.sampled_from([*ITEM_BYTES, "int64", "", "complex64", "load"])] * 2),
    frames=st.lists(st.binary(max_size=200), max_size=6),
)
def test_anything_is_taken_or_refused(
    shape: LayerShape,
    present: bool,
    rows: int,
    dtypes: tuple[str, str],
    frames: list[bytes],
) -> None:
    """Nothing else is raised, and what is taken has the size of its rows."""
    try:
        WIRE.examine(shape, present, rows, dtypes, frames)
    except FrameRefused:
        return
    item = {**ITEM_BYTES, "int64": 8}
    widths = (5, 3) if shape is LINEAR else (1, 5)
    wanted = sum(rows * w * item[d] for w, d in zip(widths, dtypes, strict=True)) if present else 0
    assert sum(map(len, frames)) == wanted


@pytest.mark.parametrize("change", ["fewer", "more", "longer", "another cut", "other rows"])
def test_wrong_frames(change: str) -> None:
    frames, rows = factors(4), 4
    if change == "fewer":
        frames.pop()
    elif change == "more":
        frames.append(b"")
    elif change == "longer":
        frames[0] += bytes(4)
    elif change == "another cut":
        frames = [frames[0][:4], frames[0][4:], frames[1]]
    else:
        rows = 5
    with pytest.raises(FrameRefused):
        WIRE.examine(LINEAR, True, rows, ("float32", "float32"), frames)


def test_a_layer_that_was_not_used_has_nothing() -> None:
    WIRE.examine(LINEAR, False, 0, ("", ""), [])
    for rows, frames in ((1, []), (0, [b"x"])):
        with pytest.raises(FrameRefused, match="not used"):
            WIRE.examine(LINEAR, False, rows, ("", ""), frames)


@pytest.mark.parametrize("dtypes", [("int64", "float32"), ("float32", "int8"), ("", "")])
def test_dtypes_that_do_not_travel(dtypes: tuple[str, str]) -> None:
    with pytest.raises(FrameRefused, match="a matrix of"):
        WIRE.examine(LINEAR, True, 0, dtypes, [])
    with pytest.raises(FrameRefused, match="row ids of"):
        WIRE.examine(TABLE, True, 0, ("float32", "float32"), [])


@given(nbytes=st.integers(0, 5 * LARGEST_CHUNK_BYTES))
def test_frames_are_never_too_large(nbytes: int) -> None:
    sizes = CompactWire.sizes(nbytes)
    assert sum(sizes) == nbytes
    assert all(0 < size <= LARGEST_CHUNK_BYTES for size in sizes)
    assert len(sizes) == CompactWire.frames_for(nbytes, 1)


def test_a_row_larger_than_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact_codec, "LARGEST_CHUNK_BYTES", 8)
    frames = factors(2)
    assert [len(frame) for frame in frames] == [8] * 8
    WIRE.examine(LINEAR, True, 2, ("float32", "float32"), frames)


def test_what_matrices_travel_as() -> None:
    assert CompactWire().dtype("float32") == "float32"
    assert CompactWire("bfloat16").dtype("float32") == "bfloat16"
    assert CompactWire("bfloat16").dtype("float64") == "float64"
    assert CompactWire("bfloat16").dtype("int64") == "int64"
    assert CompactWire("bfloat16").item_bytes(LINEAR) == 2
