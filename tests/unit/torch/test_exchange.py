"""Exchanges of gradients that no torch module has, in one process; jobs of several use JAX."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

import slipstream
from slipstream.errors import ConfigError, RuntimeFault
from slipstream.torch.distribute.exchange import FreshResults, HeldTensors, MemoryPool


@pytest.fixture
def job() -> Iterator[slipstream.Job]:
    with slipstream.init() as job:
        yield job


def test_arrays_of_other_frameworks_keep_their_memory(job: slipstream.Job) -> None:
    exchange = job.exchange({"a.b": np.ones(3), "c": torch.zeros(2, 2)})
    gradient = np.arange(3.0)
    exchange.ready(1, torch.ones(2, 2))
    exchange.ready(0, gradient)
    first, second = exchange.finish()
    assert first is not None
    assert second is not None
    assert first.data_ptr() == gradient.ctypes.data
    assert exchange.names == ["a.b", "c"]
    assert [spec.name for spec in job.plan.specs] == ["a.b", "c"]
    assert job.step == 1


def test_a_tensor_without_gradient_has_no_mean(job: slipstream.Job) -> None:
    exchange = job.exchange({"a": torch.ones(3), "b": torch.ones(1)})
    exchange.ready(1, torch.ones(1))
    assert exchange.finish() == [None, torch.ones(1)]
    assert exchange.finish() == [None, None]


def test_mistakes_of_a_framework(job: slipstream.Job) -> None:
    exchange = job.exchange({"a": torch.ones(3), "b": torch.ones(1)})
    with pytest.raises(RuntimeFault, match=r"'a' is torch.float32 of shape \(2,\), but .* \(3,\)"):
        exchange.ready(0, torch.ones(2))
    with pytest.raises(RuntimeFault, match=r"'a' is torch\.float64"):
        exchange.ready(0, torch.ones(3, dtype=torch.float64))
    for number in (-1, 2):
        with pytest.raises(RuntimeFault, match="there is no tensor"):
            exchange.ready(number, torch.ones(1))
    exchange.ready(0, torch.ones(3))
    with pytest.raises(RuntimeFault, match="ready twice in one step"):
        exchange.ready(0, torch.ones(3))
    exchange.finish()
    exchange.ready(0, torch.ones(3))
    assert [tensor.tolist() for tensor in exchange.weights()] == [[1.0, 1.0, 1.0], [1.0]]
    with pytest.raises(ConfigError, match="called before"):
        exchange.weights()


def test_empty_kernels_are_matrices_without_columns(job: slipstream.Job) -> None:
    tensors = {"a": torch.ones(2, 3, 0), "b": torch.ones(1)}
    exchange = job.exchange(tensors, outputs_last=True)
    assert exchange.weights()[0].shape == (2, 3, 0)


@pytest.mark.parametrize("array", [[1.0], 5, np.broadcast_to(np.ones(1), 3)], ids=repr)
def test_what_dlpack_cannot_share_is_refused_by_name(job: slipstream.Job, array: object) -> None:
    with pytest.raises(ConfigError, match=r"'kernel' is a .* that DLPack cannot share"):
        job.exchange({"kernel": array})


def test_what_is_refused(job: slipstream.Job) -> None:
    with pytest.raises(ConfigError, match="no tensors"):
        job.exchange({})
    with pytest.raises(ConfigError, match="'n' is int64: only floating-point"):
        job.exchange({"n": np.ones(2, np.int64)})
    with pytest.raises(ConfigError, match=r"gadei cannot carry .* servers update .* push_pull\(\)"):
        job.exchange({"a": torch.ones(2)}, "gadei")


def test_weights_are_released_and_shapes_stay() -> None:
    held = HeldTensors({"kernel": torch.ones(2, 3, 4)}, alone=False, outputs_last=True)
    (kernel,) = held.tensors
    assert kernel.shape == (6, 4)
    (given,) = held.release()
    assert given.shape == (2, 3, 4)
    assert given.sum() == 24
    assert kernel.shape == (6, 4)
    assert kernel.untyped_storage().nbytes() == 4


def test_results_have_memory_of_their_own_until_nobody_holds_them() -> None:
    results = FreshResults([torch.ones(3, dtype=torch.bfloat16), torch.ones(2, 2)])
    assert results.take() is None
    results[1].fill_(7)
    assert [place.data_ptr() % 64 for place in results.all()] == [0, 0]
    written = results.take()
    assert written is not None
    assert written[0] is None  # a place that no channel has asked for
    results[1].fill_(8)
    later = results.take()
    assert later is not None
    held, place = written[1], later[1].data_ptr()
    assert held is not None
    assert held.tolist() == [[7, 7], [7, 7]]
    del later
    gc.collect()
    assert results[1].data_ptr() == place


def test_a_pool_keeps_few_pieces() -> None:
    pool = MemoryPool(100)
    lent = [pool.take() for _ in range(5)]
    assert len({piece.ctypes.data for piece in lent}) == 5
    lent.clear()
    assert pool.take().nbytes == 100
    assert len(pool._pieces) == 2
