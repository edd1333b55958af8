"""Partial exchange: every worker sends its updates to every peer, one partition at a time.

Updates accumulate for each peer, and ``slice_sender`` sends partitions of them. Received
partitions are added to the weights as they arrive, on the receiving thread.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

import numpy as np

from slipstream.codecs.partition import Accumulator, unpacked
from slipstream.codecs.residual import Floats
from slipstream.errors import FrameRefused, contribution_of
from slipstream.methods import PartialExchange
from slipstream.runtime.gossip.membership_events import Applicant, Back, Gone
from slipstream.runtime.gossip.numbered_links import NumberedLinks
from slipstream.runtime.gossip.pace import Pace
from slipstream.runtime.gossip.slice_sender import MESSAGE_VALUES, SliceSender
from slipstream.runtime.members.member import Member
from slipstream.transports.wire import HandoverDone, Message, Part, Tail, Welcome, checksum
from slipstream.types import Rank, rank_of

NEVER = 1 << 62  # drains of a peer that has finished, so that nobody waits for it
SCHEME = "slices"


class Weights(Protocol):
    """All trained weights as one vector."""

    @property
    def numel(self) -> int: ...

    def add(self, start: int, values: Floats) -> None:
        """Add to the weights from ``start`` on; from any thread."""
        ...

    def whole(self) -> Floats:
        """Return a copy of all weights."""
        ...

    def clear(self) -> None:
        """Set all weights to zero; received weights are then added."""
        ...

    def stepped(self, step: Callable[[], object], coefficient: float) -> Floats:
        """Run ``step``, scale its change of the weights, and return the scaled change."""
        ...


class GossipChannel:
    """One worker's end of all its links; implements ``Channel``.

    The training thread owns the accumulators. The receiving thread adds received partitions to the
    weights and reports, in order, which peers have died and come back.

    Args:
        rank: This worker's rank.
        rule: The rule of partial exchange.
        member: This worker's member, which sends and receives.
        weights: All trained weights.
        peers: The ranks that exchange with this one.
        pace: Chooses the number of partitions.
        limit_s: The longest wait.
        incarnation: How often this worker was started again.
    """

    def __init__(
        self,
        rank: Rank,
        rule: PartialExchange,
        member: Member,
        weights: Weights,
        peers: Collection[Rank],
        pace: Pace,
        *,
        limit_s: float,
        incarnation: int = 0,
    ) -> None:
        self.step = 0
        self.wait_s = 0.0
        self.received: Counter[str] = Counter()
        self.made = 0  # steps of this worker
        self.merged = 0  # how often a partition had to wait for the one before
        self.weights, self.pace = weights, pace
        self.links = NumberedLinks(member, incarnation)
        self.entered = not incarnation  # the peers have admitted this worker
        self._admit: Callable[[Applicant], None] = lambda applicant: None
        self.rule, self._member = rule, member
        self._limit_s = limit_s
        self._begun_s = time.monotonic()
        # ---- used by the training thread
        self._everybody = frozenset(peers)
        self._sender = SliceSender(rank, rule, pace.partitions, peers, weights.numel, self.links)
        self._drains = 0  # number of drains begun
        # By peer: the last drain after which the peer was sent a ``Tail``.
        self._tails_sent: dict[Rank, int] = dict.fromkeys(peers, 0)
        self._final = False
        self._waited_s = 0.0
        self._applicants: list[Applicant] = []
        # ---- under the member's lock
        self._events: list[Gone | Back | Applicant] = []
        # By peer: the steps that its partitions report; a restarted worker knows none yet.
        self._peer_steps = {} if incarnation else dict.fromkeys(peers, 0)
        self._tails = dict.fromkeys(peers, 0)  # by peer: the drains that it has completed
        # ---- under its own lock, at rank 0: by restarted worker, the peers whose updates rank 0
        # still forwards to it
        self._arriving = threading.Lock()
        self._forwarding: dict[Rank, set[Rank]] = {}
        member.on(Part, self._on_part)
        member.on(Tail, self._on_tail)
        member.on(HandoverDone, self._on_handover_done)

    @property
    def sent(self) -> Counter[str]:
        return Counter({SCHEME: self.links.sent_bytes})

    @property
    def partitions(self) -> int:
        return self._sender.partitions

    @property
    def workers(self) -> int:
        """The number of live workers."""
        return len(self._sender.peers) + 1

    @property
    def accumulators(self) -> list[Accumulator]:
        """The values not yet sent to peers; each accumulator needs as much memory as the model."""
        return self._sender.accumulators

    # ---- the training thread

    def give(self, update: Floats) -> None:
        """Take this step's update, which is already in this worker's own weights."""
        self._sender.add(update)
        self.made += 1
        self._member.round = self.made
        held_up = not self.offer()
        self.merged += held_up
        before_s, self._waited_s = self._waited_s, self.wait_s
        partitions = self.pace.stepped(self.wait_s - before_s, held_up)
        if partitions != self.partitions and not self._sender.is_turning_over:
            self._sender.start_rotation(partitions)

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        """Wait until the next step may begin; partitions that had to wait are sent meanwhile."""
        self._member.check()
        self._until(self.may_begin, "another worker's step", self._behind)

    def drain(self, *, final: bool = False) -> None:
        """Wait until every worker has all updates of all workers; all workers call it."""
        self.begin_drain(final=final)
        self._until(self.drained, "everybody's last updates", self._undrained)

    def begin_drain(self, *, final: bool = False) -> None:
        """Begin a drain; with ``final`` this worker makes no more steps."""
        self.offer()  # also applies membership events
        self._drains += 1
        self._final = final
        self._sender.start_rotation(self.pace.partitions)

    def drained(self) -> bool:
        """Return whether this worker's updates were sent, and those of all peers have arrived."""
        self._send_tails()
        return not self._sender.is_turning_over and not self._undrained()

    def _send_tails(self) -> None:
        if self._sender.is_turning_over:
            return
        for peer in self._sender.peers:
            if self._tails_sent[peer] < self._drains:
                self._tails_sent[peer] = self._drains
                self.links.send(peer, Tail, self._drains, self._final)

    def poll(self) -> None:
        """Send what is due while this worker waits for something else, as peers may wait for it."""
        self.offer()
        self._send_tails()

    def ready(self, tensor: int) -> None:
        """Do nothing: updates are sent after the optimizer's step."""

    def skip_round(self, tensors: Collection[int]) -> None:
        """Do nothing: every tensor is sent by partial exchange."""

    def flush(self) -> None:
        """Do nothing: ``give`` takes complete updates."""

    def refresh(self) -> None:
        """Do nothing: partitions are applied as they arrive."""

    def _until(
        self, holds: Callable[[], bool], what: str, missing: Callable[[], list[str]]
    ) -> None:
        self.wait_s += self._member.poll_until(
            holds, self.offer, what=what, limit_s=self._limit_s, missing=missing
        )

    def may_begin(self) -> bool:
        with self._member.lock:
            return self.rule.may_begin(self.made, self._clocks(), self.partitions)

    def _clocks(self) -> dict[Rank, int]:
        """Return, by peer, its last known step."""
        beats = self._member.roster.rounds
        return {
            peer: self.rule.clock(steps, beats.get(f"rank {peer}", 0), self.partitions)
            for peer, steps in self._peer_steps.items()
        }

    def _behind(self) -> list[str]:
        with self._member.lock:
            clocks = self._clocks()
            slowest = min(clocks.values(), default=0)
            return [f"rank {peer}" for peer, steps in clocks.items() if steps == slowest]

    def _undrained(self) -> list[str]:
        with self._member.lock:
            return [f"rank {peer}" for peer, at in self._tails.items() if at < self._drains]

    def offer(self) -> bool:
        """Send due partitions whose predecessor has been sent; return whether all could be sent."""
        self._apply_membership_events()
        return self._sender.offer(self.made)

    def account(self) -> dict[str, Any]:
        """Return the predicted and the used bandwidth of the links."""
        elapsed_s = time.monotonic() - self._begun_s
        return self.pace.account() | {
            "used_bytes_s": self.links.sent_bytes / elapsed_s,
            "slices_merged": self.merged,
        }

    # ---- peers that die and come back (still the training thread)

    def _apply_membership_events(self) -> None:
        """Apply deaths and returns of peers.

        A restarted worker gets rank 0's weights, and from each peer its accumulator for rank 0.
        Rank 0 forwards updates that were sent to it but are not in those weights. So the restarted
        worker gets every update once: in the weights, forwarded, in an accumulator for rank 0, or
        made later.
        """
        with self._member.lock:
            events, self._events = self._events, []
        for each in events:
            self._applicants = [a for a in self._applicants if a.rank != each.rank]
            if isinstance(each, Gone):
                self._forget(each.rank)
            elif isinstance(each, Applicant):
                self._applicants.append(each)
            else:
                self._forget(each.rank)  # an earlier incarnation, if its death was not reported
                self.links.open(each.rank)
                self._include(each.rank, self._sender.owed_to(0), each.drains)
                self.links.send(0, HandoverDone, each.rank, self.links.incarnation_of(each.rank))

    def admit_with(self, admit: Callable[[Applicant], None]) -> None:
        """Admit restarted workers with this from now on; only rank 0 does."""
        self._admit = admit

    def admit_joiners(self) -> None:
        """Admit restarted workers, which begin with this step; on rank 0, at the end of a step."""
        self._apply_membership_events()
        for applicant in self._applicants:
            self._readmit(applicant)
        self._applicants = []

    def _forget(self, peer: Rank) -> None:
        self.links.close(peer)
        self._sender.forget(peer)
        self.pace.lose(f"rank {peer}")

    def _include(self, peer: Rank, owed: Floats, drains: int) -> None:
        self._sender.include(peer, owed)
        self.pace.gain(f"rank {peer}")
        self._tails_sent[peer] = drains

    def _readmit(self, applicant: Applicant) -> None:
        """Admit a restarted worker, inform all peers, and send it the weights; on rank 0."""
        rank = applicant.rank
        self._forget(rank)
        self.links.open(rank)
        with self._arriving:
            gone = {rank_of(name) for name in self._member.lost}
            self._forwarding[rank] = self._sender.peers - {rank} - gone
            snapshot = self.weights.whole()
        self._accept_incarnation(rank, applicant.incarnation, self._drains)
        self._admit(applicant)
        self._include(rank, snapshot, self._drains)

    def catch_up(self, welcome: Welcome) -> None:
        """Continue from rank 0's weights of ``welcome.steps`` steps; on the restarted worker."""
        self.made = self.step = self._member.round = welcome.steps
        self._drains = welcome.drains
        self._tails_sent = dict.fromkeys(self._tails_sent, welcome.drains)
        self.pace.bytes_s = welcome.bytes_s
        self.entered = True
        for peer in self._sender.peers - set(welcome.peers):
            self._forget(peer)

    def heard_of(self, peer: Rank) -> bool:
        """Return whether a whole partition of this peer has arrived."""
        return peer in self._peer_steps

    def has_event_of(self, peer: Rank) -> bool:
        """Return whether a death or return of this peer is not applied yet."""
        with self._member.lock:
            return any(each.rank == peer for each in self._events)

    @property
    def peers(self) -> list[Rank]:
        return sorted(self._sender.peers)

    @property
    def drains(self) -> int:
        return self._drains

    # ---- the receiving thread

    def lose(self, peer: Rank) -> None:
        """Do not wait for a peer that has died, and drop what has accumulated for it."""
        self.links.close(peer)
        with self._arriving:
            self._forwarding.pop(peer, None)
            for missing in self._forwarding.values():
                missing.discard(peer)
        with self._member.updating():
            self._peer_steps.pop(peer, None)
            self._tails.pop(peer, None)
            self._events.append(Gone(peer))

    def on_admitted(self, welcome: Welcome) -> None:
        """Drop events from before the admission; on the restarted worker."""
        with self._member.lock:
            self._events = []
            absent = sorted(self._everybody - set(welcome.peers))
            self._member.lost[:] = [f"rank {peer}" for peer in absent]
            known = self._tails
            self._tails = {peer: max(known.get(peer, 0), welcome.drains) for peer in welcome.peers}
            self._peer_steps = {
                p: steps for p, steps in self._peer_steps.items() if p in welcome.peers
            }
        for peer in welcome.peers:
            self.links.open(peer)

    def _accept_incarnation(self, peer: Rank, incarnation: int, drains: int) -> None:
        """Count the updates of a peer that is back, from now on."""
        self.links.renew(peer, incarnation)
        with self._member.lock:
            self._tails[peer] = max(drains, self._tails.get(peer, 0))

    def expect_back(self, peer: Rank, incarnation: int, drains: int) -> None:
        """Count them too, and let the training thread send the peer what it lacks."""
        self._accept_incarnation(peer, incarnation, drains)
        with self._member.lock:
            self._events.append(Back(peer, drains))

    def apply(self, applicant: Applicant) -> None:
        """Enter a restarted worker that asks to be admitted; on rank 0. See ``admit_joiners``."""
        with self._member.lock:
            self._events.append(applicant)

    def _sender_of(self, message: Message[Any], body: Part | Tail | HandoverDone) -> Rank | None:
        if rank_of(message.sender) not in self._tails:
            raise FrameRefused(f"an update from {message.sender}, which is no peer")
        return self.links.sender(message, body)

    def _on_part(self, message: Message[Part]) -> None:
        body = message.body
        peer = self._sender_of(message, body)
        if peer is None:
            return
        with contribution_of("an update of the weights"):
            values = self._checked(body, message)
        with self._arriving:
            self.weights.add(body.start, values)
            for newcomer, missing in self._forwarding.items():
                if peer in missing:
                    fields = (body.steps, body.start, False, body.crc, body.packed)
                    self.links.send(newcomer, Part, *fields, frames=message.frames)
        self.received[SCHEME] += message.nbytes
        self.links.taken(peer)
        if body.last:
            with self._member.updating():
                self._peer_steps[peer] = max(self._peer_steps.get(peer, 0), body.steps)

    def _checked(self, body: Part, message: Message[Any]) -> Floats:
        if len(message.frames) != 1:
            raise FrameRefused(f"an update of {len(message.frames)} frames")
        frame = memoryview(message.frames[0])
        room = min(self.weights.numel - body.start, MESSAGE_VALUES)
        if checksum(message.frames) != body.crc:
            raise FrameRefused("an update whose checksum is wrong")
        if body.packed > room or (
            not body.packed and (frame.nbytes % 4 or frame.nbytes > 4 * room)
        ):
            raise FrameRefused(
                f"an update of {frame.nbytes} bytes at weight {body.start} of {self.weights.numel}"
            )
        return unpacked(frame, body.packed) if body.packed else np.frombuffer(frame, np.float32)

    def _on_tail(self, message: Message[Tail]) -> None:
        body = message.body
        peer = self._sender_of(message, body)
        if peer is None:
            return
        self.links.taken(peer)
        with self._member.updating():
            self._tails[peer] = NEVER if body.final else body.drain
            if body.final:
                self._peer_steps.pop(peer, None)

    def _on_handover_done(self, message: Message[HandoverDone]) -> None:
        body = message.body
        peer = self._sender_of(message, body)
        if peer is None:
            return
        self.links.taken(peer)
        with self._arriving:
            if self.links.incarnation_of(body.rank) == body.back_in:
                self._forwarding.get(body.rank, set()).discard(peer)
