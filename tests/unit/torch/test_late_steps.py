"""Steps after the end of a job."""

from __future__ import annotations

import copy
import linecache
import pickle

import pytest
import torch
from torch import nn

from slipstream.errors import JobEnded
from slipstream.torch.capture.late_steps import watch_late_steps
from slipstream.torch.capture.remote_optimizer import RemoteOptimizer


def test_the_first_late_step_warns_at_its_line() -> None:
    optimizer, over = torch.optim.SGD(nn.Linear(2, 2).parameters()), False
    watch_late_steps(optimizer, lambda: over, warns=True)
    optimizer.step()  # where a warning is an error: another job trains with it
    over = True
    with pytest.warns(UserWarning, match="the job has ended") as given:
        optimizer.step()
    assert given[0].filename == __file__
    assert linecache.getline(__file__, given[0].lineno).strip() == "optimizer.step()"
    optimizer.step()


def test_other_workers_do_not_warn() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    watch_late_steps(optimizer, lambda: True, warns=False)
    optimizer.step()  # where a warning is an error


@pytest.mark.parametrize("warns", [True, False])
def test_a_step_that_another_process_would_make_is_refused(warns: bool) -> None:
    """Before anything else is found wrong with it, and each time."""
    own = torch.optim.SGD(nn.Linear(2, 2).parameters())
    remote, over, ended = RemoteOptimizer(own, {}), False, []
    remote.attach(lambda: ended.append(over))
    watch_late_steps(own, lambda: over, warns=warns)
    remote.step()
    over = True
    for _ in range(2):
        with pytest.raises(JobEnded):
            remote.step()
    assert ended == [False]


def test_the_optimizer_can_still_be_copied() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters())
    watch_late_steps(optimizer, lambda: True, warns=True)
    copy.deepcopy(optimizer).step()
    pickle.loads(pickle.dumps(optimizer)).step()
