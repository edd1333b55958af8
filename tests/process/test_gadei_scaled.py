"""gadei with mixed precision and a GradScaler, and with Adagrad: as one process trains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("scaled_worker.py")
ALONE = dict.fromkeys(("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"), "")  # not set


@pytest.mark.parametrize("kind", ["SGD", "Adagrad"])
def test_a_learner_trains_as_a_plain_loop_does(
    launch: Callable[..., Launch], fork_server: ForkServer, kind: str
) -> None:
    command = (SLIPSTREAM, "run", "--workers=1", "--strategy=gadei", str(WORKER))
    job = launch(*command, "gadei", kind)
    plain = fork_server.run(WORKER, "push_pull", kind, ranks=[ALONE])
    assert plain.codes == {0: 0}, plain.told()
    assert job.wait() == 0, job.stderr
    one, other = (json.loads((at / "told.0.json").read_text()) for at in (job.folder, plain.folder))
    assert one["scales"] == other["scales"] == [1024.0] * 3 + [512.0] * 3
    # The scaler leaves one out; a learner makes it without gradients.
    assert (one["steps"], other["steps"]) == (6, 5)
    for name, values in other["weights"].items():
        assert torch.allclose(torch.tensor(one["weights"][name]), torch.tensor(values), atol=1e-5)
