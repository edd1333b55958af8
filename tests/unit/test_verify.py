"""The model of the rings and the code it is a model of are said to be the same: line by line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "verify/README.md").read_text()
ROW = re.compile(r"^\| `(?P<model>.+?)` \| `(?P<code>.+?)` \|$", re.MULTILINE)


def squeezed(path: str) -> str:
    return re.sub(r"\s+", " ", (ROOT / path).read_text())


@pytest.mark.parametrize(
    ("model", "code"),
    [m.groups() for m in ROW.finditer(README)][1:],  # but the head
)
def test_both_lines_are_there(model: str, code: str) -> None:
    assert model in squeezed("verify/ring.pml")
    assert code in squeezed("native/ring.cpp")


# Of the two sides of a ring: what is told of in words, is the kernel's part of a line, or is read
# by its only writer.
BESIDE = (
    "return pushed - own.taken.load(order) < slots;",
    "header_->bell.fetch_add(1, std::memory_order_release);",
    "const std::uint64_t taken = each.taken.load(std::memory_order_relaxed);",
    "header_->beat.fetch_add(1, std::memory_order_relaxed);",
    "if (header_->closing.load(std::memory_order_acquire) != 0) return std::nullopt;",
    "its.room.fetch_add(1, std::memory_order_release);",
)


def test_nothing_that_touches_what_is_shared_is_left_out() -> None:
    """Every atomic operation of the ring's two sides has its line; rest, discard and locks none."""
    source = squeezed("native/ring.cpp")
    begin = source.index("std::optional<std::uint64_t> Segment::reserve")
    sides = source[begin : source.index("void Segment::discard")]
    rest = sides[sides.index("void Segment::rest") : sides.index("void Segment::release")]
    sides = sides.replace(rest, "")
    for told in [*BESIDE, *(match["code"] for match in ROW.finditer(README))]:
        sides = sides.replace(told, "")
    assert re.findall(r"[^;{}]*\.(?:load|store|exchange|fetch_add)\([^;]*", sides) == []
