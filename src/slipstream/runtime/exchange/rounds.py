"""The worker's half of a round over point-to-point links.

Contributions go in as tensors and layers become ready; a unit is sent when its last tensor is.
The receiving thread parks results, and the training thread writes them while it waits, so
that no two threads touch a tensor.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from slipstream.codecs.matrices import LayerMath, Matrix, to_frames
from slipstream.errors import FrameRefused, RuntimeFault, WaitLimit
from slipstream.plan import Plan
from slipstream.runtime.exchange.aggregator import Aggregator, PublishMean
from slipstream.runtime.exchange.channel import Slots
from slipstream.runtime.exchange.payloads.contributions import ClosedRound, Group
from slipstream.runtime.exchange.results import ResultWriter
from slipstream.runtime.exchange.round_sender import RoundSender
from slipstream.runtime.exchange.send_buffers import Loan, SendBuffers
from slipstream.runtime.exchange.send_context import SendContext
from slipstream.runtime.exchange.unit_state import Answer, UnitState, fresh
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import Early, Message, Publish, Push, checksum
from slipstream.types import Buffer, Chunk, EncodeContext, Rank

LEAVING_PAUSE_S = 0.0005
ALONE = SendContext()


class RoundChannel:
    """All units of a plan that are sent over links; implements ``Channel`` and ``LayerChannel``.

    Args:
        rank: This worker's number in the plan.
        plan: The decisions for every tensor.
        member: Sends and receives.
        slots: The tensors that are sent and received.
        math: Computes gradients of layers in compact form, if the plan has any.
        colocated: Servers on this host; traffic with them is not counted.
        context: Facts that are sent with contributions.
        limit_s: The limit on each wait for results.
    """

    takes_early = takes_encoded = True

    def __init__(
        self,
        rank: int,
        plan: Plan,
        member: Endpoint,
        slots: Slots,
        *,
        math: LayerMath | None = None,
        colocated: Collection[str] = (),
        context: SendContext = ALONE,
        limit_s: float,
    ) -> None:
        self.rank = rank
        self.plan = plan
        self.step = 0
        self.wait_s = 0.0
        self._context = context
        self._sender = RoundSender(rank, plan, member, colocated)
        self.sent, self.received = self._sender.sent, self._sender.received
        self._member, self._slots = member, slots
        self._results = ResultWriter(plan, slots, math)
        self._limit_s = limit_s
        self._states = {unit.index: fresh(unit, plan) for unit in plan.over_links()}
        self._of_tensor: list[list[int]] = [[] for _ in plan.specs]
        self._awaited_by: list[list[UnitState]] = [[] for _ in plan.specs]  # layers, too
        for unit in plan.over_links():
            for tensor in unit.tensors:
                self._awaited_by[tensor].append(self._states[unit.index])
                if unit.layer is None:
                    self._of_tensor[tensor].append(unit.index)
        self._arrived: set[int] = set()  # units with a complete answer
        self._fired: set[int] = set()
        self._skipped: Collection[int] = ()
        self._layers: Collection[int] | None = None  # units sent in compact form; None: all
        self._unwritten: dict[int, set[int]] = {}  # by tensor: units
        self._made_round = 0  # this worker has contributed to all rounds before
        self._told_round = 0  # results of all rounds before have arrived
        self._buffers = SendBuffers()
        self._forwarding = self._sender.forwarding
        self._aggregator = Aggregator(rank, plan, PublishMean(), congested=context.congested)
        self._collector = self._aggregator.collector
        member.on(Publish, self._on_publish)
        member.on(Push, self._on_push)
        member.on(Early, self._on_early)

    def memories(self, chunk: Chunk) -> Sequence[Any]:
        """What this worker has not sent of a chunk's segments; None if the codec sends
        everything."""
        state = self._states.get(self.plan.places[chunk.index][0])
        if state is None or state.unit.layer is not None:
            return [None] * len(chunk.segments)
        return state.kept(chunk)

    def held_memories(self, chunk: Chunk) -> Sequence[Any]:
        """What this worker has not sent of the results of a chunk that it holds for all workers."""
        return self._aggregator.memories(chunk.index)

    def forget_residuals(self) -> None:
        """Other weights were loaded: the residuals belong to the weights before."""
        for state in self._states.values():
            state.covered = [1] * len(state.covered)
            for residual in state.residuals:
                if residual is not None:
                    residual.clear()
        self._aggregator.forget_residuals()

    # ---- contributing (the training thread)

    def ready(self, tensor: int) -> None:
        if tensor in self._fired:
            raise completed_twice(self.plan.specs[tensor].name)
        self._fired.add(tensor)
        for index in self._of_tensor[tensor]:
            state = self._states[index]
            state.unready -= 1
            if not state.unready:
                self._push_segments(state)

    def skip_round(self, tensors: Collection[int]) -> None:
        self._skipped = tensors

    def travel_compact(self, units: Collection[int]) -> None:
        """Send these layers in compact form, from this round on until the next call."""
        self._layers = units

    def flush(self) -> None:
        for tensor, units in enumerate(self._of_tensor):
            if units and tensor not in self._fired and tensor not in self._skipped:
                self.ready(tensor)
        self._fired.clear()
        for state in self._states.values():
            unit = state.unit
            travels = self._layers is None or unit.index in self._layers
            if unit.layer is not None and travels and not state.pushed:
                self.ready_layer(unit.index, None)
            state.unready, state.pushed = len(unit.tensors), False

    def _push_segments(self, state: UnitState) -> None:
        self._await_turn(state)
        ctx = EncodeContext(self.step + 1, self._context.rate(), self._context.congested())
        groups: list[Group] = []
        codec = state.payload.codec(state.begun)
        for place, residual in zip(state.unit.places, state.residuals, strict=True):
            values = self._slots.source(place.tensor)
            if values is None or codec is None:
                groups.append(None)
            else:
                part = values.part(place.start, place.stop)
                groups.append(codec.encode(part, residual, ctx))
        if self.plan.consistency.under_way > 1:
            # The next step's gradient may be ready before this one has left.
            groups = [g and [bytes(memoryview(frame)) for frame in g] for g in groups]
        if any(residual is not None for residual in state.residuals):
            state.sent, state.sent_by = tuple(groups), codec
        weights = self._weights(state, groups)
        self._push(state, groups, ctx.rate, weights=weights if max(weights) > 1 else ())

    def _weights(self, state: UnitState, groups: Sequence[Group]) -> list[int]:
        """By place: how many contributions of a worker to a round it is the sum of."""
        weights = [1] * len(state.unit.places)
        if self._context.weight is not None:
            weights = [self._context.weight(place.tensor) for place in state.unit.places]
        if self.plan.weighs_late:
            sent = zip(weights, state.covered, groups, strict=True)
            weights = [w if group is None else w * covered for w, covered, group in sent]
        return weights

    # ---- layers in compact form (the training thread)

    def buffer(self, unit: int, place: int, nbytes: int) -> Loan:
        """Memory for one of a layer's matrices, free for writing."""
        return self._buffers.take((unit, place), nbytes)

    def early(self, unit: int, matrix: Matrix, loan: Loan) -> int:
        """Send a layer's first matrix in the forward pass; returns the round that it is for."""
        state = self._states[unit]
        self._await_turn(state)
        frames = to_frames(matrix)
        body = Early(unit, state.begun, checksum(frames))
        state.ahead_for = state.begun
        loan.sent(self._sender.contribute(state, body, frames))
        state.loans.setdefault(state.begun, []).append(loan)
        return state.begun

    def early_round(self, unit: int) -> int | None:
        """The open round, if its first matrix was sent."""
        state = self._states[unit]
        return state.begun if state.ahead_for == state.begun else None

    def ready_layer(
        self, unit: int, matrices: Sequence[tuple[Matrix, Loan]] | None, *, early: bool = False
    ) -> None:
        """A layer's contribution to this round is final; None: the worker did not use it.

        ``early``: the first matrix was already sent, and only the second is given.
        """
        state = self._states[unit]
        if state.pushed:
            assert state.unit.layer is not None
            raise completed_twice(state.unit.layer.name)
        state.pushed = True
        self._await_turn(state)
        frames = [frame for matrix, _ in matrices or () for frame in to_frames(matrix)]
        round_ = state.begun
        tickets = self._push(state, [frames], self._context.rate(), early=early)
        for _, loan in matrices or ():
            loan.sent(tickets)
            state.loans.setdefault(round_, []).append(loan)
        if not state.on_mesh:
            state.release(round_)

    # ---- sending

    def _await_turn(self, state: UnitState) -> None:
        if not self.plan.consistency.may_start(state.progress):
            self.wait(state.unit.tensors)

    def _push(
        self,
        state: UnitState,
        groups: Sequence[Sequence[Buffer] | None],
        rate: float,
        *,
        early: bool = False,
        weights: Sequence[int] = (),
    ) -> list[Ticket]:
        frames = [frame for group in groups for frame in group or ()]
        body = Push(
            state.unit.index,
            state.begun,
            self.step,
            [len(group or ()) for group in groups],
            checksum(frames),
            None if self._context.settings is None else self._context.settings(),
            state.committed,
            rate,
            early,
            list(weights),
        )
        state.begun += 1
        self._made_round = max(self._made_round, state.begun)
        # A layer that took another route for a while has fewer rounds than other units.
        is_layer = state.unit.layer is not None
        self._member.round = max(self._member.round, state.begun, is_layer * (self.step + 1))
        tickets = self._sender.contribute(state, body, frames)
        if not is_layer:
            state.leaving += tickets
        return tickets

    # ---- results (the training thread)

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        pending = self._wanted(tensors)
        begun = time.monotonic()
        while late := [state for state in pending if not self._may_start(state)]:
            self._member.wait_until(
                lambda: bool(self._awaited()),
                what=f"the results of round {max(state.begun for state in late)}",
                limit_s=self._limit_s,
            )
            for state in self._awaited():
                self._write_newest(state)
        self.wait_s += time.monotonic() - begun

    def _awaited(self) -> list[UnitState]:
        """Units whose result has arrived and which block the next round."""
        arrived = [self._states[index] for index in sorted(self._arrived)]
        return [state for state in arrived if not self._may_start(state)]

    def _wanted(self, tensors: Iterable[int] | None) -> list[UnitState]:
        if tensors is None:
            return list(self._states.values())
        return [state for tensor in tensors for state in self._awaited_by[tensor]]

    def has_result(self, tensor: int) -> bool:
        """Whether every result of a tensor that the next round needs is written."""
        return all(map(self._may_start, self._awaited_by[tensor]))

    def _may_start(self, state: UnitState) -> bool:
        return self.plan.consistency.may_start(state.progress)

    def drain(self) -> None:
        """Wait until the results contain all that this worker has contributed."""
        begun = time.monotonic()
        while late := [s for s in self._states.values() if s.begun > s.committed]:
            self._member.wait_until(
                lambda: bool(self._arrived),
                what=f"the results of round {max(state.begun for state in late)}",
                limit_s=self._limit_s,
            )
            self.refresh()
        self.wait_s += time.monotonic() - begun

    def refresh(self) -> None:
        """Between steps: apply what has arrived. Within a step, a layer must not change."""
        for index in sorted(self._arrived):
            self._write_newest(self._states[index])

    def _write_newest(self, state: UnitState) -> None:
        answer = state.newest
        if answer is None:
            return
        with self._member.changed:
            older = sorted(round_ for round_ in state.answers if round_ < answer.round)
            skipped = [state.answers.pop(round_) for round_ in older]
            del state.answers[answer.round]
            if state.newest is None:
                self._arrived.discard(state.unit.index)
        self._wait_until_left(state)
        for each in skipped:
            for _, (body, frames) in sorted(each.parts.items()):
                state.payload.open(body, frames, None)  # later rounds need what it says
        for tensor in self._write(state, answer):
            # Full weights of a tensor's chunks may be of different rounds, so none waits for
            # another.
            unwritten = self._unwritten.setdefault(tensor, set(self._of_tensor[tensor]))
            unwritten.discard(state.unit.index)
            if not unwritten or not self.plan.delivers_every_result:
                del self._unwritten[tensor]
                self._results.finish(tensor)

    @property
    def told_round(self) -> int:
        """The open round, as far as this worker knows."""
        return self._told_round

    def open_round(self) -> int:
        """The round that this worker makes next; waits until it is known."""
        begun = time.monotonic()
        self._member.wait_until(
            lambda: self._told_round >= self._made_round,
            what=f"word of what comes after round {self._made_round - 1}",
            limit_s=self._limit_s,
        )
        self.wait_s += time.monotonic() - begun
        return self._told_round

    def _wait_until_left(self, state: UnitState) -> None:
        """Wait until this worker's contribution has left, since the result overwrites its memory.

        A server that answers has received all of it; a mesh peer may still be waiting for its copy.
        New weights are written elsewhere, or into a host's memory, of which that server has all.
        """
        if self.plan.update.holder_applies:
            state.leaving.clear()
        deadline = time.monotonic() + self._limit_s
        while not all(ticket.done for ticket in state.leaving):
            self._member.check()
            if time.monotonic() > deadline:
                raise WaitLimit("a contribution to leave", self._limit_s, [])
            self._member.pause(LEAVING_PAUSE_S)
        state.leaving.clear()

    def _write(self, state: UnitState, answer: Answer) -> list[int]:
        """Write a result into place; returns its tensors, also those without a contribution."""
        state.committed = answer.round + 1
        # A late worker continues with the open round.
        state.begun = max(state.begun, answer.round + 1)
        state.answered(dropped=answer.dropped(self.rank))
        touched = self._results.write(state, answer)
        state.release(answer.round)
        return touched

    # ---- the receiving thread

    def _on_publish(self, message: Message[Publish]) -> None:
        body = message.body
        state = self._states.get(body.unit)
        if state is None or body.part >= state.payload.parts:
            raise FrameRefused(f"a result for unit {body.unit}, which does not travel links")
        if not self._forwarding.may_send(message.sender, state.unit):
            raise FrameRefused(f"{message.sender} does not hold unit {body.unit}")
        if self._has(state, body):
            return
        self._admit(message.sender, state, body, message.frames)
        self._sender.forward(state, body, message.frames)  # first, so that receivers do not wait
        if self._is_for_others(state, body):
            return
        state.seen[body.part] = body.round + 1
        with self._member.changed:
            self._told_round = max(self._told_round, body.round + 1)
            answer = state.answers.setdefault(body.round, Answer(body.round))
            answer.parts[body.part] = (body, message.frames)
            if answer.complete(state.payload.parts):
                self._note_arrived(state, answer)
                self._member.changed.notify_all()

    def _has(self, state: UnitState, body: Publish) -> bool:
        """Whether this result is a duplicate: a holder resends results that a worker may lack, and
        direct results may also arrive through other workers."""
        sent_again = self.plan.consistency.goes_on and self.plan.delivers_every_result
        may_repeat = sent_again or state.route.topology.relays
        return may_repeat and body.round < state.seen.get(body.part, 0)

    def _is_for_others(self, state: UnitState, body: Publish) -> bool:
        """Whether this worker only forwards a result. Where workers forward, all make every round.
        So if it has not begun the result's round, it has left training."""
        return state.route.topology.relays and body.round >= state.begun

    def _fits(self, state: UnitState, body: Publish) -> bool:
        return self.plan.consistency.follows(
            seen=state.seen.get(body.part, 0), begun=state.begun, result=body.round
        )

    def lose(self, rank: Rank) -> None:
        """A worker is lost: its children get results another way."""
        self._forwarding.lose(rank)
        self._park(self._collector.retire(rank))

    def _admit(
        self, sender: str, state: UnitState, body: Publish, frames: Sequence[Buffer]
    ) -> None:
        if not self._is_for_others(state, body) and not self._fits(state, body):
            raise FrameRefused(f"a result for round {body.round} of unit {body.unit}")
        state.payload.examine_answer(body, frames)
        if checksum(frames) != body.crc:
            raise FrameRefused(f"checksum of unit {body.unit} does not match its bytes")
        self._sender.count(self.received, sender, state.route.scheme, frames)

    def _on_early(self, message: Message[Early]) -> None:
        """A peer's first matrix of a layer, where workers hold layers themselves (mesh)."""
        self._collector.early(self._peer(message), message.body, message.frames)
        scheme = self.plan.route(self.plan.units[message.body.unit]).scheme
        self._sender.count(self.received, message.sender, scheme, message.frames)

    def _peer(self, message: Message[Any]) -> Rank:
        return self.plan.cluster.worker(message.sender)

    def _on_push(self, message: Message[Push]) -> None:
        """A peer's contribution, where workers hold units themselves (mesh)."""
        closed = self._collector.push(self._peer(message), message.body, message.frames)
        scheme = self.plan.route(self.plan.units[message.body.unit]).scheme
        self._sender.count(self.received, message.sender, scheme, message.frames)
        self._park(closed)

    def _park(self, rounds: Iterable[ClosedRound]) -> None:
        """The training thread combines what a mesh has collected, directly into place. If this
        worker also publishes the result to others, it sends the result to itself as well, and
        forwards it."""
        own = self.plan.cluster.name(self.rank)
        for closed in rounds:
            state = self._states[closed.unit.index]
            if self._forwarding.receivers(self.rank, self.rank, state.unit):
                for result in self._aggregator.publish([closed]):
                    self._member.send(own, result.body, result.frames)
                continue
            with self._member.changed:
                self._told_round = max(self._told_round, closed.round + 1)
                answer = state.answers[closed.round] = Answer(closed.round, closed=closed)
                self._note_arrived(state, answer)
                self._member.changed.notify_all()

    def _note_arrived(self, state: UnitState, answer: Answer) -> None:
        """An answer is complete; called with the lock held."""
        self._arrived.add(state.unit.index)


def completed_twice(name: str) -> RuntimeFault:
    return RuntimeFault(
        f"the gradient of {name!r} was completed twice in one backward pass (re-entrant "
        "checkpointing of a shared weight or layer does this, and so does a pass that broke off, "
        "when it is run again): use checkpoint(..., use_reentrant=False) or a strategy with "
        "overlap=False"
    )
