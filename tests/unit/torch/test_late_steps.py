"""Steps after the end of a job."""

from __future__ import annotations

import copy
import linecache
import pickle

import pytest
import torch
from torch import nn

from slipstream.torch.capture.late_steps import warn_of_late_steps


def test_the_first_late_step_warns_at_its_line() -> None:
    optimizer, over = torch.optim.SGD(nn.Linear(2, 2).parameters()), False
    warn_of_late_steps(optimizer, lambda: over)
    optimizer.step()  # where a warning is an error: another job trains with it
    over = True
    with pytest.warns(UserWarning, match="the job has ended") as given:
        optimizer.step()
    assert given[0].filename == __file__
    assert linecache.getline(__file__, given[0].lineno).strip() == "optimizer.step()"
    optimizer.step()


def test_the_optimizer_can_still_be_copied() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    warn_of_late_steps(optimizer, lambda: True)
    copy.deepcopy(optimizer).step()
    pickle.loads(pickle.dumps(optimizer)).step()
