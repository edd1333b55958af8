"""A learner on shared memory that it has for itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from slipstream._native import Rings, format_segment, segment_nbytes
from slipstream.methods import SharedMemoryUpdates
from slipstream.planning.segment import SegmentPlan
from slipstream.torch.modes.learner import Learner
from slipstream.torch.modes.shared_weights import shared_tensors
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.transports.shared_memory import SharedMemory

LIMIT_S = 5.0  # nothing here has to wait for anybody else


class LearnerHarness:
    """One learner that applies its gradients itself to weights that must be consistent."""

    def __init__(self) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(self.model.weight)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        plan = SegmentPlan.of(shared_tensors(self.model, optimizer), 1)
        shape = (1, 2, plan.slot_nbytes, plan.weights_nbytes)
        memory = SharedMemory.create(segment_nbytes(*shape))
        format_segment(memory.memory, *shape)
        self.rings = Rings(memory.memory)
        self.learner = Learner(
            self.model,
            optimizer,
            SharedMemoryUpdates(consistent=True, apply="direct"),
            0,
            memory,
            plan,
            LIMIT_S,
            FiniteGradients(),
            share=lambda value: value,
        )
        self.learner.weights.fill()
        self.optimizer = self.learner.start()

    def step(self) -> None:
        self.model(torch.ones(1)).backward()
        self.optimizer.step()


@pytest.fixture
def harness() -> Iterator[LearnerHarness]:
    harness = LearnerHarness()
    yield harness
    harness.learner.close()


def test_learner_releases_weights_after_it_has_read_them(harness: LearnerHarness) -> None:
    for steps in range(1, 4):
        harness.step()
        harness.learner.wait()
        assert harness.model.weight.item() == -steps
        assert not harness.rings.reading(0)
        assert harness.rings.begin_writing(0, LIMIT_S)
        harness.rings.end_writing()
