"""The worker's half of a round in which layers' gradients travel in compact form, peer to peer.

Every worker sends its rows of a layer to every other, as soon as the layer's backward has ended.
When all workers' rows are in, the dense mean gradient is made from them, in rank order and in one
go, straight into the gradient's memory, which is reused from step to step: all workers do the same
arithmetic on the same bytes. A layer that a worker did not use contributes nothing there.

Half of a fully connected layer's rows, its inputs, are known in the forward pass. Where a layer was
called just once in the step before, they leave at once; its backward then says whether they hold.

Which layers travel so is decided anew for every step, from how many rows rank 0 had in the step
before (in the first step: in this one). Everybody applies the same rule to the same numbers; the
other layers, and these when the rule says so, go the plan's dense way.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slipstream.codecs import CompactWire
from slipstream.errors import ContributionRefused, FrameRefused, RuntimeFault, contribution_of
from slipstream.planning.choosing import Verdict
from slipstream.planning.costs import Speeds
from slipstream.planning.hybrid import Hybrid
from slipstream.runtime.exchange import Exchange, LinkExchange, rank_of
from slipstream.runtime.member import HUB, Member
from slipstream.strategy import Plan
from slipstream.torch.compact_layers import Captured, CompactLayer
from slipstream.torch.finite_gradients import FiniteGradients, magnitude_of
from slipstream.torch.inventory import dtype_name
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Compact, Early, Message, Rows, checksum
from slipstream.types import Buffer


class CompactExchange:
    """All layers of a plan that may travel in compact form; implements ``Exchange``."""

    def __init__(
        self,
        rank: int,
        plan: Plan,
        layers: Sequence[CompactLayer],
        hybrid: Hybrid,
        speeds: Speeds | None,
        parameters: Sequence[Tensor],
        dense: Sequence[Exchange],
        member: Member,
        *,
        limit_s: float,
        finite: FiniteGradients | None = None,
    ) -> None:
        self.rank = rank
        self.plan = plan
        self.step = 0
        self.wait_s = 0.0
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.verdicts: tuple[Verdict, ...] = ()
        self._layers = tuple(layers)
        self._index = {id(layer): i for i, layer in enumerate(layers)}
        self._layer_of = {tensor: layer for layer in layers for tensor in layer.tensors}
        self._before: dict[int, tuple[int, int] | None] = {}
        self.speeds = hybrid.speeds or speeds
        self._hybrid = hybrid
        self._chooser, self._ways = hybrid.chooser(speeds), plan.ways()
        self._wire = CompactWire(hybrid.wire)
        self._parameters = parameters
        self._dense = tuple(dense)
        self._links: Any = next((e for e in dense if isinstance(e, LinkExchange)), None)
        self._beside = self._links.beside if self._links is not None else frozenset()
        self._member = member
        self._limit_s = limit_s
        self._finite = finite or FiniteGradients()
        self._round = [0] * len(layers)  # contributions made
        self._written = [0] * len(layers)  # results in place
        self._arrived: list[dict[int, dict[int, tuple[Compact, Sequence[Buffer]]]]] = [
            {} for _ in layers
        ]
        self._early: list[dict[tuple[int, int], tuple[Early, Sequence[Buffer]]]] = [
            {} for _ in layers
        ]  # by round and rank
        self._ahead_for = [-1] * len(layers)  # the round for which this worker's X left early
        self._rebuilders = [Rebuilder(layer, self._peers) for layer in layers]
        self._left: set[int] = set()  # layers whose contribution to this round has been made
        self._decided_for = -1
        self._rows: dict[int, list[int]] = {}
        self._last_rows: list[int] = []
        member.on(Compact, self._on_compact)
        member.on(Early, self._on_early)
        member.on(Rows, self._on_rows)

    @property
    def layers(self) -> tuple[CompactLayer, ...]:
        return self._layers

    @property
    def _peers(self) -> int:
        return self.plan.cluster.workers

    # ---- which layers travel so in this step

    def takes(self, layer: CompactLayer) -> bool:
        """Whether this layer's gradient is captured in this step, instead of made dense."""
        self._decide()
        return self.verdicts[self._index[id(layer)]].compact

    def _decide(self) -> None:
        if self._decided_for == self.step:
            return
        seen = [layer.rows for layer in self._layers]
        if self._member.name == HUB:
            self._rows[self.step] = seen
            for node in range(1, self._peers):
                peer = self.plan.cluster.name(node)
                self._member.send(peer, Rows(self.step, seen), priority=CONTROL)
        wanted = self.step if self._decided_for < 0 else self._decided_for
        self._member.wait_until(
            lambda: wanted in self._rows,
            what=f"rank 0 to say how large its batch was in step {wanted}",
            limit_s=self._limit_s,
            missing=lambda: [HUB],
        )
        # Steps may go back, to those of a checkpoint: only what has served is forgotten.
        rows = self._rows[wanted] if wanted == self.step else self._rows.pop(wanted)
        if rows != self._last_rows:
            self._choose(rows)
        self._decided_for = self.step

    def _choose(self, rows: Sequence[int]) -> None:
        """A layer that was not used keeps what was chosen before."""
        self._last_rows = self._with_last(rows)
        self.verdicts = tuple(
            self._chooser.choose(
                layer.shape,
                had,
                self._ways[layer.weight],
                item_bytes=self._wire.item_bytes(layer.shape),
            )
            for layer, had in zip(self._layers, self._last_rows, strict=True)
        )
        excused = {
            tensor
            for layer, verdict in zip(self._layers, self.verdicts, strict=True)
            if verdict.compact
            for tensor in layer.tensors
        }
        for exchange in self._dense:
            exchange.excuse(excused)

    def _with_last(self, rows: Sequence[int]) -> list[int]:
        known = self._last_rows or [0] * len(self._layers)
        return [new or old for new, old in zip(rows, known, strict=True)]

    # ---- the training thread

    def entered(self, layer: CompactLayer, x: Tensor) -> int | None:
        """A layer's forward has begun: send its inputs now, if its gradient will need them.

        Returns the round for which they have left. Where the choice of layers may yet change, they
        do not.
        """
        index = self._index[id(layer)]
        rows = self._rows.get(self._decided_for)
        if self._hybrid.to != "peers" or not layer.once or not len(x) or rows is None:
            return None
        settled = self._with_last(rows) == self._last_rows and self.verdicts[index].compact
        if not settled or self._ahead_for[index] == self._round[index]:
            return None
        kept = self._rebuilders[index].hold_early(x, self._wire)
        frames = in_frames(kept)
        body = Early(index, self._round[index], len(x), dtype_name(kept), checksum(frames))
        self._ahead_for[index] = body.round
        self._tell_peers(layer, body, frames)
        with self._member.changed:
            self._early[index][body.round, self.rank] = (body, frames)
        return body.round

    def captured(self, layer: CompactLayer) -> None:
        """One more use of a layer has had its backward."""
        for tensor in layer.tensors:
            self._before.setdefault(tensor, state_of(self._parameters[tensor].grad))

    def settled(self, layer: CompactLayer) -> None:
        """All uses have: it leaves."""
        self._send(self._index[id(layer)])

    def ready(self, tensor: int) -> None:
        """Dense gradients are for the others."""

    def has(self, tensor: int) -> bool:
        """Whether the tensor's gradient was captured; autograd calls its hook all the same."""
        # Before any gradient leaves: the dense roads must know whom to wait for.
        self._decide()
        layer = self._layer_of.get(tensor)
        if layer is None or not self.takes(layer):
            return False
        if state_of(self._parameters[tensor].grad) != self._before.pop(tensor, None):
            raise RuntimeFault(
                f"the weight of {layer.shape.name!r} was also used without calling the layer, so "
                "not all of its gradient was captured; name it in poseidon(dense=[...])"
            )
        return True

    def excuse(self, tensors: Iterable[int]) -> None:
        """Nobody else carries these layers."""

    def flush(self) -> None:
        self._decide()
        self._before.clear()
        for index, verdict in enumerate(self.verdicts):
            if verdict.compact and index not in self._left:
                self._send(index)
            self._layers[index].reset()
        self._left.clear()

    def _send(self, index: int) -> None:
        if index in self._left:
            raise RuntimeFault(
                f"the gradient of {self._layers[index].shape.name!r} was completed twice in one "
                "backward pass (re-entrant checkpointing of a layer that is used twice does this: "
                "use checkpoint(..., use_reentrant=False); so does a pass that broke off, when it "
                "is run again)"
            )
        self._left.add(index)
        layer = self._layers[index]
        taken = self._finite_part(layer)
        rows = 0 if taken is None else len(taken.first)
        early = taken is not None and taken.ahead == self._round[index]
        kept = self._rebuilders[index].hold(taken, self._wire, early=early)
        frames = [frame for matrix in kept[early:] for frame in in_frames(matrix)]
        dtypes = (dtype_name(kept[0]), dtype_name(kept[1])) if kept else ("", "")
        body = Compact(
            index,
            self._round[index],
            self.step,
            taken is not None,
            rows,
            dtypes,
            checksum(frames),
            early,
        )
        self._round[index] += 1
        self._member.round = max(self._member.round, self.step + 1)
        if self._hybrid.to == "server":
            # Its answer is a dense gradient like any other, and may come at once.
            self._written[index] = self._round[index]
            self._links.expect(layer.tensors)
        self._tell_peers(layer, body, frames)
        if self._hybrid.to == "peers":
            self._park(self.rank, body, frames)

    def _finite_part(self, layer: CompactLayer) -> Captured | None:
        """What the layer has captured, if its gradient counts."""
        taken = layer.take()
        if taken is None:
            return None
        matrices = (taken.first, taken.second) if layer.shape.form == "factors" else (taken.second,)
        found = [magnitude_of(matrix) for matrix in matrices]
        name = self.plan.specs[layer.weight].name
        for matrix, magnitude in zip(matrices, found, strict=True):
            if not self._finite.admits(name, magnitude, self._wire.dtype(dtype_name(matrix))):
                return None
        # No entry of the product is above this; only if it might overflow is it worth making.
        most = math.prod(found) * len(taken.first)
        dtype = self._parameters[layer.weight].dtype
        if len(found) > 1 and all(map(math.isfinite, found)) and most > torch.finfo(dtype).max:
            product = taken.second.to(dtype).t() @ taken.first.to(dtype)
            if not self._finite.admits(name, magnitude_of(product)):
                return None
        return taken

    def _tell_peers(
        self, layer: CompactLayer, body: Compact | Early, frames: Sequence[Buffer]
    ) -> None:
        order = self.plan.specs[layer.weight].order
        priority = self.plan.schedule.priority(
            forward_order=order, backward_order=self.plan.last_order - order
        )
        for peer in self._targets(layer):
            self._member.send(peer, body, frames, priority=priority)
            if peer not in self._beside:
                self.sent[self._scheme(layer)] += sum(memoryview(f).nbytes for f in frames)

    def _targets(self, layer: CompactLayer) -> list[str]:
        cluster = self.plan.cluster
        if self._hybrid.to == "peers":
            # Each begins with the next: no worker's link takes in everybody's rows at once.
            away = range(1, self._peers)
            return [cluster.name((self.rank + step) % self._peers) for step in away]
        chunk = next(c for c in self.plan.chunks if c.segments[0].tensor in layer.tensors)
        return [cluster.name(node) for node in self.plan.holders[chunk.index]]

    def _scheme(self, layer: CompactLayer) -> str:
        return f"{layer.shape.form}/{'mesh' if self._hybrid.to == 'peers' else 'sharded'}"

    def refresh(self) -> None:
        """Nothing comes unasked."""

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        chosen = None if tensors is None else set(tensors)
        pending = {
            index
            for index, layer in enumerate(self._layers)
            if self._round[index] > self._written[index]
            and (chosen is None or chosen.intersection(layer.tensors))
        }
        begun = time.monotonic()
        worked_s = 0.0
        while pending:
            self._member.wait_until(
                lambda: any(self._complete(index) for index in pending),
                what=f"the rows of step {self.step}",
                limit_s=self._limit_s,
                missing=lambda: self._missing(pending),
            )
            for index in sorted(pending, reverse=True):
                if self._complete(index):
                    at = time.monotonic()
                    self._write(index)
                    worked_s += time.monotonic() - at
                    pending.discard(index)
        self.wait_s += time.monotonic() - begun - worked_s

    def _complete(self, index: int) -> bool:
        return len(self._arrived[index].get(self._written[index], ())) == self._peers

    def _missing(self, pending: Iterable[int]) -> list[str]:
        here = [self._arrived[i].get(self._written[i], {}) for i in pending]
        late = {rank for rank in range(self._peers) if any(rank not in said for said in here)}
        return [self.plan.cluster.name(rank) for rank in sorted(late)]

    def _write(self, index: int) -> None:
        arrived = self._arrived[index].pop(self._written[index])
        steps = {body.step for body, _ in arrived.values()}
        if len(steps) > 1:
            told = ", ".join(f"rank {r} at step {b.step}" for r, (b, _) in sorted(arrived.items()))
            raise RuntimeFault(
                f"workers ran different numbers of backward passes: {told}; every worker must call "
                "backward() equally often a step (use job.accumulate() for passes that only add up)"
            )
        self._written[index] += 1
        with self._member.changed:
            over = [key for key in self._early[index] if key[0] < self._written[index]]
            for key in over:  # also those that did not hold
                del self._early[index][key]
        parts = [arrived[rank] for rank in range(self._peers)]
        self._rebuilders[index].rebuild(parts, self._parameters)

    # ---- the receiving thread

    def _on_compact(self, message: Message) -> None:
        body, rank = message.body, rank_of(message.sender)
        assert isinstance(body, Compact)
        self._examine(rank, body, message.frames)
        if rank in self._arrived[body.layer].get(body.round, {}):
            raise FrameRefused(f"rank {rank} contributed twice to round {body.round}")
        shape = self._layers[body.layer].shape
        with contribution_of(f"layer {shape.name!r}"):
            frames = [*self._early_frames(rank, body), *message.frames]
            self._wire.examine(shape, body.present, body.rows, body.dtypes, frames)
        self.received[self._scheme(self._layers[body.layer])] += message.nbytes
        self._park(rank, body, message.frames)

    def _on_early(self, message: Message) -> None:
        body, rank = message.body, rank_of(message.sender)
        assert isinstance(body, Early)
        self._examine(rank, body, message.frames)
        if (body.round, rank) in self._early[body.layer]:
            raise FrameRefused(f"rank {rank} sent its inputs twice for round {body.round}")
        shape = self._layers[body.layer].shape
        with contribution_of(f"layer {shape.name!r}"):
            self._wire.examine_first(shape, body.rows, body.dtype, message.frames)
        self.received[self._scheme(self._layers[body.layer])] += message.nbytes
        with self._member.changed:
            self._early[body.layer][body.round, rank] = (body, message.frames)

    def _early_frames(self, rank: int, body: Compact) -> Sequence[Buffer]:
        """Those that a Compact counts on."""
        if not body.early:
            return ()
        with self._member.changed:
            known = self._early[body.layer].get((body.round, rank))
        if known is None or (known[0].rows, known[0].dtype) != (body.rows, body.dtypes[0]):
            raise FrameRefused(f"rank {rank} counts on inputs for layer {body.layer} it never sent")
        return known[1]

    def _examine(self, rank: int, body: Compact | Early, frames: Sequence[Buffer]) -> None:
        if not 0 <= rank < self._peers or rank == self.rank:
            raise FrameRefused("rows of a layer come from the other workers")
        if body.layer >= len(self._layers):
            raise FrameRefused(f"there is no layer {body.layer}")
        open_round = self._written[body.layer]
        if not open_round <= body.round <= open_round + 1:
            raise FrameRefused(f"round {body.round} while round {open_round} is open")
        if checksum(frames) != body.crc:
            raise ContributionRefused(f"checksum of layer {body.layer} does not match its bytes")

    def _park(self, rank: int, body: Compact, frames: Sequence[Buffer]) -> None:
        whole = (*self._early_frames(rank, body), *frames)
        with self._member.changed:
            self._arrived[body.layer].setdefault(body.round, {})[rank] = (body, whole)
            self._member.changed.notify_all()

    def _on_rows(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Rows)
        if message.sender != HUB or len(body.rows) != len(self._layers):
            raise FrameRefused("how many rows there are is for rank 0 to say")
        if body.step in self._rows or len(self._rows) > 1:
            raise FrameRefused(f"the rows of step {body.step} out of turn")
        with self._member.changed:
            self._rows[body.step] = list(body.rows)
            self._member.changed.notify_all()


class Rebuilder:
    """Makes a layer's dense mean gradient from all workers' rows; its memory is reused.

    What this worker sends is kept in two places in turn: nobody ends a round before everybody's
    rows of the one before have arrived, so the older place is free again.
    """

    def __init__(self, layer: CompactLayer, workers: int) -> None:
        self._layer, self._workers = layer, workers
        self._dense: Tensor | None = None
        self._stacks: list[Tensor | None] = [None, None]
        self._own: list[list[Tensor]] = [[], []]
        self._early: Tensor | None = None  # this round's first matrix, if it has left

    def hold_early(self, first: Tensor, wire: CompactWire) -> Tensor:
        """The first matrix of the coming ``hold``."""
        self._own.reverse()
        self._early = self._copied(first, wire, 0)
        return self._early

    def hold(self, taken: Captured | None, wire: CompactWire, *, early: bool) -> list[Tensor]:
        """This worker's rows as they travel, in memory that stays untouched while they do.

        ``early``: the first matrix is the one that has left.
        """
        ahead, self._early = self._early, None
        if ahead is None:
            self._own.reverse()
        elif not early:
            self._own[0] = []  # what has left is still on its way
        if taken is None:
            self._own[0] = []
            return []
        first = ahead if early and ahead is not None else self._copied(taken.first, wire, 0)
        self._own[0] = [first, self._copied(taken.second, wire, 1)]
        return self._own[0]

    def _copied(self, matrix: Tensor, wire: CompactWire, place: int) -> Tensor:
        dtype = getattr(torch, wire.dtype(dtype_name(matrix)))
        old = self._own[0][place] if len(self._own[0]) > place else None
        if old is None or old.shape != matrix.shape or old.dtype != dtype:
            old = torch.empty(matrix.shape, dtype=dtype)
        return old.copy_(matrix)

    @torch.no_grad()
    def rebuild(
        self, parts: Sequence[tuple[Compact, Sequence[Buffer]]], parameters: Sequence[Tensor]
    ) -> None:
        used = [(body, frames) for body, frames in parts if body.present]
        if not used:
            return  # nobody used it: its gradient stays as it is
        weight = parameters[self._layer.weight]
        first, second = self._stack(used, weight.dtype)
        if hasattr(self._layer.module, "rebuild"):  # an emulated device takes the time it would
            self._layer.module.rebuild(len(first))
            return
        # A parameter may have been frozen since the start; the other one of the layer is not.
        if self._layer.shape.form == "rows":
            self._add_rows(weight, first[:, 0], second)
            return
        if weight.requires_grad:
            self._multiply(weight, first, second)
        bias = None if self._layer.bias is None else parameters[self._layer.bias]
        if bias is not None and bias.requires_grad:
            total = second.sum(0, dtype=torch.promote_types(second.dtype, torch.float32))
            add_to_gradient(bias, (total / self._workers).to(bias.dtype))

    def _stack(
        self, used: Sequence[tuple[Compact, Sequence[Buffer]]], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """All workers' rows, one below the other in rank order."""
        total = sum(body.rows for body, _ in used)
        shape = self._layer.shape
        ids = shape.form == "rows"
        columns = (1 if ids else shape.inputs, shape.inputs if ids else shape.outputs)
        dtypes = (torch.int64 if ids else dtype, dtype)
        stacks = []
        for place in (0, 1):
            stack = self._stacks[place]
            if stack is None or stack.shape[0] < total or stack.dtype != dtypes[place]:
                stack = torch.empty(total, columns[place], dtype=dtypes[place])
                self._stacks[place] = stack
            stacks.append(stack[:total])
        start = 0
        for body, frames in used:
            rest = list(frames)
            for place, dtype_text in enumerate(body.dtypes):
                out = stacks[place][start : start + body.rows].view(-1)
                fill(out, getattr(torch, dtype_text), rest)
            start += body.rows
        return stacks[0], stacks[1]

    def _memory(self, weight: Tensor) -> Tensor:
        """Of the last gradient, unless somebody still holds it; contents are left over."""
        if self._dense is None or self._dense.shape != weight.shape or is_shared(self._dense):
            self._dense = torch.empty_like(weight, requires_grad=False)
        return self._dense

    def _multiply(self, weight: Tensor, x: Tensor, dy: Tensor) -> None:
        """Divided as it is summed: short formats are rounded once."""
        fresh = weight.grad is None
        if weight.grad is None:
            weight.grad = self._memory(weight).detach()
        out = weight.grad
        factors = dy.t().to(out.device), x.to(out.device)
        share = 1.0 / self._workers
        torch.addmm(out, *factors, beta=0 if fresh else 1, alpha=share, out=out)

    def _add_rows(self, weight: Tensor, ids: Tensor, values: Tensor) -> None:
        if weight.grad is None:
            weight.grad = self._memory(weight).detach()
            weight.grad.zero_()
        elif weight.grad.is_sparse:
            weight.grad = weight.grad.to_dense()
        out = weight.grad
        out.index_add_(0, ids.to(out.device), values.to(out.device), alpha=1.0 / self._workers)


def is_shared(memory: Tensor) -> bool:
    """Whether a tensor other than this one has its memory: a gradient that somebody kept."""
    storage = memory.untyped_storage()
    # This handle and the tensor itself hold it.
    return bool(torch._C._storage_Use_Count(storage._cdata) > 2)


def state_of(gradient: Tensor | None) -> tuple[int, int] | None:
    """Changes when somebody writes to a gradient."""
    return None if gradient is None else (id(gradient), gradient._version)


def add_to_gradient(parameter: Tensor, values: Tensor) -> None:
    values = values.to(parameter.device)
    if parameter.grad is None:
        parameter.grad = values
    else:
        parameter.grad += values


def in_frames(matrix: Tensor) -> list[Any]:
    """A matrix's memory, cut where it is too large for one frame."""
    flat = matrix.reshape(-1).view(torch.uint8).numpy()
    sizes = CompactWire.sizes(len(flat))
    stops = list(itertools.accumulate(sizes))
    return [flat[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


def fill(out: Tensor, dtype: torch.dtype, frames: list[Buffer]) -> None:
    """Take one matrix off the frames that ``in_frames`` cut, in this precision or another."""
    landing = out if out.dtype == dtype else torch.empty(out.numel(), dtype=dtype)
    whole = landing.view(torch.uint8).numpy()
    start = 0
    for size in CompactWire.sizes(len(whole)):
        whole[start : start + size] = np.frombuffer(frames.pop(0), np.uint8)
        start += size
    if landing is not out:
        out.copy_(landing)
