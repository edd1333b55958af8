"""A loop that changes gradients that have left."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.errors import RuntimeFault
from slipstream.torch.capture.loop_watch import LoopWatch


def synchronizer(layer: object) -> Any:
    """One whose gradients have left, and were changed since."""
    told: list[str] = []
    return SimpleNamespace(
        plan=SimpleNamespace(
            units=[SimpleNamespace(layer=layer)],
            schedule=SimpleNamespace(leaves_during_backward=layer is not None),
        ),
        driver=SimpleNamespace(exchanged=True),
        gradients=SimpleNamespace(changed_since=lambda: True),
        leaves_at_step=False,
        leave_at_step=lambda: told.append("at step"),
        step=7,
        told=told,
    )


def test_it_is_told_once_and_goes_on_without_overlap() -> None:
    given = synchronizer(None)
    with pytest.warns(UserWarning, match="for the first time in step 7"):
        LoopWatch(given).examine()
    assert given.told == ["at step"]


def test_layers_in_compact_form_have_no_gradient_that_could_be_changed() -> None:
    given = synchronizer("fc")
    with pytest.raises(RuntimeFault, match="layers in compact form"):
        LoopWatch(given).examine()
    assert given.told == []


def test_a_late_pass_is_told_once_and_counts_from_the_next_step() -> None:
    given = synchronizer(None)
    watch = LoopWatch(given)
    watch.note_late_pass()
    with pytest.warns(UserWarning, match=r"second backward.* passes after the first do not count"):
        watch.examine()
    assert given.told == ["at step"]
    assert not watch.late_pass


def test_a_late_pass_of_layers_in_compact_form_is_refused_before_they_send() -> None:
    with pytest.raises(RuntimeFault, match=r"second backward.* layers in compact form"):
        LoopWatch(synchronizer("fc")).note_late_pass()


def leave_alone(parameter: torch.Tensor) -> None:
    """Change nothing between ``backward()`` and ``step()``."""


def scale_data(parameter: torch.Tensor) -> None:
    """Change a gradient without raising its version."""
    assert parameter.grad is not None
    parameter.grad.data *= 0.5


@pytest.mark.parametrize(("between", "overlaps"), [(leave_alone, True), (scale_data, False)])
def test_gradients_leave_during_backward_only_if_none_was_changed_before_step(
    between: Callable[[torch.Tensor], None], overlaps: bool
) -> None:
    parameter, told = torch.nn.Parameter(torch.ones(3)), []
    accumulated: list[Callable[[int], None]] = []
    given: Any = SimpleNamespace(
        plan=SimpleNamespace(
            units=[SimpleNamespace(layer=None)],
            schedule=SimpleNamespace(leaves_during_backward=True),
        ),
        driver=SimpleNamespace(exchanged=False),
        inventory=SimpleNamespace(tensors=[parameter]),
        accumulating=False,
        leave_at_step=accumulated.append,
        leave_during_backward=lambda: told.append("overlap"),
    )
    watch = LoopWatch(given)
    for _ in range(5):
        parameter.grad = torch.ones(3)
        accumulated[0](0)
        between(parameter)
        watch.examine()
    assert told == (["overlap"] if overlaps else [])


def test_loop_watch_step_pre_hook_with_layers_in_compact_form_is_refused() -> None:
    with pytest.raises(RuntimeFault, match=r"step pre-hook.*route all layers dense"):
        LoopWatch(synchronizer("fc"), hooked=lambda: True).examine()
