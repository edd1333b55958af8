"""The messages between members: typed headers, raw payload frames, nothing that runs code.

A message is one msgpack header frame and any number of payload frames. Headers are decoded into
the types below and nothing else; the receiver checks payload frames against the announced plan
before it uses them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from slipstream._native import crc32c
from slipstream.errors import FrameRefused
from slipstream.types import Buffer, Settings

HEADER_BYTES = 1 << 20
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Checksum = Annotated[int, Meta(ge=0, lt=1 << 32)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(max_length=64)]
ADDRESS = r"^(tcp://(\[[0-9a-zA-Z:.%]+\]|[0-9.]+):[0-9]{1,5}|memory://.*)$"
Address = Annotated[str, Meta(max_length=64, pattern=ADDRESS)]
Key = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=20_000)]


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Root of all headers."""


class Push(Body, tag="push", frozen=True):
    """A worker's contribution to one unit; ``counts`` are the frames of each of its segments, or of
    its layer: 0 if the worker has no gradient there.

    ``read`` is the number of the unit's results in the weights that it was computed from.
    ``settings`` are the optimizer's hyperparameters by group, if servers update; ``rate`` is the
    learning rate relative to the highest so far. If ``early`` is True, the first frames of a layer
    were sent before, in an Early. ``weights`` are the numbers of contributions summed in each
    segment: of workers, or of one worker's to several rounds; empty if each is one.
    """

    unit: Count
    round: Count
    step: Count
    counts: list[Count]
    crc: Checksum
    settings: Settings | None = None
    read: Count = 0
    rate: Share = 1.0
    early: bool = False
    weights: list[Count] = []


class Publish(Body, tag="publish", frozen=True):
    """A holder's result for one chunk of a unit (the ``part``-th of its chunks); ``counts`` are the
    frames of each segment, 0 if no worker contributed.

    ``dropped`` are ranks that get this result although it does not contain their own contribution:
    they add it back to their residual.
    """

    unit: Count
    part: Count
    round: Count
    counts: list[Count]
    crc: Checksum
    dropped: list[Count] = []


class Early(Body, tag="early", frozen=True):
    """The first frames of a layer's contribution to a round, known since its forward; the Push
    confirms whether they are valid."""

    unit: Count
    round: Count
    crc: Checksum


class Part(Body, tag="part", frozen=True):
    """A worker's updates of some weights since it last sent these: fp32, from weight ``start`` on.

    If ``packed`` is not 0, it is the number of values, which are encoded in the filter's format,
    without zeros. ``steps`` is the number of steps of the worker; it holds once the ``last``
    message of a part has arrived. ``number`` counts the messages on this link in this
    ``incarnation`` of the worker, so that a lost message is detected.
    """

    incarnation: Count
    number: Count
    steps: Count
    start: Count
    last: bool
    crc: Checksum
    packed: Count = 0


class Tail(Body, tag="tail", frozen=True):
    """The sender has sent all of its updates, for the ``drain``-th time; ``final``: it makes no
    more."""

    incarnation: Count
    number: Count
    drain: Count
    final: bool


class HandoverDone(Body, tag="handover_done", frozen=True):
    """A worker to rank 0, in order after everything it has sent: from now on the sender itself
    sends its updates to ``rank``, which has come back in incarnation ``back_in``."""

    incarnation: Count
    number: Count
    rank: Count
    back_in: Count


class Return(Body, tag="return", frozen=True):
    """A restarted worker to rank 0: asks to be admitted."""

    address: Address
    incarnation: Count


class Returned(Body, tag="returned", frozen=True):
    """Rank 0 to workers: ``rank`` is back, and counts as having drained so many times."""

    rank: Count
    address: Address
    process: Count
    incarnation: Count
    drains: Count


class Greeting(Body, tag="greeting", frozen=True):
    """A worker to a restarted one: the sender accepts its updates."""


class Welcome(Body, tag="welcome", frozen=True):
    """Rank 0 to a restarted worker: the state of the job, its peers, and the address and process of
    peers that were restarted before.

    Rank 0's weights follow as updates, to be added to zeros.
    """

    steps: Count
    drains: Count
    peers: list[Count]
    moved: list[tuple[Count, Name, Count]]
    standing: list[Count]
    bytes_s: float


class Rows(Body, tag="rows", frozen=True):
    """Rank 0 to workers, for the next choice between compact and dense: the number of rows of each
    layer's gradient."""

    choice: Count
    rows: list[Count]


class Replicas(Body, tag="replicas", frozen=True):
    """A worker to rank 0: sums of its weights, as a frame; see ``replica_reports``."""

    crc: Checksum


class Arrived(Body, tag="arrived", frozen=True):
    """A server to server 0: its whole part of this worker's gradient has arrived."""

    rank: Count
    round: Count


class Commit(Body, tag="commit", frozen=True):
    """Server 0 to all servers: this round consists of these workers' gradients."""

    round: Count
    ranks: list[Count]


class Serve(Body, tag="serve", frozen=True):
    """Server 0 to all servers: send this worker the current weights; its next round is this."""

    round: Count
    rank: Count


class WorkerLeft(Body, tag="retire", frozen=True):
    """To servers, from a worker that leaves or from rank 0, which has lost it: do not wait for
    it."""

    rank: Count


class Lost(Body, tag="lost", frozen=True):
    """Rank 0 to workers: ``rank`` is lost, and the rest continue; forward results without it."""

    rank: Count


class RouteUpdated(Body, tag="route_updated", frozen=True):
    """A worker to servers: the sender forwards results without ``rank``."""

    rank: Count


class Lease(Body, tag="lease", frozen=True):
    """A worker to server 0: asks for a batch, of ``batches`` per epoch.

    It gives back the last ``returned`` batches that it leased, unused.
    """

    batches: Annotated[int, Meta(ge=1, lt=1 << 62)]
    returned: Count = 0


class Leased(Body, tag="leased", frozen=True):
    """Server 0's answer to a Lease."""

    epoch: Count
    number: Count


class SnapshotDue(Body, tag="snapshot_due", frozen=True):
    """Server 0 to all servers: send this rank the state of your chunks after the decisions so
    far."""

    rank: Count


class Final(Body, tag="final", frozen=True):
    """Rank 0 to workers: no worker trains any more; ``copied``: rank 0's weights follow."""

    copied: bool


class Inquire(Body, tag="inquire", frozen=True):
    """A worker to a server: asks for its figures."""


class Account(Body, tag="account", frozen=True):
    """A server's figures, as JSON in the payload."""


class Probe(Body, tag="probe", frozen=True):
    """Bytes that only measure a link; the last message of a measurement is answered."""

    number: Count
    last: bool


class Echo(Body, tag="echo", frozen=True):
    """The last message of this measurement has arrived."""

    number: Count


class Contribute(Body, tag="contribute", frozen=True):
    """A rank to rank 0: the sender takes part in the gathering of this key; the payload is its
    value.

    Values come from ``source``: every rank, the first rank that has one, or one given rank. A rank
    that ``asks`` gets the values; one that has no value sends no payload.
    """

    key: Key
    source: Literal["all", "any"] | Count
    asks: bool


class Gathered(Body, tag="gathered", frozen=True):
    """Rank 0 to a rank: the values of this key, a frame for each of these ranks."""

    key: Key
    ranks: list[Count]


class Rejoin(Body, tag="rejoin", frozen=True):
    """A restarted worker to rank 0, before all other messages: its address."""

    address: Address
    incarnation: Count


class Beat(Body, tag="beat", frozen=True):
    """A heartbeat: rounds begun, by member.

    Rank 0 sends the rounds of all members to all, which members are done, and by key of a
    gathering, the ranks for which it still waits.
    """

    rounds: dict[Name, Count]
    done: list[Name] = []
    awaited: dict[Key, list[Name]] = {}


class Leave(Body, tag="leave", frozen=True):
    """The sender is done (or failed, with the reason); the payload is its summary.

    ``reported``: the sender prints the reason itself, so no other rank has to.
    ``round``: rounds begun, when done; a worker that begins more would wait for the sender in vain.
    ``about``: the member that failed, if it is not the sender itself.
    ``where``: the line of the user's code that failed.
    """

    reason: Text | None = None
    reported: bool = False
    round: Count = 0
    about: Name | None = None
    where: Text = ""


class Fault(Body, tag="fault", frozen=True):
    """Rank 0 to all: a member is lost (no reason) or failed (its reason, and where)."""

    peer: Name
    reason: Text | None
    silent_s: float
    where: Text = ""


class Configure(Body, tag="configure", frozen=True):
    """Rank 0 to a server: the plan, as JSON in the payload."""


class Release(Body, tag="release", frozen=True):
    """Rank 0 to a server: the pair is no longer trained under this number; delete its shard."""


class Ready(Body, tag="ready", frozen=True):
    """A server to rank 0: it has the plan and its links; or the reason why not."""

    reason: Text | None = None


class Fetch(Body, tag="fetch", frozen=True):
    """Asks for the state of this name; see ``State``."""

    name: Name
    number: Count = 0


class State(Body, tag="state", frozen=True):
    """A piece of named state: its bytes from ``start`` on, of ``total``.

    ``number`` tells states of one name apart: chunks, or copies one after the other. Where the
    receiver does not know what the bytes are, the first piece has the ``entries``: segment, name
    and dtype of each, end to end. ``round`` is the number of updates in it.
    """

    name: Name
    number: Count
    start: Count
    total: Count
    crc: Checksum
    entries: list[tuple[Count, Name, Name]] = []
    round: Count = 0


if TYPE_CHECKING:
    AnyBody = Body
else:
    AnyBody = reduce(or_, Body.__subclasses__())  # the types above, and no others


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header frame: the sender and its process, the body, and the pair.

    A name belongs to one process; messages of another process under this name are refused. A pair
    is a model with its optimizer; messages about the whole job are for pair 0.
    """

    sender: Name
    body: AnyBody
    process: Count = 0
    pair: Count = 0


B = TypeVar("B", covariant=True)


@dataclass(frozen=True, slots=True)
class Message(Generic[B]):
    """A decoded header with its payload. A handler names the type of body it is registered for."""

    sender: str
    body: B
    frames: Sequence[Buffer] = ()
    process: int = 0
    pair: int = 0

    @property
    def nbytes(self) -> int:
        """The size of the payload."""
        return sum(memoryview(frame).nbytes for frame in self.frames)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_header(sender: str, body: AnyBody, process: int = 0, pair: int = 0) -> bytes:
    """Return the header frame of a message."""
    return _encoder.encode(Envelope(sender, body, process, pair))


def decode_header(header: Buffer) -> Envelope:
    """Return the envelope of a header; raise FrameRefused if it cannot be decoded."""
    view = memoryview(header)
    if view.nbytes > HEADER_BYTES:
        raise FrameRefused(f"a header of {view.nbytes} bytes; the limit is {HEADER_BYTES}")
    try:
        return _decoder.decode(view)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameRefused(f"unreadable header: {error}") from error


def checksum(frames: Sequence[Buffer]) -> int:
    """Return the CRC-32C of all frames."""
    crc = 0
    for frame in frames:
        crc = crc32c(frame, crc)
    return crc
