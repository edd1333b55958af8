"""Live tensors behind a plan: what is contributed, and where results go."""

import numpy as np
import pytest
import torch
from samples import make_plan, vector

from slipstream.codecs import Dense, Factors, SegmentCodec
from slipstream.errors import RuntimeFault
from slipstream.methods import Rounds
from slipstream.routes import Everywhere, Route
from slipstream.strategy import Strategy
from slipstream.topologies import Sharded
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.slots import LiveTensors
from slipstream.torch.tensors.staging import Staging
from slipstream.types import Cluster, Spec, Values


def slots(
    *tensors: torch.Tensor,
    at_holder: bool = False,
    buffers: tuple[int, ...] = (),
    codec: SegmentCodec | None = None,
    finite: FiniteGradients | None = None,
) -> LiveTensors:
    specs = [
        vector(f"t{i}", t.numel(), order=i, role="buffer" if i in buffers else "parameter")
        for i, t in enumerate(tensors)
    ]
    owner = torch.nn.Module()
    for i in buffers:
        owner.register_buffer(f"t{i}", tensors[i])
    places = tuple((owner, f"t{i}") if i in buffers else None for i in range(len(tensors)))
    inventory = Inventory(tuple(specs), tensors, places)
    plan = make_plan(specs, at_holder=at_holder, codec=codec)
    return LiveTensors(plan, inventory, Staging(), finite)


def numbers(values: Values | None) -> list[float]:
    assert values is not None
    result: list[float] = values.data.view(np.float32).tolist()
    return result


def with_gradient(*numbers: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.zeros(len(numbers)))
    parameter.grad = torch.tensor(numbers, dtype=torch.float32)
    return parameter


def test_a_parameter_contributes_its_gradient_and_receives_the_mean() -> None:
    parameter = with_gradient(1, 2)
    live = slots(parameter)
    assert numbers(live.source(0)) == [1, 2]
    live.sink(0).data.view(np.float32)[:] = [5, 6]
    live.finish(0)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [5, 6]
    assert parameter.tolist() == [0, 0]


def test_no_gradient_is_no_contribution_but_a_mean_of_others_is_taken() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    live = slots(parameter)
    assert live.source(0) is None
    live.sink(0).data.view(np.float32)[:] = [3, 4]
    live.finish(0)
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3, 4]
    assert not parameter.grad.requires_grad


def test_a_gradient_fetched_late_is_read_as_it_then_is() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    live = slots(parameter)
    assert live.source(0) is None
    parameter.grad = torch.tensor([7.0])
    assert numbers(live.source(0)) == [7]


def test_a_sparse_gradient_travels_dense_and_comes_back_dense() -> None:
    embedding = torch.nn.Embedding(3, 1, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    live = slots(embedding.weight)
    live.fetch(0)
    assert numbers(live.source(0)) == [0, 2, 0]
    live.sink(0).data.view(np.float32)[:] = [4, 5, 6]
    live.finish(0)
    assert embedding.weight.grad is not None
    assert embedding.weight.grad.tolist() == [[4], [5], [6]]


def test_a_turned_gradient_and_result_keep_their_places() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3).t())
    parameter.grad = torch.arange(6.0).reshape(2, 3).t()
    live = slots(parameter)
    live.fetch(0)
    assert numbers(live.source(0)) == [0, 3, 1, 4, 2, 5]
    live.sink(0).data.view(np.float32)[:] = [0, 1, 2, 3, 4, 5]
    live.finish(0)
    assert parameter.grad.tolist() == [[0, 1], [2, 3], [4, 5]]


def test_a_conjugated_gradient_is_averaged_in_place() -> None:
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    (parameter.conj() * torch.tensor([1 + 2j, 3 + 4j])).real.sum().backward()
    assert parameter.grad is not None
    assert parameter.grad.is_conj(), "autograd leaves it turned"
    live = slots(parameter)
    live.fetch(0)
    before = torch.view_as_real(parameter.grad.resolve_conj()).reshape(-1).tolist()
    assert numbers(live.source(0)) == before
    live.sink(0).data.view(np.float32)[:] = [9, 8, 7, 6]
    live.finish(0)
    assert parameter.grad.tolist() == [9 + 8j, 7 + 6j]


def test_where_servers_update_gradients_are_copied_and_weights_come_back() -> None:
    parameter = with_gradient(1, 2)
    live = slots(parameter, at_holder=True)
    live.fetch(0)
    first = live.source(0)
    assert parameter.grad is not None
    parameter.grad.zero_()  # zero_grad(set_to_none=False), while the copy waits to leave
    assert numbers(first) == [1, 2]
    assert numbers(live.source(0)) == [1, 2], "read again for the next chunk"
    live.sink(0).data.view(np.float32)[:] = [5, 6]
    live.finish(0)
    assert parameter.tolist() == [5, 6]
    assert parameter.grad.tolist() == [0, 0]


def test_a_new_round_reads_afresh() -> None:
    parameter = with_gradient(1)
    live = slots(parameter, at_holder=True)
    live.fetch(0)
    assert numbers(live.source(0)) == [1]
    live.forget()
    parameter.grad = torch.tensor([8.0])
    live.fetch(0)
    assert numbers(live.source(0)) == [8]
    live.forget()
    parameter.grad = None
    assert live.source(0) is None


@pytest.mark.parametrize("at_holder", [False, True])
def test_a_buffer_contributes_only_when_it_changed(at_holder: bool) -> None:
    buffer = torch.tensor([1.0, 2.0])
    live = slots(buffer, buffers=(0,), at_holder=at_holder)
    assert live.source(0) is None
    buffer[0] = 5
    live.forget()
    assert numbers(live.source(0)) == [5, 2]
    live.sink(0).data.view(np.float32)[:] = [3, 3]
    live.finish(0)
    live.forget()
    assert buffer.tolist() == [3, 3]
    assert live.source(0) is None, "the mean is what is known now"


def test_result_of_factors_is_added_to_gradients_of_earlier_passes() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    parameter.grad = torch.ones(4, 3)
    spec = Spec("fc.weight", (4, 3), "float32", 0, layer="fc", form="factors")
    route = Route(Sharded(whole_layers=True), up=Factors())
    plan = Strategy("factors", Rounds(Everywhere(route))).plan([spec], Cluster(2, 1))
    live = LiveTensors(plan, Inventory((spec,), (parameter,), (None,)), Staging())
    live.sink(0).data.view(np.float32)[:] = 5
    live.finish(0)
    assert parameter.grad.unique().tolist() == [6]


def test_a_buffer_that_became_not_a_number_still_travels() -> None:
    buffer = torch.tensor([1.0])
    live = slots(buffer, buffers=(0,))
    buffer[0] = torch.nan
    assert live.source(0) is not None


def test_a_buffer_that_the_module_replaced_is_the_one_exchanged() -> None:
    model = torch.nn.Module()
    model.register_buffer("ema", torch.zeros(2))
    inventory = Inventory.of(model)
    live = LiveTensors(make_plan(inventory.specs), inventory, Staging())
    model.ema = torch.tensor([1.0, 2.0])
    assert numbers(live.source(0)) == [1, 2]
    live.sink(0).data.view(np.float32)[:] = [5, 6]
    live.finish(0)
    assert model.ema.tolist() == [5, 6]
    model.ema = torch.zeros(3)
    with pytest.raises(RuntimeFault, match=r"'ema' was \(2,\) .* and is \(3,\)"):
        live.fetch(0)


# ---- gradients that are not finite


def refusing(
    *tensors: torch.Tensor, buffers: tuple[int, ...] = (), codec: SegmentCodec | None = None
) -> LiveTensors:
    return slots(*tensors, buffers=buffers, codec=codec, finite=FiniteGradients("refuse"))


def test_a_refused_gradient_is_no_contribution_of_this_round_alone() -> None:
    parameter = with_gradient(1, torch.nan)
    live = refusing(parameter)
    with pytest.warns(UserWarning, match="'t0' is not finite"):
        assert live.source(0) is None
    assert live.source(0) is None  # of its next segment
    assert parameter.grad is None
    live.forget()
    parameter.grad = torch.tensor([3.0, 4.0])
    assert numbers(live.source(0)) == [3, 4]


def test_a_gradient_too_large_for_its_wire_is_refused() -> None:
    live = refusing(with_gradient(1, -7e4), codec=Dense("float16"))
    with pytest.warns(UserWarning, match="'t0' became infinite in the cast to float16"):
        assert live.source(0) is None


def test_a_buffer_that_becomes_infinite_goes_back_to_what_it_was() -> None:
    statistics, bound = torch.tensor([1.0]), torch.tensor([torch.inf, 0.0])
    live = refusing(statistics, bound, buffers=(0, 1))
    statistics.fill_(torch.nan)
    bound[1] = 5.0
    assert live.source(0) is None
    assert statistics.tolist() == [1]
    assert numbers(live.source(1)) == [torch.inf, 5]  # never was finite: meant so
