"""Host memory behind tensors of every kind; copies that take their time included."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from slipstream.torch.tensors.staging import ImmediateCopies, Pairs, Staging, is_flat_host
from slipstream.types import Values


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + math.prod(shape), dtype=torch.float32).reshape(shape).to(dtype)


def complexes(*shape: int) -> torch.Tensor:
    return torch.complex(numbers(*shape), numbers(*shape) * 100)


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "flat": lambda: numbers(3, 4),
    "turned": lambda: numbers(3, 4).t(),
    "strided": lambda: numbers(24)[::2],
    "a part": lambda: numbers(5, 6)[1:4, 2:],
    "channels last": lambda: numbers(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(0, 4),
    "empty, turned": lambda: torch.empty(4, 0, 2).transpose(0, 2),
    "bfloat16": lambda: numbers(6, dtype=torch.bfloat16),
    "float64, turned": lambda: numbers(2, 3, dtype=torch.float64).t(),
    "complex": lambda: complexes(3, 4),
    "complex, turned": lambda: complexes(3, 4).t(),
    "conjugated": lambda: complexes(3, 4).conj(),
    "conjugated, turned": lambda: complexes(3, 4).t().conj(),
    "negated": lambda: torch._neg_view(numbers(5)),
    "negated, strided": lambda: complexes(4).conj().imag,
}
KINDS = pytest.mark.parametrize("kind", TENSORS)


def plain(tensor: torch.Tensor) -> np.ndarray:
    """The values in order, complex ones as pairs, 16 bits as their patterns."""
    tensor = tensor.detach().clone().contiguous().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return tensor.numpy().reshape(-1).copy()


def read(values: Values, like: torch.Tensor) -> np.ndarray:
    return values.data.view(plain(like).dtype).copy()


class LateCopies(ImmediateCopies):
    """A device whose copies are made only when somebody waits for them."""

    def __init__(self) -> None:
        self.under_way = 0
        self.allocated = 0

    def host_empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.allocated += 1
        return super().host_empty(numel, dtype)

    def start(self, pairs: Pairs, after: Any = None) -> Callable[[], None]:
        self.under_way += 1
        ((host, source),) = pairs
        host.fill_(-9)
        snapshot = source.clone()  # a stream keeps its order: later changes come after the copy

        def finish() -> None:
            self.under_way -= 1
            host.copy_(snapshot)

        return finish


@KINDS
def test_what_is_read_is_what_the_tensor_holds(kind: str) -> None:
    tensor, staging = TENSORS[kind](), Staging()
    staging.fetch(0, tensor)
    values = staging.readable(0, tensor)
    np.testing.assert_array_equal(read(values, tensor), plain(tensor))
    assert values.dtype == str(tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype)[6:]


@KINDS
def test_what_is_written_reaches_the_tensor(kind: str) -> None:
    tensor, staging = TENSORS[kind](), Staging()
    expected = plain(tensor)[::-1].copy()
    staging.writable(0, tensor).data[:] = expected.view(np.uint8)
    staging.commit(0, tensor)
    np.testing.assert_array_equal(plain(tensor), expected)


def test_flat_host_memory_is_used_as_it_is() -> None:
    tensor, staging = torch.zeros(4), Staging()
    staging.fetch(0, tensor)
    tensor[1] = 5.0
    assert staging.readable(0, tensor).data.view(np.float32)[1] == 5.0
    staging.writable(0, tensor).data.view(np.float32)[2] = 7.0
    assert tensor.tolist() == [0.0, 5.0, 7.0, 0.0]
    assert is_flat_host(tensor)


@pytest.mark.parametrize("kind", ["flat", "turned", "complex"])
def test_a_copy_of_its_own_stays_what_it_was_however_often_it_is_read(kind: str) -> None:
    """A tensor in several chunks is read once for each, while backward may go on changing it."""
    tensor, staging = TENSORS[kind](), Staging()
    before = plain(tensor)
    staging.fetch(0, tensor, always=True)
    first = staging.readable(0, tensor)
    tensor.zero_()
    second = staging.readable(0, tensor)
    np.testing.assert_array_equal(read(first, tensor), before)
    np.testing.assert_array_equal(read(second, tensor), before)
    staging.fetch(0, tensor)
    np.testing.assert_array_equal(read(staging.readable(0, tensor), tensor), plain(tensor))


@KINDS
def test_a_copy_under_way_is_waited_for_once(kind: str) -> None:
    tensor, engine = TENSORS[kind](), LateCopies()
    staging = Staging(lambda device: engine)
    staging.fetch(0, tensor, always=True)
    assert engine.under_way == 1
    for _ in range(2):
        np.testing.assert_array_equal(read(staging.readable(0, tensor), tensor), plain(tensor))
    assert engine.under_way == 0


def test_several_copies_run_beside_each_other() -> None:
    engine = LateCopies()
    staging = Staging(lambda device: engine)
    tensors = [torch.full((3,), float(i)) for i in range(4)]
    for key, tensor in enumerate(tensors):
        staging.fetch(key, tensor, always=True)
    assert engine.under_way == 4
    for key, tensor in reversed(list(enumerate(tensors))):
        assert staging.readable(key, tensor).data.view(np.float32).tolist() == [float(key)] * 3
        tensor.zero_()


def test_buffers_are_made_once_and_again_only_for_another_size() -> None:
    engine = LateCopies()
    staging = Staging(lambda device: engine)
    for round_ in range(3):
        tensor = torch.full((2, 3), float(round_)).t()
        staging.fetch(0, tensor)
        assert staging.readable(0, tensor).data.view(np.float32).tolist() == [round_] * 6
    assert engine.allocated == 1
    for other in (torch.zeros(4, 3).t(), torch.zeros(4, 3, dtype=torch.float64).t()):
        staging.fetch(0, other)
        staging.readable(0, other)
    assert engine.allocated == 3


def test_what_was_never_fetched_cannot_be_read() -> None:
    with pytest.raises(KeyError, match="tensor 3 was not fetched"):
        Staging().readable(3, torch.zeros(2, 3).t())


def test_parameters_are_read_without_their_graph() -> None:
    parameter = torch.nn.Parameter(torch.arange(4.0).reshape(2, 2).t())
    staging = Staging()
    staging.fetch(0, parameter)
    assert staging.readable(0, parameter).data.view(np.float32).tolist() == [0.0, 2.0, 1.0, 3.0]
