"""The worker's half of a round over point-to-point links.

Gradients go in as tensors become ready; a chunk leaves when its last tensor is. Results are parked
by the receiving thread and written by the training thread while it waits, so that no two threads
touch a tensor.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

from slipstream.consistency import Progress
from slipstream.errors import FrameRefused, RuntimeFault, WaitLimit
from slipstream.runtime.holder import Holder, PublishMean, split_frames
from slipstream.runtime.member import Member
from slipstream.strategy import Plan
from slipstream.topologies import Topology
from slipstream.transports.protocol import Ticket
from slipstream.transports.wire import Message, Publish, Push, Settings, checksum
from slipstream.types import Buffer, Chunk, Hop, Rank, Segment, Values

LEAVING_PAUSE_S = 0.0005


class Slots(Protocol):
    """The live tensors behind a plan's specs."""

    def source(self, tensor: int) -> Values | None:
        """What this worker contributes, or None."""
        ...

    def sink(self, tensor: int) -> Values:
        """Where the result goes."""
        ...

    def settle(self, tensor: int) -> None:
        """The whole result of this round is in the sink."""
        ...


class Exchange(Protocol):
    """One road's worth of rounds, as the gradient tap drives it."""

    step: int  # of the training loop, so that holders can tell when workers fall out of it
    wait_s: float
    sent: Counter[str]  # payload bytes by scheme, without what stays beside this worker
    received: Counter[str]

    def ready(self, tensor: int) -> None:
        """The tensor's contribution to this round is final."""
        ...

    def excuse(self, tensors: Collection[int]) -> None:
        """These travel another way, from this round on until told otherwise."""
        ...

    def flush(self) -> None:
        """Everything not ready yet contributes what it has; the round is complete here."""
        ...

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Until the results of these tensors (default all) are in their sinks."""
        ...

    def refresh(self) -> None:
        """Between steps: take what has come unasked."""
        ...


class LinkExchange:
    """All chunks of a plan that travel over links; implements ``Exchange``."""

    def __init__(
        self,
        rank: int,
        plan: Plan,
        member: Member,
        slots: Slots,
        *,
        beside: Collection[str] = (),
        limit_s: float,
    ) -> None:
        self.rank = rank
        self.plan = plan
        self.step = 0
        self.wait_s = 0.0
        self.settings: Callable[[], Settings | None] = lambda: None
        self.rate: Callable[[], float] = lambda: 1.0  # the learning rate, as part of the highest
        self.narrow: Callable[[], bool] = lambda: False  # whether links out lack bandwidth
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._member = member
        self._slots = slots
        self.beside = {plan.cluster.name(rank), *beside}
        self._limit_s = limit_s
        self._chunks = {c.index: c for c in plan.chunks if plan.route(c).road == "links"}
        self._of_tensor = [
            [i for i in row if i in self._chunks] for row in plan.layout.of_tensor(len(plan.specs))
        ]
        self._rounds = dict.fromkeys(self._chunks, 0)  # contributions made
        self._committed = dict.fromkeys(self._chunks, 0)  # results written
        self._seen = dict.fromkeys(self._chunks, 0)  # results received
        self._arrived: dict[int, tuple[Publish, Sequence[Buffer]]] = {}
        self._leaving: dict[int, list[Ticket]] = {index: [] for index in self._chunks}
        self._memories = {
            i: [plan.route(c).push.init(s.numel, c.dtype) for s in c.segments]
            for i, c in self._chunks.items()
        }
        self._unready = self._fresh_counts()
        self._fired: set[int] = set()
        self._excused: Collection[int] = ()
        self._unwritten: dict[int, set[int]] = {}  # by tensor: chunks
        self._absent: dict[int, list[Segment]] = {}  # by tensor: what nobody contributed to
        self._made_round = 0  # this worker's contributions were to the rounds before
        self._told_round = 0  # results have come of the rounds before
        self._sinks: dict[int, Values] = {}
        self._topologies: list[Topology] = [route.topology for route in plan.routes]
        self._holder = Holder(rank, plan, PublishMean())
        member.on(Publish, self._on_publish)
        member.on(Push, self._on_push)

    def memories(self, chunk: Chunk) -> Sequence[Any]:
        """What the codec remembers of a chunk's segments on this link; None for nothing."""
        return self._memories.get(chunk.index, [None] * len(chunk.segments))

    def _fresh_counts(self) -> dict[int, int]:
        return {i: len({s.tensor for s in c.segments}) for i, c in self._chunks.items()}

    # ---- the training thread

    def ready(self, tensor: int) -> None:
        if tensor in self._fired:
            raise RuntimeFault(
                f"the gradient of {self.plan.specs[tensor].name!r} was completed twice in one "
                "backward pass (re-entrant checkpointing of a shared weight does this): use "
                "checkpoint(..., use_reentrant=False) or a strategy with overlap=False"
            )
        self._fired.add(tensor)
        for index in self._of_tensor[tensor]:
            self._unready[index] -= 1
            if not self._unready[index]:
                self._push(self._chunks[index])

    def excuse(self, tensors: Collection[int]) -> None:
        self._excused = tensors

    def expect(self, tensors: Iterable[int]) -> None:
        """Their contributions to this round reach the holder in another form."""
        for index in {index for tensor in tensors for index in self._of_tensor[tensor]}:
            if not self._may_start(index):
                self.wait({segment.tensor for segment in self._chunks[index].segments})
            self._rounds[index] += 1

    def flush(self) -> None:
        for tensor, chunks in enumerate(self._of_tensor):
            if chunks and tensor not in self._fired and tensor not in self._excused:
                self.ready(tensor)
        self._fired.clear()
        self._unready = self._fresh_counts()

    def _push(self, chunk: Chunk) -> None:
        if not self._may_start(chunk.index):
            self.wait({segment.tensor for segment in chunk.segments})
        codec = self.plan.route(chunk).push
        frames: list[Buffer] = []
        present = bytearray()
        memories = self._memories[chunk.index]
        hop = Hop(self.step + 1, self.rate(), self.narrow())
        for segment, memory in zip(chunk.segments, memories, strict=True):
            values = self._slots.source(segment.tensor)
            present.append(values is not None)
            if values is not None:
                frames.extend(codec.encode(values.part(segment.start, segment.stop), memory, hop))
        if self.plan.consistency.under_way > 1:
            # The next step's gradient may come before this one has left.
            frames = [bytes(memoryview(frame)) for frame in frames]
        body = Push(
            chunk.index,
            self._rounds[chunk.index],
            self.step,
            bytes(present),
            checksum(frames),
            self.settings(),
            self._committed[chunk.index],
            hop.rate,
        )
        self._rounds[chunk.index] += 1
        self._made_round = max(self._made_round, self._rounds[chunk.index])
        # A chunk that went another way for a while has had fewer rounds than others.
        self._member.round = max(self._member.round, self._rounds[chunk.index])
        self._send(chunk, body, frames)

    def _send(self, chunk: Chunk, body: Push, frames: Sequence[Buffer]) -> None:
        priority = self.plan.priority(chunk)
        scheme = self.plan.route(chunk).scheme
        for node in self.plan.holders[chunk.index]:
            peer = self.plan.cluster.name(node)
            self._count(self.sent, peer, scheme, frames)
            ticket = self._member.send(peer, body, frames, priority=priority)
            if ticket is not None:
                self._leaving[chunk.index].append(ticket)

    def _count(
        self, counter: Counter[str], peer: str, scheme: str, frames: Sequence[Buffer]
    ) -> None:
        if peer not in self.beside:
            counter[scheme] += sum(memoryview(frame).nbytes for frame in frames)

    def _may_start(self, index: int) -> bool:
        progress = Progress(round=self._rounds[index], committed=self._committed[index])
        return self.plan.consistency.may_start(progress)

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        if tensors is None:
            wanted: Iterable[int] = self._chunks
        else:
            wanted = {index for tensor in tensors for index in self._of_tensor[tensor]}
        pending = {index for index in wanted if not self._may_start(index)}
        if not pending:
            return
        begun = time.monotonic()
        while pending:
            self._member.wait_until(
                lambda: bool(self._awaited()),
                what=f"the results of round {max(self._rounds[i] for i in pending)}",
                limit_s=self._limit_s,
            )
            self._write_arrived(self._awaited())
            pending = {index for index in pending if not self._may_start(index)}
        self.wait_s += time.monotonic() - begun

    def drain(self) -> None:
        """Until all that this worker has contributed is in the results."""
        begun = time.monotonic()
        while late := [i for i in self._chunks if self._rounds[i] > self._committed[i]]:
            self._member.wait_until(
                lambda: bool(self._arrived),
                what=f"the results of round {max(self._rounds[i] for i in late)}",
                limit_s=self._limit_s,
            )
            self._write_arrived(list(self._arrived))
        self.wait_s += time.monotonic() - begun

    def refresh(self) -> None:
        """Between steps: take what has come unasked. Within one, a layer must not change."""
        self._write_arrived(list(self._arrived))

    def _awaited(self) -> list[int]:
        return [index for index in list(self._arrived) if not self._may_start(index)]

    def _write_arrived(self, chunks: Iterable[int]) -> None:
        for index in chunks:
            body, frames = self._arrived.pop(index)
            self._let_go(index)
            self._write(self._chunks[index], body, frames)

    @property
    def told_round(self) -> int:
        """The round that is open, as far as this worker has been told."""
        return self._told_round

    def open_round(self) -> int:
        """The round that this worker is to make next; waits for word of it."""
        begun = time.monotonic()
        self._member.wait_until(
            lambda: self._told_round >= self._made_round,
            what=f"word of what comes after round {self._made_round - 1}",
            limit_s=self._limit_s,
        )
        self.wait_s += time.monotonic() - begun
        return self._told_round

    def _let_go(self, index: int) -> None:
        """Until this worker's contribution has left: the result overwrites its memory.

        A server has all of it when it answers; a mesh peer may still be waiting for its copy. New
        weights go elsewhere.
        """
        if self.plan.update == "server":
            self._leaving[index].clear()
        deadline = time.monotonic() + self._limit_s
        while not all(ticket.done for ticket in self._leaving[index]):
            self._member.check()
            if time.monotonic() > deadline:
                raise WaitLimit("a contribution to leave", self._limit_s, [])
            self._member.pause(LEAVING_PAUSE_S)
        self._leaving[index].clear()

    def _write(self, chunk: Chunk, body: Publish, frames: Sequence[Buffer]) -> None:
        route = self.plan.route(chunk)
        groups = split_frames(chunk, body.present, frames, route.publish.frames)
        self._committed[chunk.index] = body.round + 1
        # Who was late goes on with the round that is open.
        self._rounds[chunk.index] = max(self._rounds[chunk.index], body.round + 1)
        for segment, group in zip(chunk.segments, groups, strict=True):
            tensor = segment.tensor
            unwritten = self._unwritten.setdefault(tensor, set(self._of_tensor[tensor]))
            unwritten.discard(chunk.index)
            if group is None:
                self._absent.setdefault(tensor, []).append(segment)
            else:
                if tensor not in self._sinks:
                    self._sinks[tensor] = self._slots.sink(tensor)
                out = self._sinks[tensor].part(segment.start, segment.stop)
                route.publish.decode_into(group, out)
            # Results that are whole are of different rounds, and none is waited for.
            if not unwritten or not self.plan.together:
                self._settle(tensor)

    def _settle(self, tensor: int) -> None:
        """All of a tensor's result has come, if there is any."""
        del self._unwritten[tensor]
        absent, sink = self._absent.pop(tensor, []), self._sinks.pop(tensor, None)
        if sink is not None:
            self._clear(tensor, sink, absent)
            self._slots.settle(tensor)

    def _clear(self, tensor: int, sink: Values, absent: Sequence[Segment]) -> None:
        """Nobody contributed to these pieces: who did to the others may have died in between."""
        if self.plan.specs[tensor].role == "parameter":
            for segment in absent:
                sink.part(segment.start, segment.stop).data[:] = 0

    # ---- the receiving thread

    def _on_publish(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Publish)
        if body.chunk not in self._chunks:
            raise FrameRefused(f"a result for chunk {body.chunk}, which does not travel links")
        if not self._may_pass_on(message.sender, self._chunks[body.chunk]):
            raise FrameRefused(f"{message.sender} does not hold chunk {body.chunk}")
        if self._has(body):
            return
        self._admit(message.sender, body, message.frames)
        self._pass_on(body, message.frames)
        self._seen[body.chunk] = body.round + 1
        with self._member.changed:
            self._told_round = max(self._told_round, body.round + 1)
            self._park(body, message.frames)
            self._member.changed.notify_all()

    def _has(self, body: Publish) -> bool:
        """Whether this came before: it is sent again where somebody may not have got it."""
        sent_again = self.plan.outlives_workers and self.plan.together
        return sent_again and body.round < self._seen[body.chunk]

    def _fits(self, body: Publish) -> bool:
        return self.plan.consistency.follows(
            seen=self._seen[body.chunk], begun=self._rounds[body.chunk], result=body.round
        )

    def _park(self, body: Publish, frames: Sequence[Buffer]) -> None:
        self._arrived[body.chunk] = (body, frames)

    def _pass_on(self, body: Publish, frames: Sequence[Buffer]) -> None:
        """To those who get it through this worker: as it came, and before anything else."""
        cluster, chunk = self.plan.cluster, self._chunks[body.chunk]
        topology = self._topologies[chunk.route]
        for holder in self.plan.holders[body.chunk]:
            for node in topology.fanout(self.rank, holder, cluster):
                name = cluster.name(node)
                self._count(self.sent, name, self.plan.route(chunk).scheme, frames)
                self._member.send(name, body, frames, priority=self.plan.priority(chunk))

    def lose(self, rank: Rank) -> None:
        """A worker is gone: whoever got results through it gets them otherwise."""
        self._topologies = [topology.without(rank) for topology in self._topologies]
        self._holder.retire(rank)

    def _admit(self, sender: str, body: Publish, frames: Sequence[Buffer]) -> None:
        chunk = self._chunks[body.chunk]
        if not self._fits(body):
            raise FrameRefused(f"a result for round {body.round} of chunk {chunk.index}")
        codec = self.plan.route(chunk).publish
        groups = split_frames(chunk, body.present, frames, codec.frames)
        for segment, group in zip(chunk.segments, groups, strict=True):
            if group is not None:
                codec.examine(group, segment.numel, chunk.dtype)
        if checksum(frames) != body.crc:
            raise FrameRefused(f"checksum of chunk {chunk.index} does not match its bytes")
        self._count(self.received, sender, self.plan.route(chunk).scheme, frames)

    def _may_pass_on(self, sender: str, chunk: Chunk) -> bool:
        """The holder; or a worker, where these pass things on: who does changes with losses."""
        cluster, holders = self.plan.cluster, self.plan.holders[chunk.index]
        if sender in {cluster.name(holder) for holder in holders}:
            return True
        relays = self.plan.route(chunk).topology.relays
        return relays and 0 <= rank_of(sender) < cluster.workers

    def _on_push(self, message: Message) -> None:
        """A peer's contribution, where workers hold chunks themselves (mesh)."""
        assert isinstance(message.body, Push)
        rank = rank_of(message.sender)
        results = self._holder.push(rank, message.body, message.frames)
        scheme = self.plan.route(self.plan.chunks[message.body.chunk]).scheme
        self._count(self.received, message.sender, scheme, message.frames)
        own = self.plan.cluster.name(self.rank)
        for result in results:
            self._on_publish(Message(own, result.body, result.frames))


def rank_of(name: str) -> int:
    """2 for ``rank 2``; -1 for anything else."""
    kind, _, number = name.partition(" ")
    return int(number) if kind == "rank" and number.isdecimal() and len(number) < 10 else -1
