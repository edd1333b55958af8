"""Simulated runs are what they were, message by message and bit by bit."""

import json

import pytest
from golden_runs import CASES, FILE, SEEDS, digest, run


@pytest.mark.parametrize("name", CASES)
def test_runs_are_what_they_were(name: str) -> None:
    known = json.loads(FILE.read_text())
    assert [digest(run(name, seed)) for seed in SEEDS] == known[name]


def test_digests_are_of_runs_that_there_are() -> None:
    assert set(json.loads(FILE.read_text())) == set(CASES)
