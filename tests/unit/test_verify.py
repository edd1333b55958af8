"""The model of the rings and the code it is a model of are said to be the same: line by line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| `(?P<model>.+?)` \| `(?P<code>.+?)` \|$", re.MULTILINE)


def squeezed(path: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / path).read_text())


@pytest.mark.parametrize(
    ("model", "code"),
    [m.groups() for m in ROW.finditer((ROOT / "verify/README.md").read_text())][1:],  # but the head
)
def test_both_lines_are_there(model: str, code: str) -> None:
    assert model in squeezed("verify/ring.pml")
    assert code in squeezed("native/ring.cpp")


def test_nothing_that_touches_what_is_shared_is_left_out() -> None:
    """Every atomic operation of the ring's two sides has its line; locks have none."""
    source = (ROOT / "native/ring.cpp").read_text()
    rings = source[source.index("Segment::reserve") : source.index("Segment::begin_reading")]
    told = (ROOT / "verify/README.md").read_text()
    for word in ("pushed", "taken", "awaits", "room", "dozing", "bell"):
        assert f".{word}." in rings or f">{word}." in rings
        assert f"{word}" in told
