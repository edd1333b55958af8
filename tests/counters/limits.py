"""Limits that may only fall, and what to say of a count that is not at its limit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from counters import shape, wiring
from counters.source import Source

FILE = Path(__file__).with_name("limits.json")
WRITE = "PYTHONPATH=tests .venv/bin/python -m counters --write"

Count = Callable[[Source], list[str]]

COUNTERS: dict[str, Count] = {
    count.__name__: count
    for count in (
        wiring.overwritten_attributes,
        wiring.readers_of_predicates,
        wiring.readers_of_members,
        wiring.imports_in_circles,
        shape.forwarding_methods,
        shape.empty_methods,
        shape.long_files,
        shape.long_functions,
        shape.names_of_several_classes,
        shape.docstrings_without_a_sentence,
        shape.undescribed_constructors,
    )
}

# Limits in the same file whose counts need a job: see tests/process/test_traced_calls.py.
MEASURED = frozenset({"hops_of_flush", "files_of_a_gradient"})


def load(file: Path = FILE) -> dict[str, int]:
    """Read how many places each counter may have."""
    limits = json.loads(file.read_text())
    assert isinstance(limits, dict)
    return limits


def lower(counts: Mapping[str, int], file: Path = FILE) -> dict[str, int]:
    """Write lower limits, and limits of new counters; return the counts that are above theirs."""
    limits = load(file)
    limits |= {name: min(n, limits.get(name, n)) for name, n in counts.items()}
    file.write_text(json.dumps(limits, indent=2) + "\n")
    return {name: n for name, n in counts.items() if n > limits[name]}


def trouble(name: str, places: list[str], limit: int, about: str = "", command: str = WRITE) -> str:
    """Return why a test must fail; empty if there are exactly as many places as allowed."""
    if len(places) > limit:
        listed = "; ".join(places)
        return f"{name}: {len(places)} places, {limit} allowed: {listed}\n{about}"
    if len(places) < limit:
        return (
            f"{name}: {len(places)} places, {limit} allowed. It has fallen: write the new limit, "
            f"so that it cannot rise again:\n    {command}"
        )
    return ""
