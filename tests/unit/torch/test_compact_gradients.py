"""Layers that travel in compact form, between two workers and a server of one thread; the test
decides when messages arrive."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import torch
from torch import nn

from slipstream.errors import FrameRefused, RuntimeFault, WaitLimit
from slipstream.plan import Plan
from slipstream.runtime.exchange.choices import PERIOD, LayerChoices
from slipstream.runtime.exchange.collector import Collector
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.systems import adam_factors, poseidon
from slipstream.testing.cluster import Stage
from slipstream.torch.capture.assigned_gradients import AssignedGradients
from slipstream.torch.capture.compact_gradients import CompactGradients
from slipstream.torch.modes.pair_setup import compact_layers
from slipstream.torch.tensors.compact_layers import CompactLayer, Ports, capture
from slipstream.torch.tensors.finite_gradients import FiniteGradients
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.layer_math import TorchLayerMath
from slipstream.torch.tensors.slots import LiveTensors
from slipstream.torch.tensors.staging import Staging
from slipstream.transports.wire import Early, Push, Rows, checksum, decode_header
from slipstream.types import Buffer, Cluster


def network() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False))


def plan_of(model: nn.Module, system: Any = None) -> Plan:
    strategy = system or poseidon(choose="bytes")
    return strategy.plan(Inventory.of(model).specs, Cluster(2, 1))


class Skips:
    """A channel of which only this is asked."""

    def __init__(self) -> None:
        self.skipped: list[set[int]] = []

    def skip_round(self, tensors: set[int]) -> None:
        self.skipped.append(tensors)


class Worker:
    """Everything that ``replicate`` wires together, but for the hooks that end a pass."""

    def __init__(self, rank: int, stage: Stage, nonfinite: Any) -> None:
        self.rank, self.stage, self.model = rank, stage, network()
        plan, inventory = stage.plan, Inventory.of(self.model)
        self.member = stage.members[f"rank {rank}"]
        self.finite = FiniteGradients(nonfinite, rank)
        self.slots = LiveTensors(plan, inventory, Staging(), self.finite)
        math = TorchLayerMath(inventory.tensors, {})
        self.channel = RoundChannel(rank, plan, self.member, self.slots, math=math, limit_s=0.0)
        self.layers = compact_layers(self.model, plan, inventory)
        self.other = Skips()
        self.choices = self._choices(plan)
        self.compact = CompactGradients(
            plan,
            self.layers,
            self.channel,
            self.choices,
            inventory.tensors,
            self.finite,
            AssignedGradients(inventory.tensors, replaced=True),
        )
        ports = Ports(
            self.compact.may_take,
            self.compact.entered,
            self.compact.takes,
            self.compact.captured,
            self._finished,
        )
        self.end = capture(self.layers, ports)
        self._seen = 0

    def _choices(self, plan: Plan) -> LayerChoices | None:
        if plan.chooser is None:
            return None
        channels: Any = [self.channel, self.other]
        return LayerChoices(
            plan,
            plan.chooser,
            self.channel,
            channels,
            self.member,
            lambda: [layer.rows for layer in self.layers],
            limit_s=0.0,
        )

    def _finished(self, layer: CompactLayer) -> None:
        if layer.finish():
            self.compact.finished(layer)

    def begin(self, step: int) -> None:
        self.compact.begin_step()
        self.channel.step = self.finite.step = step
        self.model.zero_grad()
        self._seen = len(self.stage.trace)

    def backward(self, rows: int = 1) -> None:
        data = torch.arange(8.0 * rows).view(rows, 8) / 50
        self.model(data).sum().backward()

    def flush(self) -> None:
        self.compact.flush()
        self.channel.flush()
        self.slots.forget()
        self.member.take(0)

    @property
    def gradients(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def sent(self, kind: type[Any]) -> list[Any]:
        """Bodies of this kind that have left in this step, to whomever, each once."""
        bodies: list[Any] = []
        for event in self.stage.trace[self._seen :]:
            mine = event.kind == "sent" and event.source == self.member.name
            if mine and isinstance(event.body, kind) and event.body not in bodies:
                bodies.append(event.body)
        return bodies

    def sent_early(self) -> list[tuple[int, int]]:
        """Place and round of inputs that have left."""
        places = [layer.unit for layer in self.layers]
        return [(places.index(body.unit), body.round) for body in self.sent(Early)]

    def contributions(self) -> list[Push]:
        """Of layers in compact form."""
        units = {layer.unit for layer in self.layers}
        return [body for body in self.sent(Push) if body.unit in units]


def make_workers(nonfinite: Any = "pass", system: Any = None) -> list[Worker]:
    stage = Stage(plan_of(network(), system), 0, None)
    return [Worker(rank, stage, nonfinite) for rank in (0, 1)]


@pytest.fixture
def workers() -> list[Worker]:
    return make_workers()


def deliver(workers: list[Worker]) -> None:
    for worker in workers:
        worker.member.take(0)
    workers[0].stage.drain()


def begin(workers: list[Worker], number: int) -> None:
    for worker in workers:
        worker.begin(number)


def finish(workers: list[Worker]) -> None:
    for worker in workers:
        worker.flush()
    deliver(workers)
    for worker in workers:
        worker.channel.wait()
        held = worker.channel._collector._held.values()
        assert not any(each.early for each in held), "what served, or did not hold, is forgotten"


def step(workers: list[Worker], number: int, rows: int = 1) -> None:
    begin(workers, number)
    for worker in workers:
        worker.backward(rows)
        deliver(workers)
    finish(workers)


def plain_gradients(worker: Worker, *batches: torch.Tensor) -> list[torch.Tensor]:
    """Of the mean over two workers who had these batches."""
    alone = network()
    alone.load_state_dict(worker.model.state_dict())
    for batch in batches:
        (alone(batch).sum() / 2).backward()
    return [p.grad for p in alone.parameters() if p.grad is not None]


def assert_gradients(workers: list[Worker], *batches: torch.Tensor) -> None:
    for worker in workers:
        for got, wanted in zip(worker.gradients, plain_gradients(worker, *batches), strict=True):
            torch.testing.assert_close(got, wanted)


def under_way(workers: list[Worker], source: str, peer: str) -> list[tuple[Any, list[Buffer]]]:
    """Bodies and frames on a link, as they would be read if they left now."""
    waiting = sorted(workers[0].stage._network._links[source, peer])
    return [(decode_header(each.header).body, list(each.frames)) for each in waiting]


def test_same_gradients_on_both(workers: list[Worker]) -> None:
    for number in range(3):
        step(workers, number)
        first, second = (worker.gradients for worker in workers)
        assert len(first) == 3
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# ---- the choice


def test_choice_follows_rank_0s_median_batch_of_a_period(workers: list[Worker]) -> None:
    """A short last batch changes nothing, and neither do larger ones in less than half a period."""
    few = PERIOD // 2
    first = [40] * (PERIOD - 1) + [1]
    second = [1] * few + [40] * few
    third = [40] * few + [1] * (few - 1) + [40]
    wanted = [False] * 2 * PERIOD + [True] * PERIOD + [False]
    batches = [*first, *second, *third, 40]
    for number, (rows, compact) in enumerate(zip(batches, wanted, strict=True)):
        step(workers, number, rows)
        for worker in workers:
            assert worker.choices is not None
            assert [verdict.compact for verdict in worker.choices.verdicts] == [compact] * 2
            assert len(worker.contributions()) == (2 if compact else 0)
        data = torch.arange(8.0 * rows).view(rows, 8) / 50
        assert_gradients(workers, data, data)
    assert workers[1].other.skipped == [set(), {0, 1, 2}, set()]


def test_rank_0_says_its_rows_once_a_period(workers: list[Worker]) -> None:
    for number in range(2 * PERIOD + 1):
        step(workers, number)
        said = [body.choice for body in workers[0].sent(Rows)]
        assert said == ([0] if not number else [number // PERIOD + 1] * (number % PERIOD == 7))


def test_forward_is_plain_torch_where_the_dense_route_is_chosen(workers: list[Worker]) -> None:
    batch = torch.ones(40, 8)
    plain = []
    for number, rows in enumerate([40, *[1] * PERIOD]):
        begin(workers, number)
        for worker in workers:
            made = worker.model[0](batch[:rows])
            plain.append("AddmmBackward" in type(made.grad_fn).__name__)
            worker.layers[0].reset()
            worker.backward(rows)
            deliver(workers)
        finish(workers)
        data = torch.arange(8.0 * rows).view(rows, 8) / 50
        assert_gradients(workers, data, data)
    # In the first step nothing is known; what changed in the second is decided after a period.
    assert plain == [False] * 2 + [True] * 2 * (PERIOD - 1) + [False] * 2


@pytest.mark.parametrize("back_to", [0, 3, PERIOD - 1])
def test_steps_may_go_back(workers: list[Worker], back_to: int) -> None:
    for number in [*range(PERIOD), *range(back_to, 2 * PERIOD)]:
        step(workers, number)


def test_nobody_decides_without_rank_0(workers: list[Worker]) -> None:
    with pytest.raises(WaitLimit, match="rank 0"):
        workers[1].compact.takes(workers[1].layers[0])


def refused(workers: list[Worker], sender: str, body: Any) -> str:
    """What rank 1 says of a message that it refuses."""
    member, stage = workers[1].member, workers[0].stage
    before = member.refused
    if sender == member.name:
        member.send(member.name, body)
        member.take(0)
    else:
        stage.members[sender].send(member.name, body)
        stage.drain()
    return member.last_refusal if member.refused > before else ""


def test_rows_are_for_rank_0_to_say_and_once(workers: list[Worker]) -> None:
    for sender, rows in (("rank 1", [1, 1]), ("server 0", [1, 1]), ("rank 0", [1])):
        assert "expected 2 from rank 0" in refused(workers, sender, Rows(0, rows))
    assert "expected those for choice 0" in refused(workers, "rank 0", Rows(1, [1, 1]))
    assert refused(workers, "rank 0", Rows(0, [1, 1])) == ""
    for number in range(3):
        assert "expected those for choice 1" in refused(workers, "rank 0", Rows(number, [2, 2]))


def test_a_dense_gradient_that_comes_first_waits_for_the_choice(workers: list[Worker]) -> None:
    """Otherwise it would leave on last step's terms."""
    workers[0].model(torch.ones(1, 8))
    not_a_layers_tensor = 99
    assert not workers[0].compact.has(not_a_layers_tensor)
    assert workers[0].other.skipped == [{0, 1, 2}]


# ---- contributions


def test_a_layer_leaves_when_its_backward_has_ended(workers: list[Worker]) -> None:
    begin(workers, 0)
    worker = workers[0]
    hidden = torch.tanh(worker.model[0](torch.ones(1, 8)))
    seen: list[list[int]] = []
    hidden.register_hook(lambda _: seen.append([body.unit for body in worker.contributions()]))
    worker.model[2](hidden).sum().backward()
    units = [layer.unit for layer in worker.layers]
    assert seen == [units[1:]]
    assert [body.unit for body in worker.contributions()] == units[::-1]


def test_a_layer_that_was_not_used_is_absent_and_gets_the_others_gradient(
    workers: list[Worker],
) -> None:
    begin(workers, 0)
    workers[0].backward()
    deliver(workers)
    workers[1].model[0](torch.ones(1, 8)).sum().backward()
    finish(workers)
    absent = [body.counts for body in workers[1].contributions()]
    assert sorted(absent) == [[0], [4]]
    first, second = (worker.gradients for worker in workers)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    alone = network()
    alone(torch.arange(8.0).view(1, 8) / 50).sum().backward()
    torch.testing.assert_close(first[2], alone[2].weight.grad / 2)  # type: ignore[operator]


def test_what_nobody_used_has_no_gradient(workers: list[Worker]) -> None:
    step(workers, 0)
    begin(workers, 1)
    finish(workers)
    assert all(worker.gradients == [] for worker in workers)


def test_two_uses_of_a_layer_are_one_contribution(workers: list[Worker]) -> None:
    data = torch.randn(2, 8)

    def twice(model: Any) -> torch.Tensor:
        return model[2](model[2](torch.tanh(model[0](data)))).sum()

    begin(workers, 0)
    for worker in workers:
        twice(worker.model).backward()
        assert sorted(body.unit for body in worker.contributions()) == sorted(
            layer.unit for layer in worker.layers
        )
        deliver(workers)
    finish(workers)
    alone = network()
    twice(alone).backward()
    for worker in workers:
        for got, parameter in zip(worker.gradients, alone.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad)


def test_a_layer_completed_twice_in_a_step_is_named(workers: list[Worker]) -> None:
    begin(workers, 0)
    workers[0].backward()
    last = workers[0].layers[1]
    with pytest.raises(RuntimeFault, match=r"'2' was completed twice .*use_reentrant=False"):
        workers[0].compact.finished(last)


def test_workers_out_of_step_are_told(workers: list[Worker]) -> None:
    first, second = workers
    begin(workers, 0)
    first.backward()
    first.flush()
    deliver(workers)
    second.begin(1)
    first.member.send("rank 1", Rows(1, [1, 1]))
    deliver(workers)
    second.backward()
    second.flush()
    deliver(workers)
    with pytest.raises(RuntimeFault, match="rank 0 at step 0, rank 1 at step 1"):
        first.channel.wait()


def test_weight_used_without_its_layer_after_this_was_sent_is_refused(
    workers: list[Worker],
) -> None:
    worker = workers[0]
    weight = worker.layers[0].weight
    begin(workers, 0)
    worker.backward()
    assert worker.compact.has(weight)
    worker.model[0].weight.pow(2).sum().backward()
    with pytest.raises(RuntimeFault, match=r"name it in poseidon\(dense"):
        worker.compact.has(weight)


def test_gradient_assigned_by_the_loop_is_sent_with_captured_ones(workers: list[Worker]) -> None:
    """One worker's comes from ``autograd.grad``, and a regularizer uses a weight by itself."""
    first, second = workers
    data = torch.arange(8.0).view(1, 8) / 50
    begin(workers, 0)
    weights = list(first.model.parameters())
    found = torch.autograd.grad(first.model(data).sum(), weights)
    for weight, gradient in zip(weights, found, strict=True):
        weight.grad = gradient
    first.model[0].weight.pow(2).sum().backward()
    first.flush()
    deliver(workers)
    second.backward()
    second.flush()
    deliver(workers)
    for worker in workers:
        worker.channel.wait()
    wanted = plain_gradients(first, data, data)
    wanted[0] = wanted[0] + first.model[0].weight.detach()  # 2 W, of one of two workers
    for worker in workers:
        for got, gradient in zip(worker.gradients, wanted, strict=True):
            torch.testing.assert_close(got, gradient)


def test_memory_is_used_again_only_when_it_has_left(workers: list[Worker]) -> None:
    """Rank 1 has what it needs of rank 0's round, but the copies to it are still under way."""
    first, second = workers
    links = first.stage._network._links
    data = [torch.randn(2, 8) for _ in range(3)]
    seen: list[tuple[list[Buffer], list[bytes]]] = []
    for number in range(3):
        begin(workers, number)
        first.model(data[number]).sum().backward()
        first.member.take(0)
        sent = under_way(workers, "rank 0", "rank 1")
        frames = [frame for body, each in sent if isinstance(body, Push) for frame in each]
        if number == 0:
            seen.append((frames, [bytes(memoryview(frame)) for frame in frames]))
            held = list(links["rank 0", "rank 1"])
            deliver(workers)  # and again, as if they had not left
            for waiting in held:
                waiting.ticket.done = False
        else:
            deliver(workers)
        second.model(data[number]).sum().backward()
        finish(workers)
        for frames, before in seen:
            assert [bytes(memoryview(frame)) for frame in frames] == before
    for waiting in held:
        waiting.ticket.done = True
    step(workers, 3, rows=2)
    step(workers, 4, rows=2)
    (frames, before), *_ = seen
    assert [bytes(memoryview(frame)) for frame in frames] != before, "then it is"


# ---- inputs that leave in the forward pass


def test_inputs_leave_in_the_forward_pass_from_the_second_step_on(workers: list[Worker]) -> None:
    data = [torch.randn(2, 8), torch.randn(3, 8)]
    for number in range(3):
        begin(workers, number)
        outputs = [w.model(batch) for w, batch in zip(workers, data, strict=True)]
        wanted = [(0, number), (1, number)] if number else []
        assert [worker.sent_early() for worker in workers] == [wanted, wanted]
        deliver(workers)
        for worker, output in zip(workers, outputs, strict=True):
            output.sum().backward()
            for body in worker.contributions():
                assert body.early == bool(number)
                assert body.counts == ([2] if number else [4])  # each matrix has a header
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
            # One a round; none before the first choice, nor after a step with two passes.
            assert worker.sent_early() == ([] if number in (0, 3) else early)
            output.sum().backward()
            assert [body.early for body in worker.contributions()] == [number in (1, 4, 5)] * 2
            deliver(workers)
        finish(workers)
        assert_gradients(workers, *data)


def test_inputs_of_an_evaluation_do_not_leave(workers: list[Worker]) -> None:
    step(workers, 0)
    step(workers, 1)
    begin(workers, 2)
    data = torch.randn(2, 8)
    for worker in workers:
        worker.model.eval()
        worker.model(torch.randn(50, 8))
        assert worker.sent_early() == []
        worker.model.train()
        worker.model(data).sum().backward()
        deliver(workers)
    finish(workers)
    assert_gradients(workers, data, data)


def test_inputs_of_a_graph_that_is_kept_hold_for_its_own_round_only(workers: list[Worker]) -> None:
    step(workers, 0)
    step(workers, 1)
    data = torch.randn(1, 8)
    begin(workers, 2)
    kept = [worker.model(data).sum() for worker in workers]
    for number, expected in ((2, True), (3, False)):
        for worker, loss in zip(workers, kept, strict=True):
            if number > 2:
                worker.begin(number)
            loss.backward(retain_graph=True)
            assert [body.early for body in worker.contributions()] == [expected] * 2
            deliver(workers)
        finish(workers)
        assert_gradients(workers, data, data)


@pytest.mark.parametrize("scale", [torch.nan, 1e38])
def test_refused_factors_count_as_a_layer_that_was_not_used(scale: float) -> None:
    """Also where only their product is infinite, and where X has left in the forward pass."""
    workers = make_workers("refuse")
    step(workers, 0)
    layer = workers[1].model[2]
    weight = layer.weight.detach().clone()
    begin(workers, 1)
    workers[0].backward()
    workers[0].flush()
    deliver(workers)
    data = torch.arange(8.0).view(1, 8)
    out = workers[1].model[2](10 * torch.tanh(workers[1].model[0](data)).detach())
    loss = (out * scale).sum()
    with pytest.warns(UserWarning, match="rank 1: the gradient of '2.weight' is not finite"):
        loss.backward()
    workers[1].flush()
    deliver(workers)
    for worker in workers:
        worker.channel.wait()
    first, second = (worker.gradients for worker in workers)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(gradient.isfinite().all() for gradient in first)
    assert torch.equal(weight, layer.weight)


# ---- forged messages


def taken_from_rank_0(workers: list[Worker], *, early: bool) -> list[tuple[Any, list[Buffer]]]:
    """What rank 0 sends rank 1 in step 1, in the order in which it leaves."""
    if not early:
        for worker in workers:
            for layer in worker.layers:
                layer.calls = 1  # its X does not leave early in the next step
    step(workers, 0)
    begin(workers, 1)
    workers[0].backward()
    return [
        (body, [bytes(memoryview(frame)) for frame in frames])
        for body, frames in under_way(workers, "rank 0", "rank 1")
        if isinstance(body, Push | Early)
    ]


def in_round_1(plan: Plan) -> Collector:
    """Rank 1's, after a round in which nobody used anything."""
    collector = Collector(1, plan)
    for unit in plan.choices():
        for rank in (0, 1):
            collector.push(rank, Push(unit.index, 0, 0, [0], checksum([])), [])
    return collector


def matrices(*given: tuple[int, str, int]) -> list[bytes]:
    """Frames of matrices of zeros: rows, dtype's number, bytes."""
    frames: list[bytes] = []
    for rows, dtype, nbytes in given:
        frames += [rows.to_bytes(8, "little") + bytes([int(dtype)]) + bytes(7), bytes(nbytes)]
    return frames


def test_contributions_that_are_refused_change_nothing(workers: list[Worker]) -> None:
    (body, frames), *_ = taken_from_rank_0(workers, early=False)
    assert isinstance(body, Push)
    assert not body.early
    plan = workers[0].stage.plan
    collector = in_round_1(plan)

    def changed(**fields: Any) -> Push:
        return msgspec.structs.replace(body, **fields)

    def with_frames(*given: bytes) -> tuple[Push, list[Buffer]]:
        return changed(counts=[len(given)], crc=checksum(given)), list(given)

    one = bytes(memoryview(frames[0]))
    wrong: list[tuple[str, int, Push, list[Buffer]]] = [
        ("no worker", 2, body, frames),
        ("no worker", -1, body, frames),
        ("not held here", 0, changed(unit=99), frames),
        ("round 0 while", 0, changed(round=0, read=0), frames),
        ("round 3 while", 0, changed(round=3), frames),
        ("weights of 5", 0, changed(read=5), frames),
        ("checksum", 0, changed(crc=body.crc ^ 1), frames),
        ("announced", 0, changed(counts=[3]), frames),
        ("announced", 0, changed(counts=[4, 0]), frames),
        ("announced", 0, changed(counts=[]), frames),
        ("never sent", 0, changed(early=True), frames),
        ("bytes where", 0, *with_frames(*matrices((2**61, "1", 32), (1, "1", 32)))),
        ("where 2 rows take", 0, *with_frames(*matrices((2, "1", 32)))),
        ("other frames", 0, *with_frames(*matrices((2, "1", 32), (2, "1", 32)))),
        ("1 rows of X and 2 of dY", 0, *with_frames(*matrices((1, "1", 32), (2, "1", 64)))),
        ("matrix of type int64: expected", 0, *with_frames(*matrices((1, "5", 64), (1, "1", 32)))),
        ("matrix of type 77: expected", 0, *with_frames(*matrices((1, "77", 32), (1, "1", 32)))),
        ("bytes where 1 rows take 32", 0, *with_frames(one)),
        ("header", 0, *with_frames(one[:-1])),
    ]
    for reason, rank, forged, content in wrong:
        with pytest.raises(FrameRefused, match=reason):
            collector.push(rank, forged, content)
    assert collector.push(0, body, frames) == []
    with pytest.raises(FrameRefused, match="twice"):
        collector.push(0, body, frames)
    (closed,) = collector.push(1, body, frames)
    assert (closed.round, closed.ranks, closed.given(0)) == (1, (0, 1), [frames, frames])


def test_early_inputs_that_are_refused_change_nothing(workers: list[Worker]) -> None:
    messages = taken_from_rank_0(workers, early=True)
    early = [(body, frames) for body, frames in messages if isinstance(body, Early)]
    pushes = {body.unit: (body, frames) for body, frames in messages if isinstance(body, Push)}
    assert len(early) == len(pushes) == 2
    body, good = early[0]
    plan = workers[0].stage.plan
    collector = in_round_1(plan)

    def changed(**fields: Any) -> Early:
        return msgspec.structs.replace(body, **fields)

    def with_frames(*given: bytes) -> tuple[Early, list[Buffer]]:
        return changed(crc=checksum(given)), list(given)

    dense = next(unit.index for unit in plan.units if unit.layer is None)
    wrong: list[tuple[str, int, Early, list[Buffer]]] = [
        ("no worker", 2, body, good),
        ("no worker", -1, body, good),
        ("not held here", 0, changed(unit=99), good),
        ("not held here", 0, changed(unit=dense), good),
        ("round 0 while", 0, changed(round=0), good),
        ("round 3 while", 0, changed(round=3), good),
        ("checksum", 0, changed(crc=body.crc ^ 1), good),
        ("bytes where", 0, *with_frames(*matrices((3, "1", 32)))),
        ("bytes where", 0, *with_frames(*matrices((2**61, "1", 32)))),
        ("0 rows of inputs", 0, *with_frames(*matrices((0, "1", 0))[:1])),
        ("in 4 frames", 0, *with_frames(*matrices((1, "1", 32), (1, "1", 32)))),
        ("matrix of type int64: expected", 0, *with_frames(*matrices((1, "5", 64)))),
        ("header", 0, *with_frames()),
    ]
    for reason, rank, forged, frames in wrong:
        with pytest.raises(FrameRefused, match=reason):
            collector.early(rank, forged, frames)
    for said, frames in pushes.values():
        with pytest.raises(FrameRefused, match="never sent"):
            collector.push(0, said, frames)
    collector.early(0, body, good)
    with pytest.raises(FrameRefused, match="twice"):
        collector.early(0, body, good)
    said, frames = pushes[body.unit]
    collector.push(0, said, frames)
    (closed,) = collector.push(1, Push(body.unit, 1, said.step, [0], checksum([])), [])
    assert closed.given(0) == [[*good, *frames]]


def test_inputs_that_left_early_and_did_not_hold_are_forgotten(workers: list[Worker]) -> None:
    messages = taken_from_rank_0(workers, early=True)
    body, good = next((b, f) for b, f in messages if isinstance(b, Early))
    collector = in_round_1(workers[0].stage.plan)
    collector.early(0, body, good)
    whole = matrices((1, "1", 32), (1, "1", 32))
    push = Push(body.unit, 1, 1, [4], checksum(whole))
    collector.push(0, push, whole)
    (closed,) = collector.push(1, push, whole)
    assert closed.given(0) == [whole, whole]
    again = Push(body.unit, 2, 2, [2], checksum(whole[2:]), early=True)
    with pytest.raises(FrameRefused, match="never sent"):
        collector.push(0, again, whole[2:])


def test_layers_that_always_travel_whole_need_no_choice() -> None:
    """To the server that holds them, and its means back."""
    workers = make_workers(system=adam_factors())
    data = [torch.randn(2, 8), torch.randn(3, 8)]
    for number in range(3):
        begin(workers, number)
        for worker, batch in zip(workers, data, strict=True):
            output = worker.model(batch)
            assert worker.sent_early() == ([(0, number), (1, number)] if number else [])
            deliver(workers)
            output.sum().backward()
            deliver(workers)
        finish(workers)
        assert_gradients(workers, *data)
        assert workers[0].choices is None
    first, second = (worker.gradients for worker in workers)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert set(workers[0].channel.sent) == {"factors/sharded"}
