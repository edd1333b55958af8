"""A loop that changes gradients that have left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.errors import RuntimeFault
from slipstream.torch.loop_watch import LoopWatch


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
