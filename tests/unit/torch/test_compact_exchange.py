"""Two workers' exchanges in one process; the test decides when messages arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from slipstream.errors import FrameRefused, RuntimeFault, WaitLimit
from slipstream.systems import poseidon
from slipstream.torch.compact_exchange import CompactExchange
from slipstream.torch.compact_layers import CompactLayer, Ports, capture
from slipstream.torch.finite_gradients import FiniteGradients
from slipstream.torch.inventory import Inventory
from slipstream.torch.replica import compact_layers
from slipstream.transports.wire import Compact, Early, Message, Rows
from slipstream.types import Buffer, Cluster


class Post:
    """What takes the place of a member: keeps messages until they are delivered."""

    def __init__(self, rank: int) -> None:
        self.name = f"rank {rank}"
        self.round = 0
        self.changed = threading.Condition()
        self.handlers: dict[type[Any], Callable[[Message], None]] = {}
        self.sent: list[tuple[str, Message]] = []

    def on(self, kind: type[Any], handler: Callable[[Message], None]) -> None:
        self.handlers[kind] = handler

    def send(self, peer: str, body: Any, frames: Any = (), *, priority: int = 0) -> None:
        self.sent.append((peer, Message(self.name, body, frames)))

    def take(self, message: Message) -> None:
        self.handlers[type(message.body)](message)

    def wait_until(self, holds: Callable[[], bool], **told: Any) -> None:
        if not holds():
            raise WaitLimit(told["what"], 0.0, told["missing"]())


class Worker:
    def __init__(self, rank: int, nonfinite: Any = "pass") -> None:
        torch.manual_seed(3)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))
        inventory = Inventory.of(self.model)
        strategy = poseidon(choose="bytes")
        plan = strategy.plan(inventory.specs, Cluster(2, 1))
        assert plan.hybrid is not None
        self.post = Post(rank)
        self.dense: list[set[int]] = []
        self.exchange = CompactExchange(
            rank,
            plan,
            compact_layers(self.model, plan, inventory),
            plan.hybrid,
            None,
            inventory.tensors,
            [self],  # type: ignore[list-item]
            self.post,  # type: ignore[arg-type]
            limit_s=1,
            finite=FiniteGradients(nonfinite, rank),
        )
        ports = Ports(
            self.exchange.entered, self.exchange.takes, self.exchange.captured, self._settled
        )
        self.end = capture(self.exchange.layers, ports)

    def excuse(self, tensors: set[int]) -> None:
        self.dense.append(tensors)

    def _settled(self, layer: CompactLayer) -> None:
        if layer.settle():
            self.exchange.settled(layer)

    def backward(self, rows: int = 1) -> None:
        data = torch.arange(8.0 * rows).view(rows, 8) / 50
        self.model(data).sum().backward()

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]


@pytest.fixture
def workers() -> list[Worker]:
    return [Worker(0), Worker(1)]


def deliver(workers: list[Worker]) -> None:
    for worker in workers:
        sent, worker.post.sent = worker.post.sent, []
        for peer, message in sent:
            workers[int(peer.removeprefix("rank "))].post.take(message)


def step(workers: list[Worker], number: int, rows: int = 1) -> None:
    for worker in workers:
        worker.exchange.step = number
        worker.model.zero_grad()
        worker.backward(rows)
        worker.exchange.flush()
        deliver(workers)
    for worker in workers:
        worker.exchange.wait()


def test_same_gradients_on_both(workers: list[Worker]) -> None:
    for number in range(3):
        step(workers, number)
        first, second = (worker.gradients for worker in workers)
        assert len(first) == 3
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_choice_follows_rank_0_one_step_later(workers: list[Worker]) -> None:
    for number, (rows, compact) in enumerate([(1, True), (40, True), (1, False), (1, True)]):
        step(workers, number, rows)
        for worker in workers:
            assert [verdict.compact for verdict in worker.exchange.verdicts] == [compact] * 2
    assert workers[1].dense == [{0, 1, 2}, set(), {0, 1, 2}]


@pytest.mark.parametrize("back_to", [0, 3, 4])
def test_steps_may_go_back(workers: list[Worker], back_to: int) -> None:
    for number in [*range(5), *range(back_to, 8)]:
        step(workers, number)


def test_nobody_decides_without_rank_0(workers: list[Worker]) -> None:
    with pytest.raises(WaitLimit, match="rank 0"):
        workers[1].exchange.takes(workers[1].exchange.layers[0])


def test_rows_are_for_rank_0_to_say_and_once(workers: list[Worker]) -> None:
    take = workers[1].post.take
    for sender, rows in (("rank 1", [1, 1]), ("server 0", [1, 1]), ("rank 0", [1])):
        with pytest.raises(FrameRefused, match="for rank 0 to say"):
            take(Message(sender, Rows(0, rows)))
    take(Message("rank 0", Rows(0, [1, 1])))
    with pytest.raises(FrameRefused, match="out of turn"):
        take(Message("rank 0", Rows(0, [2, 2])))
    take(Message("rank 0", Rows(1, [1, 1])))
    for number in range(2, 100):
        with pytest.raises(FrameRefused, match="out of turn"):
            take(Message("rank 0", Rows(number, [1, 1])))


def test_contributions_that_are_refused_change_nothing(workers: list[Worker]) -> None:
    for worker in workers:
        worker.exchange.layers[1].calls = 1  # its X does not leave early in the next step
    step(workers, 0)
    workers[0].exchange.step = 1
    workers[0].backward()
    (good,) = (m for _, m in workers[0].post.sent if isinstance(m.body, Compact) and m.body.layer)
    body, frames = good.body, good.frames
    assert isinstance(body, Compact)

    def changed(**fields: Any) -> Compact:
        values = {name: getattr(body, name) for name in body.__struct_fields__}
        return Compact(**{**values, **fields})

    wrong: list[tuple[str, str, Compact, Any]] = [
        ("other workers", "rank 1", body, frames),
        ("other workers", "rank 2", body, frames),
        ("other workers", "server 0", body, frames),
        ("no layer 9", "rank 0", changed(layer=9), frames),
        ("round 0 while", "rank 0", changed(round=0), frames),
        ("round 3 while", "rank 0", changed(round=3), frames),
        ("bytes where", "rank 0", changed(rows=2), frames),
        ("a matrix of", "rank 0", changed(dtypes=("float32", "uint8")), frames),
        ("checksum", "rank 0", changed(crc=body.crc ^ 1), frames),
        ("not used", "rank 0", changed(present=False), frames),
    ]
    for reason, sender, forged, content in wrong:
        content_now: list[Buffer] = list(content)
        with pytest.raises(FrameRefused, match=reason):
            workers[1].post.take(Message(sender, forged, content_now))
    workers[1].post.take(good)
    with pytest.raises(FrameRefused, match="twice"):
        workers[1].post.take(good)


def test_workers_out_of_step_are_told(workers: list[Worker]) -> None:
    first, second = workers
    first.backward()
    first.exchange.flush()
    deliver(workers)
    second.exchange.step = 1
    second.post.take(Message("rank 0", Rows(1, [1, 1])))
    second.backward()
    second.exchange.flush()
    deliver(workers)
    with pytest.raises(RuntimeFault, match="rank 0 at step 0, rank 1 at step 1"):
        first.exchange.wait()


def test_a_weight_used_without_its_layer_is_told(workers: list[Worker]) -> None:
    worker = workers[0]
    weight = worker.exchange._layer_of[0].weight
    worker.model(torch.ones(1, 8)).sum().backward()
    assert worker.exchange.has(weight)
    worker.exchange.flush()
    deliver(workers)
    worker.model[0].weight.pow(2).sum().backward()
    with pytest.raises(RuntimeFault, match=r"name it in poseidon\(dense"):
        worker.exchange.has(weight)


def test_a_dense_gradient_that_comes_first_waits_for_the_choice(workers: list[Worker]) -> None:
    """Otherwise it would leave on last step's terms."""
    workers[0].model(torch.ones(1, 8))
    not_a_layers_tensor = 99
    assert not workers[0].exchange.has(not_a_layers_tensor)
    assert workers[0].dense == [{0, 1, 2}]


# ---- inputs that leave in the forward pass


def sent_early(worker: Worker) -> list[tuple[int, int]]:
    """Layer and round of what waits to be delivered."""
    bodies = [message.body for _, message in worker.post.sent]
    return [(body.layer, body.round) for body in bodies if isinstance(body, Early)]


def contributions(worker: Worker) -> dict[int, Message]:
    messages = [message for _, message in worker.post.sent]
    return {m.body.layer: m for m in messages if isinstance(m.body, Compact)}


def plain_gradients(worker: Worker, *batches: torch.Tensor) -> list[torch.Tensor]:
    """Of the mean over two workers who had these batches."""
    alone = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))
    alone.load_state_dict(worker.model.state_dict())
    for batch in batches:
        (alone(batch).sum() / 2).backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


def begin(workers: list[Worker], number: int) -> None:
    for worker in workers:
        worker.exchange.step = number
        worker.model.zero_grad()


def finish(workers: list[Worker]) -> None:
    for worker in workers:
        worker.exchange.flush()
        deliver(workers)
    for worker in workers:
        worker.exchange.wait()
        assert not any(worker.exchange._early), "what has served, or did not hold, is forgotten"


def assert_gradients(workers: list[Worker], *batches: torch.Tensor) -> None:
    for worker in workers:
        for got, wanted in zip(worker.gradients, plain_gradients(worker, *batches), strict=True):
            torch.testing.assert_close(got, wanted)


def test_inputs_leave_in_the_forward_pass_from_the_second_step_on(workers: list[Worker]) -> None:
    data = [torch.randn(2, 8), torch.randn(3, 8)]
    for number in range(3):
        begin(workers, number)
        outputs = [w.model(batch) for w, batch in zip(workers, data, strict=True)]
        wanted = [(0, number), (1, number)] if number else []
        assert [sent_early(worker) for worker in workers] == [wanted, wanted]
        deliver(workers)
        for worker, output in zip(workers, outputs, strict=True):
            output.sum().backward()
            for message in contributions(worker).values():
                assert isinstance(message.body, Compact)
                assert message.body.early == bool(number)
                assert len(message.frames) == (1 if number else 2)
            deliver(workers)
        finish(workers)
        assert_gradients(workers, *data)


def test_inputs_of_a_pass_that_was_thrown_away_do_not_count(workers: list[Worker]) -> None:
    data = [torch.randn(2, 8), torch.randn(2, 8)]
    for number in range(6):
        begin(workers, number)
        for worker, batch in zip(workers, data, strict=True):
            if number == 2:
                worker.model(torch.randn(2, 8))
            output = worker.model(batch)
            early = [(0, number), (1, number)]
            # One a round; none after a step with two passes, nor when rows were fewer again.
            assert sent_early(worker) == ([] if number in (0, 3, 4) else early)
            output.sum().backward()
            said = [message.body for message in contributions(worker).values()]
            assert [b.early for b in said if isinstance(b, Compact)] == [number in (1, 5)] * 2
            deliver(workers)
        finish(workers)
        assert_gradients(workers, *data)


def test_inputs_of_a_graph_that_is_kept_hold_for_its_own_round_only(workers: list[Worker]) -> None:
    step(workers, 0)
    step(workers, 1)
    data = torch.randn(1, 8)
    begin(workers, 2)
    kept = [worker.model(data).sum() for worker in workers]
    for number, expected in ((2, True), (3, False)):
        for worker, loss in zip(workers, kept, strict=True):
            worker.exchange.step = number
            worker.model.zero_grad()
            loss.backward(retain_graph=True)
            said = [message.body for message in contributions(worker).values()]
            assert [b.early for b in said if isinstance(b, Compact)] == [expected] * 2
            deliver(workers)
        finish(workers)
        assert_gradients(workers, data, data)


def test_inputs_stay_while_the_choice_may_change(workers: list[Worker]) -> None:
    step(workers, 0, rows=1)
    step(workers, 1, rows=40)  # chosen for 1 row: compact; for the next step it will be dense
    begin(workers, 2)
    for worker in workers:
        worker.model(torch.randn(1, 8))
        assert sent_early(worker) == []


def test_early_inputs_that_are_refused_change_nothing(workers: list[Worker]) -> None:
    step(workers, 0)
    begin(workers, 1)
    output = workers[0].model(torch.randn(2, 8))
    good = next(message for _, message in workers[0].post.sent)
    body = good.body
    assert isinstance(body, Early)

    def changed(**fields: Any) -> Early:
        values = {name: getattr(body, name) for name in body.__struct_fields__}
        return Early(**{**values, **fields})

    wrong: list[tuple[str, str, Early, Any]] = [
        ("other workers", "rank 1", body, good.frames),
        ("other workers", "server 0", body, good.frames),
        ("no layer 9", "rank 0", changed(layer=9), good.frames),
        ("round 0 while", "rank 0", changed(round=0), good.frames),
        ("round 3 while", "rank 0", changed(round=3), good.frames),
        ("bytes where", "rank 0", changed(rows=3), good.frames),
        ("bytes where", "rank 0", changed(rows=2**61), good.frames),
        ("as inputs", "rank 0", changed(rows=0), good.frames),
        ("as inputs", "rank 0", changed(dtype="int64"), good.frames),
        ("checksum", "rank 0", changed(crc=body.crc ^ 1), good.frames),
    ]
    for reason, sender, forged, frames in wrong:
        with pytest.raises(FrameRefused, match=reason):
            workers[1].post.take(Message(sender, forged, frames))
    output.sum().backward()
    for said in contributions(workers[0]).values():
        with pytest.raises(FrameRefused, match="never sent"):
            workers[1].post.take(said)
    workers[1].post.take(good)
    with pytest.raises(FrameRefused, match="twice"):
        workers[1].post.take(good)
    workers[1].post.take(contributions(workers[0])[body.layer])


@pytest.mark.parametrize("scale", [torch.nan, 1e38])
def test_refused_factors_count_as_a_layer_that_was_not_used(scale: float) -> None:
    """Also where only their product is infinite, and where X has left in the forward pass."""
    workers = [Worker(rank, "refuse") for rank in (0, 1)]
    step(workers, 0)
    layer = workers[1].model[2]
    weight = layer.weight.detach().clone()
    for worker in workers:
        worker.exchange.step = 1
        worker.model.zero_grad()
    workers[0].backward()
    workers[0].exchange.flush()
    deliver(workers)
    data = torch.arange(8.0).view(1, 8)
    out = workers[1].model[2](10 * torch.tanh(workers[1].model[0](data)).detach())
    loss = (out * scale).sum()
    with pytest.warns(UserWarning, match="rank 1: the gradient of '2.weight' is not finite"):
        loss.backward()
    workers[1].exchange.flush()
    deliver(workers)
    for worker in workers:
        worker.exchange.wait()
    first, second = (worker.gradients for worker in workers)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(gradient.isfinite().all() for gradient in first)
    assert torch.equal(weight, layer.weight)
