"""Any gradient in compact form, and which gradients are this worker's own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from slipstream.torch.capture.assigned_gradients import AssignedGradients, as_factors_with_bias
from slipstream.torch.tensors.compact_layers import CompactLayer


def layer_of(module: nn.Module) -> tuple[CompactLayer, list[Tensor]]:
    parameters = list(module.parameters())
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    form = "rows" if isinstance(module, nn.Embedding) else "factors"
    return CompactLayer.of("layer", module, form, places), parameters


def assign(parameters: list[Tensor], scale: float = 1.0) -> list[Tensor]:
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * scale
    return [parameter.grad.clone() for parameter in parameters if parameter.grad is not None]


@pytest.mark.parametrize("of_bias", [0.0, 1e-30, 1e-9, 1.0, 1e6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 7), (7, 3), (5, 5), (1, 4)], ids=str)
def test_factors_with_bias_are_exact(
    shape: tuple[int, int], dtype: torch.dtype, of_bias: float
) -> None:
    torch.manual_seed(0)
    gradient, bias = torch.randn(shape).to(dtype), (torch.randn(shape[0]) * of_bias).to(dtype)
    bias[0] = 0
    found = as_factors_with_bias(gradient, bias, coarse=False)
    assert len(found.first) == len(found.second) == min(shape) + 1
    product = found.second.double().t() @ found.first.double()
    assert torch.equal(product, gradient.double())
    total = found.second.to(torch.promote_types(dtype, torch.float32)).sum(0)
    tolerance = 2 * torch.finfo(dtype).eps
    assert torch.allclose(total.double(), bias.double(), rtol=tolerance, atol=1e-15)


def test_factors_with_bias_of_few_bits_have_one_magnitude() -> None:
    """Blocks of values share a scale: a large value beside small ones would swallow them."""
    found = as_factors_with_bias(torch.randn(6, 8), torch.randn(6), coarse=True)
    sizes = found.second.abs()
    assert sizes[sizes > 0].max() / torch.diagonal(sizes).min() < 16


@pytest.mark.parametrize("module", [nn.Linear(4, 6), nn.Linear(6, 4, bias=False)], ids=str)
def test_assigned_gradient_of_a_layer_is_taken_once(module: nn.Module) -> None:
    layer, parameters = layer_of(module.double())
    wanted = assign(parameters)
    assigned = AssignedGradients(parameters, replaced=True)
    found = assigned.take(layer, coarse=False)
    assert found is not None
    assert torch.equal(found.second.t() @ found.first, wanted[0])
    assert all(parameter.grad is None for parameter in parameters)
    assert assigned.take(layer, coarse=False) is None


@pytest.mark.parametrize("sparse", [True, False])
def test_assigned_gradient_of_a_table_is_its_used_rows(sparse: bool) -> None:
    layer, (table,) = layer_of(nn.Embedding(6, 3))
    gradient = torch.zeros(6, 3)
    gradient[[1, 4]] = torch.randn(2, 3)
    table.grad = gradient.to_sparse(1) if sparse else gradient.clone()
    found = AssignedGradients([table], replaced=True).take(layer, coarse=False)
    assert found is not None
    assert found.first.tolist() == [1, 4]
    assert torch.equal(found.second, gradient[[1, 4]])


def test_result_of_an_exchange_is_not_assigned_until_it_is_changed() -> None:
    layer, parameters = layer_of(nn.Linear(4, 6))
    assigned = AssignedGradients(parameters, replaced=True)
    assign(parameters)
    assigned.delivered([layer])
    assert assigned.take(layer, coarse=False) is None
    assert parameters[0].grad is not None
    parameters[0].grad.mul_(0.5)
    assert assigned.take(layer, coarse=False) is not None
    assert parameters[1].grad is not None, "the bias's is still the result"


def test_another_tensor_in_the_place_of_a_result_is_assigned() -> None:
    """Also where Python gives it the number of the one that is gone."""
    layer, parameters = layer_of(nn.Linear(4, 6, bias=False))
    assigned = AssignedGradients(parameters, replaced=True)
    for _ in range(20):
        parameters[0].grad = torch.randn(6, 4)
        assigned.delivered([layer])
        parameters[0].grad = None
        parameters[0].grad = torch.randn(6, 4)
        assert assigned.take(layer, coarse=False) is not None


def test_gradient_set_to_zero_is_nothing_and_stays() -> None:
    layer, parameters = layer_of(nn.Linear(4, 6))
    assign(parameters, scale=0.0)
    assert AssignedGradients(parameters, replaced=True).take(layer, coarse=False) is None
    assert all(parameter.grad is not None for parameter in parameters)


def test_gradient_that_no_result_replaces_stays() -> None:
    """Where servers update, ``.grad`` is the loop's."""
    layer, parameters = layer_of(nn.Linear(4, 6))
    assign(parameters)
    assigned = AssignedGradients(parameters, replaced=False)
    assert assigned.take(layer, coarse=False) is not None
    assigned.delivered([layer])
    assert assigned.take(layer, coarse=False) is not None
    assert all(parameter.grad is not None for parameter in parameters)


def test_frozen_parameter_has_no_assigned_gradient() -> None:
    layer, parameters = layer_of(nn.Linear(4, 6))
    assign(parameters)
    for parameter in parameters:
        parameter.requires_grad_(False)
    assert AssignedGradients(parameters, replaced=True).take(layer, coarse=False) is None


def test_layer_whose_gradient_is_assigned_expects_the_rows_of_a_dense_one() -> None:
    layer, _ = layer_of(nn.Linear(4, 6))
    layer.rows = 2
    assert layer.expected_rows == 2
    layer.assigned = True
    assert layer.expected_rows == 5
    layer.finish()  # a backward pass
    assert layer.expected_rows == 2
