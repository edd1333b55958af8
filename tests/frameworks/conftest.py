"""Fixtures of the tests that need a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray_nodes import Nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    from ray_nodes import connected  # Ray may not be installed

    with connected() as nodes:
        yield nodes


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test that uses the cluster."""
    within = "nodes" in request.fixturenames
    with request.getfixturevalue("nodes").nothing_left() if within else nullcontext():
        yield
