"""Leased batches where a codec takes dropped gradients back: every batch counts once, not twice."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from fork_server import ForkServer
from leased_mix_worker import CODECS, FIRST, RANKS, SAMPLES

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("leased_mix_worker.py")


@pytest.mark.parametrize("codec", CODECS)
def test_a_batch_is_dealt_again_only_if_its_gradient_is_gone(
    fork_server: ForkServer, codec: str
) -> None:
    run = fork_server.run(WORKER, codec, ranks=RANKS)
    assert set(run.codes.values()) == {0}, run.told()
    told = [json.loads((run.folder / f"told.{rank}").read_text()) for rank in range(RANKS)]
    assert sum(told[0]["summary"]["rounds"]["dropped"].values()) > 0
    dealt = Counter(sample for each in told for sample in each["dealt"])
    counted = [round(weight * FIRST) for weight in told[0]["weight"]]
    assert all(counted[sample] <= dealt[sample] for sample in range(SAMPLES))
    if codec == "filter":
        # Epochs follow each other, and within one a sample is dealt once.
        assert max(dealt.values()) - min(dealt.values()) <= 1
    else:
        assert max(counted) - min(counted) <= 2
        assert sum(counted) < dealt.total(), "what was dropped was dealt again"
