"""Which part of its updates a worker sends to which peer, and when (Ako)."""

import numpy as np
import pytest

from slipstream import ako
from slipstream.codecs.partition import PeerAccumulators, Rotation
from slipstream.types import Cluster, Spec

NUMEL = 60  # every p below divides it


@pytest.mark.parametrize("partitions", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("same", [False, True])
def test_rotation_follows_its_equation(partitions: int, same: bool) -> None:
    """Worker j sends peer i partition (i − j + t) mod p, or all peers partition (j + t) mod p."""
    rotation, size = Rotation(partitions, same_for_all=same), NUMEL // partitions
    for sender, peer, time in np.ndindex(4, 4, 2 * partitions):
        due = (sender if same else peer - sender) + time
        first = due % partitions * size
        part = rotation.part(rotation.turn(sender, peer), time, NUMEL)
        assert part == slice(first, first + size)


def test_ako_holds_back_by_the_same_bound_at_every_time() -> None:
    specs = [Spec("weight", (4,), "float32", 0)]
    rule = ako(partitions=1, delta=0.5).plan(specs, Cluster(2, 0)).partial_exchange
    assert rule is not None
    accumulators = PeerAccumulators(Rotation(1), sender=0, peers=[1], numel=4)
    (accumulator,) = accumulators.accumulators
    accumulators.add(np.float32([0.49, 0.51, -0.49, -0.51]))
    sent = [accumulators.take(accumulator, rule.held_back)[1].tolist() for _ in range(50)]
    np.testing.assert_array_equal(sent[0], np.float32([0, 0.51, 0, -0.51]))
    assert not np.any(sent[1:])
