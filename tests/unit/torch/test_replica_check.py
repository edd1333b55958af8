"""Sums of weights, and reports of them that come over a link."""

from __future__ import annotations

import msgspec
import pytest
import torch

from slipstream.errors import FrameRefused
from slipstream.runtime.figures.replica_reports import ReplicaReport
from slipstream.torch.capture.replica_check import decoded, is_due
from slipstream.torch.tensors.tensor_sums import sum_of, sums_of

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_equal_bits_is_equal_in_any_layout(dtype: torch.dtype) -> None:
    values = torch.randn(6, 4, 5, 3).to(dtype)
    assert sum_of(values) == sum_of(values.contiguous(memory_format=torch.channels_last))
    assert sum_of(values) == sum_of(torch.cat([torch.zeros(1, dtype=dtype), values.ravel()])[1:])


def test_sum_of_lazily_conjugated_and_negated_values_is_that_of_the_values() -> None:
    values = torch.randn(6, 4, dtype=torch.complex64)
    for lazy in (values.conj(), values.conj().imag):
        assert lazy.is_conj() or lazy.is_neg()
        assert sum_of(lazy) == sum_of(lazy.resolve_conj().resolve_neg().clone())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_of_a_changed_value_differs(dtype: torch.dtype) -> None:
    values = torch.ones(1000).to(dtype)
    before = sum_of(values)
    values[500] += 0.01
    assert sum_of(values) != before


def test_sum_of_values_that_are_not_finite_equals_itself() -> None:
    values = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    assert sum_of(values) == sum_of(values.clone())
    assert sums_of([None, torch.empty(0), values.to_sparse()]) == [0, 0, sum_of(values)]


def test_check_is_due_early_and_then_every_64_steps() -> None:
    assert [step for step in range(200) if is_due(step)] == [0, 8, 64, 128, 192]


def test_report_of_another_model_is_refused() -> None:
    report = ReplicaReport(8, [1, 2], [], [3, 4], [], [], [], [0, 0])
    content = msgspec.msgpack.encode(report)
    assert decoded(content, 2) == report
    with pytest.raises(FrameRefused, match=r"\[2\] parameters: expected 3"):
        decoded(content, 3)
    for broken in (content[:-1], b"", b"\xff" * 40):
        with pytest.raises(FrameRefused, match="unreadable"):
            decoded(broken, 2)
