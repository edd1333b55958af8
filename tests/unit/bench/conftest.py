from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

BESIDE_THE_CHECKOUT = Path(__file__).parents[4] / "shared" / "data"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small tensors gain nothing from more, and on a busy machine lose much."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def real_data() -> Callable[[str], Path]:
    """The folder of a real data set; the test is skipped where it is absent."""
    root = Path(os.environ.get("SLIPSTREAM_DATA") or BESIDE_THE_CHECKOUT)

    def find(name: str) -> Path:
        if not (root / name).is_dir():
            pytest.skip(f"no {name} in {root}: set SLIPSTREAM_DATA to a folder that has it")
        return root / name

    return find
