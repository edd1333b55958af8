"""Configuration that all ranks must share, compared line by line."""

from __future__ import annotations

from collections.abc import Sequence


def difference(rank: int, first: Sequence[str], other: Sequence[str], whose: str) -> str:
    """Return the first line in which a rank's model or strategy differs; ``whose`` names the owner
    of the first lines."""
    for theirs, its in zip(first, other, strict=False):
        if theirs != its:
            return f"rank {rank} differs from {whose}: it has {its}; {whose} has {theirs}"
    longer, who = (other, f"rank {rank}") if len(other) > len(first) else (first, whose)
    extra = longer[min(len(first), len(other))]
    return f"rank {rank} differs from {whose}: only {who} has {extra}"
