"""Buckets that are summed over workers: the mean, presence, and the order of collectives."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.systems import allreduce, poseidon
from slipstream.torch.channels.buckets import make_buckets, reductions
from slipstream.torch.channels.collective_channel import CollectiveChannel
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.slots import OwnGradients
from slipstream.types import Cluster, Spec

SHAPES = {"a": (30, 40), "b": (7,), "c": (500,)}
SPECS = [Spec(name, shape, "float32", i) for i, (name, shape) in enumerate(SHAPES.items())]


class Table:
    """Where workers' n-th collectives meet; they are summed when somebody waits."""

    def __init__(self, workers: int) -> None:
        self.started: list[list[torch.Tensor]] = [[] for _ in range(workers)]
        self.summed = 0

    def place(self, rank: int) -> Any:
        def all_reduce(tensor: torch.Tensor) -> int:
            self.started[rank].append(tensor)
            return len(self.started[rank]) - 1

        return SimpleNamespace(
            device=torch.device("cpu"), all_reduce=all_reduce, wait=lambda nth: self.finish(nth)
        )

    def finish(self, nth: int) -> None:
        while self.summed <= nth:
            tensors = [started[self.summed] for started in self.started]
            total = torch.stack(tensors).sum(0)
            for tensor in tensors:
                tensor.copy_(total)
            self.summed += 1


def own_gradients(parameters: Sequence[torch.Tensor], finite: Any = None) -> Any:
    """What a channel needs of ``LiveTensors`` where gradients are exchanged in their place."""
    own = OwnGradients(parameters)
    return SimpleNamespace(contributions=own, results=own, finite=finite or FiniteGradients())


class ProcessGroup:
    """Workers with their parameters; every worker's gradients are set by the test."""

    def __init__(self, workers: int, finite: Any = "pass", **options: Any) -> None:
        strategy = allreduce(bucket_bytes=4096, **options)
        self.plan: Plan = strategy.plan(SPECS, Cluster(workers))
        self.table = Table(workers)
        self.parameters = [
            [torch.nn.Parameter(torch.zeros(spec.shape)) for spec in SPECS] for _ in range(workers)
        ]
        self.exchanges = [
            CollectiveChannel(
                self.plan,
                parameters,
                own_gradients(parameters, FiniteGradients(finite, rank)),
                self.table.place(rank),
                SimpleNamespace(round=0),
            )
            for rank, parameters in enumerate(self.parameters)
        ]

    def exchange(self) -> None:
        for exchange in self.exchanges:
            exchange.flush()
        for exchange in self.exchanges:
            exchange.wait()

    def next_step(self) -> None:
        for exchange in self.exchanges:
            exchange.step += 1


def fill(parameter: torch.Tensor, number: float) -> None:
    parameter.grad = torch.full_like(parameter, number)


@pytest.mark.parametrize("wire", ["same", "bfloat16"])
def test_everybody_ends_with_the_mean_round_after_round(wire: str) -> None:
    process_group = ProcessGroup(3, wire=wire)
    for step in range(3):
        for rank, parameters in enumerate(process_group.parameters):
            for tensor, parameter in enumerate(parameters):
                fill(parameter, rank + 10 * tensor + step)
        process_group.exchange()
        process_group.next_step()
        for parameters in process_group.parameters:
            for tensor, parameter in enumerate(parameters):
                assert parameter.grad is not None
                assert parameter.grad.dtype == torch.float32
                assert set(parameter.grad.flatten().tolist()) == {1 + 10 * tensor + step}


def test_who_has_no_gradient_counts_zero_and_what_nobody_has_stays_none() -> None:
    process_group = ProcessGroup(2)
    for parameters in process_group.parameters:
        fill(parameters[0], 100.0)  # of the step before: must not count again
    process_group.exchange()
    process_group.next_step()
    process_group.parameters[0][0].grad = None
    fill(process_group.parameters[1][0], 6.0)
    process_group.exchange()
    for parameters in process_group.parameters:
        assert parameters[0].grad is not None
        assert set(parameters[0].grad.flatten().tolist()) == {3.0}
        assert parameters[1].grad is None
        assert parameters[2].grad is None
    process_group.next_step()
    for parameters in process_group.parameters:
        parameters[0].grad = None
    process_group.exchange()
    assert all(parameters[0].grad is None for parameters in process_group.parameters), (
        "marks are fresh"
    )


def test_collectives_start_in_one_order_whatever_is_ready_first() -> None:
    process_group = ProcessGroup(2)
    for parameters in process_group.parameters:
        for parameter in parameters:
            fill(parameter, 1.0)
    for rank, order in enumerate([(2, 1, 0), (0, 1, 2)]):
        for tensor in order:
            process_group.exchanges[rank].ready(tensor)
    sizes = [[tensor.numel() for tensor in started] for started in process_group.table.started]
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == len(process_group.plan.chunks) > 1
    process_group.exchange()
    assert process_group.parameters[0][1].grad is not None
    assert set(process_group.parameters[0][1].grad.tolist()) == {1.0}


def test_turned_and_sparse_gradients_are_averaged_where_they_are() -> None:
    process_group = ProcessGroup(2)
    for rank, parameters in enumerate(process_group.parameters):
        parameters[0].grad = torch.full((40, 30), float(rank)).t()
        parameters[2].grad = torch.full((500,), float(rank)).to_sparse()
    process_group.exchange()
    for parameters in process_group.parameters:
        assert parameters[0].grad is not None
        assert parameters[2].grad is not None
        assert set(parameters[0].grad.flatten().tolist()) == {0.5}
        assert set(parameters[2].grad.to_dense().tolist()) == {0.5}


def test_a_conjugated_gradient_is_averaged_in_place() -> None:
    """Autograd leaves such gradients behind; a copy of one would take the mean and be lost."""
    plan = allreduce().plan([Spec("wave", (3, 2), "float32", 0)], Cluster(2))
    table = Table(2)
    parameters = [torch.nn.Parameter(torch.ones(3, dtype=torch.complex64)) for _ in range(2)]
    exchanges = [
        CollectiveChannel(
            plan, [p], own_gradients([p]), table.place(rank), SimpleNamespace(round=0)
        )
        for rank, p in enumerate(parameters)
    ]
    for rank, parameter in enumerate(parameters):
        (parameter.conj() * (rank + 2j)).real.sum().backward()
        assert parameter.grad is not None
        assert parameter.grad.is_conj()
    expected = torch.stack([p.grad.resolve_conj() for p in parameters if p.grad is not None])
    for exchange in exchanges:
        exchange.flush()
    for exchange, parameter in zip(exchanges, parameters, strict=True):
        exchange.wait()
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.resolve_conj(), expected.mean(0))


def test_workers_out_of_step_are_told_so() -> None:
    process_group = ProcessGroup(2)
    for parameters in process_group.parameters:
        fill(parameters[0], 1.0)
    process_group.exchanges[1].step = 1
    for exchange in process_group.exchanges:
        exchange.flush()
    with pytest.raises(RuntimeFault, match=r"different numbers of backward passes"):
        process_group.exchanges[0].wait()


def test_a_gradient_completed_twice_is_named() -> None:
    process_group = ProcessGroup(1)
    process_group.exchanges[0].ready(2)
    with pytest.raises(RuntimeFault, match="'c' was completed twice"):
        process_group.exchanges[0].ready(2)


def test_waiting_without_a_round_returns_and_bytes_follow_the_ring() -> None:
    process_group = ProcessGroup(4)
    process_group.exchanges[0].wait()
    process_group.exchange()
    model = sum(spec.nbytes for spec in SPECS)
    sent = process_group.exchanges[0].sent["dense/collective"]
    assert 2 * 3 / 4 * model <= sent <= 1.03 * 2 * 3 / 4 * model


def test_a_refused_gradient_counts_zero_and_is_nobodys_if_all_are() -> None:
    process_group = ProcessGroup(2, finite="refuse", wire="float16")
    fill(process_group.parameters[0][0], torch.nan)
    fill(process_group.parameters[1][0], 6.0)
    fill(process_group.parameters[0][1], torch.inf)
    fill(process_group.parameters[1][1], 7e4)
    with pytest.warns(UserWarning, match="the gradient of") as said:
        process_group.exchange()
    assert sorted(str(one.message).partition(" and ")[0] for one in said) == [
        "rank 0: the gradient of 'b' is not finite at step 0",
        "rank 1: the gradient of 'b' became infinite in the cast to float16 at step 0",
    ]
    for parameters in process_group.parameters:
        assert parameters[0].grad is not None
        assert set(parameters[0].grad.flatten().tolist()) == {3.0}
        assert parameters[1].grad is None


def test_a_refused_gradient_counts_zero_where_nothing_is_cast() -> None:
    process_group = ProcessGroup(2, finite="refuse")
    for tensor in (0, 1):  # the first is cut into several buckets, the second is whole
        fill(process_group.parameters[0][tensor], torch.nan)
        fill(process_group.parameters[1][tensor], 6.0)
    with pytest.warns(UserWarning, match="is not finite at step 0"):
        process_group.exchange()
    for parameters in process_group.parameters:
        for tensor in (0, 1):
            gradient = parameters[tensor].grad
            assert gradient is not None
            assert set(gradient.flatten().tolist()) == {3.0}


# ---- which chunks are summed together

LAYERS = [
    Spec(f"{i}.{kind}", shape, "float32", 2 * i + place, layer=f"{i}", form="factors")
    for i in range(6)
    for place, (kind, shape) in enumerate([("weight", (200, 250)), ("bias", (200,))])
]
NORMS = [Spec("first.norm", (200,), "float32", -1), Spec("last.norm", (200,), "float32", 12)]


def layered() -> Plan:
    """Six layers that may each be sent compact, and two tensors that never are."""
    return poseidon(rate="1gbit").plan([*LAYERS, *NORMS], Cluster(2))


def summed_together(plan: Plan, *skipped: str) -> list[list[str]]:
    buckets = make_buckets(plan, [torch.zeros(s.shape) for s in plan.specs], torch.device("cpu"))
    taken = [b for b in buckets if plan.specs[b.tensors[0]].layer not in skipped]
    found = reductions(taken, plan.strategy.rounds.chunk_bytes)
    assert [b for r in found for b in r.buckets] == taken
    return [list(dict.fromkeys(plan.specs[t].name[0] for t in r.tensors)) for r in found]


def test_small_layers_share_collectives_in_the_order_of_their_completion() -> None:
    plan = layered()
    assert len(plan.chunks) == 7
    # Both norms are one chunk, which is complete last.
    together = [sorted(names) for names in summed_together(plan)]
    assert together == [["4", "5"], ["2", "3"], ["0", "1", "f", "l"]]


def test_layers_on_another_route_leave_a_gap() -> None:
    names = [sorted(names) for names in summed_together(layered(), "5", "3", "1")]
    assert names == [["4"], ["2"], ["0", "f", "l"]]


def test_many_small_layers_are_still_several_collectives() -> None:
    specs = [
        Spec(f"{i}.weight", (128, 128), "float32", i, layer=f"{i}", form="factors")
        for i in range(72)
    ]
    plan = poseidon(rate="1gbit").plan(specs, Cluster(2))
    buckets = make_buckets(plan, [torch.zeros(s.shape) for s in plan.specs], torch.device("cpu"))
    sizes = [len(each.buckets) for each in reductions(buckets, plan.strategy.rounds.chunk_bytes)]
    assert sum(sizes) == 72
    assert len(sizes) >= 3
    assert max(sizes) <= 2 * min(sizes[:-1])


def test_what_a_round_skips_is_not_summed_and_counts_again_later() -> None:
    process_group = ProcessGroup(2)
    for skipped in ([], [2], []):
        for exchange, parameters in zip(
            process_group.exchanges, process_group.parameters, strict=True
        ):
            exchange.skip_round(skipped)
            for tensor, parameter in enumerate(parameters):
                fill(parameter, 5.0 + tensor)
            if skipped:
                fill(parameters[2], float(exchange is process_group.exchanges[0]))
        process_group.exchange()
        process_group.next_step()
        first, second = (parameters[2].grad for parameters in process_group.parameters)
        assert first is not None
        assert second is not None
        assert torch.equal(first, second) is (not skipped)
