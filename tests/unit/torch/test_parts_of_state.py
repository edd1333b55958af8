"""State that is fetched while the first update has reached some servers only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from slipstream.torch.checkpoints.server_state import ServerState


def test_an_entry_counts_when_all_servers_of_its_tensor_have_sent_it() -> None:
    plan: Any = SimpleNamespace(_plan=SimpleNamespace(specs=[SimpleNamespace(shape=(48, 12))]))
    first, second = (0, torch.zeros(292)), (292, torch.zeros(284))
    assert not ServerState._is_whole(plan, 0, "average", [first])
    assert ServerState._is_whole(plan, 0, "average", [first, second])
