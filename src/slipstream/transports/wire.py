"""What members say to each other: typed headers, raw payload frames, nothing that runs code.

A message is one msgpack header frame and any number of payload frames. Headers are decoded into
the types below and nothing else; payload frames are checked against the announced plan by the
receiver before they are touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from slipstream._native import crc32c
from slipstream.errors import FrameRefused
from slipstream.types import Buffer

HEADER_BYTES = 1 << 20
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Checksum = Annotated[int, Meta(ge=0, lt=1 << 32)]
Share = Annotated[float, Meta(ge=0, le=1)]
Name = Annotated[str, Meta(max_length=64)]
ADDRESS = r"^(tcp://(\[[0-9a-zA-Z:.%]+\]|[0-9.]+):[0-9]{1,5}|memory://.*)$"
Address = Annotated[str, Meta(max_length=64, pattern=ADDRESS)]
Key = Annotated[str, Meta(max_length=128)]
Text = Annotated[str, Meta(max_length=20_000)]
Setting = bool | int | float | None | list[float] | str
Settings = list[dict[str, Setting]]


class Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Root of all headers."""


class Push(Body, tag="push", frozen=True):
    """A worker's contribution to one chunk; ``present`` marks the segments that have a payload.

    ``read`` is how many results of the chunk were in the weights it was computed from. ``settings``
    are the optimizer's hyperparameters by group, where servers update; ``rate`` is the learning
    rate as a part of the highest so far.
    """

    chunk: Count
    round: Count
    step: Count
    present: bytes
    crc: Checksum
    settings: Settings | None = None
    read: Count = 0
    rate: Share = 1.0


class Publish(Body, tag="publish", frozen=True):
    """A holder's result for one chunk; a segment nobody contributed to is not present."""

    chunk: Count
    round: Count
    present: bytes
    crc: Checksum


class Compact(Body, tag="compact", frozen=True):
    """A worker's gradient of one layer in compact form: two matrices of ``rows`` rows each.

    ``present`` is False where the worker did not use the layer. Each matrix comes in ``dtypes``'
    precision, as one frame or several, each as large as may be; an empty one as none. Where
    ``early`` is True the first matrix has come before, in an Early.
    """

    layer: Count
    round: Count
    step: Count
    present: bool
    rows: Count
    dtypes: tuple[Name, Name]
    crc: Checksum
    early: bool = False


class Early(Body, tag="early", frozen=True):
    """A layer's first matrix, known since its forward; the Compact says whether it holds."""

    layer: Count
    round: Count
    rows: Count
    dtype: Name
    crc: Checksum


class Part(Body, tag="part", frozen=True):
    """A worker's updates of some weights since it last sent these: fp32, from weight ``start`` on.

    ``steps`` is how many the worker has made, known to be complete with the ``last`` message of a
    part. ``number`` counts the messages on this link in this ``life`` of the worker, so that a lost
    one is noticed.
    """

    life: Count
    number: Count
    steps: Count
    start: Count
    last: bool
    crc: Checksum


class Tail(Body, tag="tail", frozen=True):
    """All of my updates have been sent, for the ``drain``-th time; ``final``: I make no more."""

    life: Count
    number: Count
    drain: Count
    final: bool


class Adopted(Body, tag="adopted", frozen=True):
    """A worker to rank 0, after all that it has sent before: this rank, which is back in such a
    life, gets my updates from myself from now on."""

    life: Count
    number: Count
    rank: Count
    back_in: Count


class Return(Body, tag="return", frozen=True):
    """A worker that was started again to rank 0: I am here, for the ``life``-th time."""

    address: Address
    life: Count


class Returned(Body, tag="returned", frozen=True):
    """Rank 0 to workers: this one is back, and counts as having drained so many times."""

    rank: Count
    address: Address
    process: Count
    life: Count
    drains: Count


class Greeting(Body, tag="greeting", frozen=True):
    """A worker to one that has come back: your updates are welcome."""


class Welcome(Body, tag="welcome", frozen=True):
    """Rank 0 to one that has come back: where the job stands, who else is there, and for those who
    have come back before, where they listen and their process.

    My weights follow as updates, to be added to zeros.
    """

    steps: Count
    drains: Count
    peers: list[Count]
    moved: list[tuple[Count, Name, Count]]
    standing: list[Count]
    bytes_s: float


class Ask(Body, tag="ask", frozen=True):
    """Rank 0 to a worker: tell me your weights."""


class Opinion(Body, tag="opinion", frozen=True):
    """A worker's weights from ``start`` on, fp32, to rank 0; or everybody's mean, from it, and how
    far apart they are."""

    start: Count
    spread: float
    crc: Checksum


class Rows(Body, tag="rows", frozen=True):
    """Rank 0's word on a step: how many rows each layer's compact gradient had there."""

    step: Count
    rows: list[Count]


class Arrived(Body, tag="arrived", frozen=True):
    """A server to the one that decides: all I get of this worker's gradient is here."""

    rank: Count
    round: Count


class Commit(Body, tag="commit", frozen=True):
    """The server that decides to all: this round is made by these workers."""

    round: Count
    ranks: list[Count]


class Serve(Body, tag="serve", frozen=True):
    """The server that decides to all: send this worker what is open now, which is this round."""

    round: Count
    rank: Count


class Retire(Body, tag="retire", frozen=True):
    """To servers, from a worker that leaves or from rank 0 who has lost it: do not wait for it."""

    rank: Count


class Lost(Body, tag="lost", frozen=True):
    """Rank 0 to workers: this one is gone, and the rest go on; pass results on without it."""

    rank: Count


class Rerouted(Body, tag="rerouted", frozen=True):
    """A worker to servers: I pass results on without this one."""

    rank: Count


class Lease(Body, tag="lease", frozen=True):
    """A worker to the server that decides: which batch, of so many an epoch, is mine?

    The last ``returned`` that it leased it has not trained on, and will not.
    """

    batches: Annotated[int, Meta(ge=1, lt=1 << 62)]
    returned: Count = 0


class Leased(Body, tag="leased", frozen=True):
    """This one."""

    epoch: Count
    number: Count


class Snapshot(Body, tag="snapshot", frozen=True):
    """A worker to the server that decides: have all servers send me the state of their chunks."""


class Dump(Body, tag="dump", frozen=True):
    """The server that decides to all: send this worker the state of your chunks, as it is now."""

    rank: Count


class Final(Body, tag="final", frozen=True):
    """Rank 0 to all: everybody is done; take my weights, or keep yours."""

    copied: bool


class Inquire(Body, tag="inquire", frozen=True):
    """A worker to a server: tell me your figures."""


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
    """A rank to rank 0: I take part in the gathering of this key; the payload is my value.

    Values come from ``source``: every rank, whichever rank is the first to give one, or one rank. A
    rank that ``asks`` is sent the values; one that has none to give sends no payload.
    """

    key: Key
    source: Literal["all", "any"] | Count
    asks: bool


class Gathered(Body, tag="gathered", frozen=True):
    """Rank 0 to a rank: the values of this key, a frame for each of these ranks."""

    key: Key
    ranks: list[Count]


class Rejoin(Body, tag="rejoin", frozen=True):
    """A worker that was started again to rank 0, before all else: answer me at this address."""

    address: Address
    life: Count


class Beat(Body, tag="beat", frozen=True):
    """I am alive; rounds begun, by member.

    Rank 0 tells everybody everybody's, who is done, and for which gatherings it still waits for
    whom.
    """

    rounds: dict[Name, Count]
    done: list[Name] = []
    awaited: dict[Key, list[Name]] = {}


class Leave(Body, tag="leave", frozen=True):
    """I am done (or failed, with the reason); the payload is my summary.

    ``told``: the reason will be said by the sender itself, so that nobody else needs to.
    ``round``: rounds begun, when done; whoever begins more would wait for the sender in vain.
    ``about``: the member that the sender has seen fail, if it is not the sender itself.
    """

    reason: Text | None = None
    told: bool = False
    round: Count = 0
    about: Name | None = None


class Fault(Body, tag="fault", frozen=True):
    """Rank 0's word that a member is lost (no reason) or failed (its reason)."""

    peer: Name
    reason: Text | None
    silent_s: float


class Configure(Body, tag="configure", frozen=True):
    """Rank 0 to a server: the plan, as JSON in the payload."""


class Ready(Body, tag="ready", frozen=True):
    """A server to rank 0: plan understood, links made; or the reason why not."""

    reason: Text | None = None


class Piece(Body, tag="piece", frozen=True):
    """Bytes of one tensor of rank 0's model, relayed from rank to rank."""

    sync: Count
    tensor: Count
    offset: Count
    crc: Checksum


class Load(Body, tag="load", frozen=True):
    """The weights of a chunk, one frame a segment, for a server that updates them."""

    chunk: Count
    crc: Checksum


class Fetch(Body, tag="fetch", frozen=True):
    """Ask a server for the state of a chunk: its weights, the optimizer's entries, averages."""

    chunk: Count


class State(Body, tag="state", frozen=True):
    """State of a chunk, either way: a frame for each (segment, entry, dtype).

    ``round`` is how many updates it has had.
    """

    chunk: Count
    entries: list[tuple[Count, Name, Name]]
    crc: Checksum
    round: Count = 0


AnyBody = (
    Push
    | Publish
    | Compact
    | Early
    | Part
    | Tail
    | Adopted
    | Return
    | Returned
    | Greeting
    | Welcome
    | Ask
    | Opinion
    | Rows
    | Arrived
    | Commit
    | Serve
    | Retire
    | Lost
    | Rerouted
    | Lease
    | Leased
    | Snapshot
    | Dump
    | Final
    | Inquire
    | Account
    | Probe
    | Echo
    | Contribute
    | Gathered
    | Rejoin
    | Beat
    | Leave
    | Fault
    | Configure
    | Ready
    | Piece
    | Load
    | Fetch
    | State
)


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """The header frame: who sends, from which process, and what.

    A name belongs to one process; messages of another process under this name are refused.
    """

    sender: Name
    body: AnyBody
    process: Count = 0


@dataclass(frozen=True, slots=True)
class Message:
    """A decoded header with its payload."""

    sender: str
    body: AnyBody
    frames: Sequence[Buffer] = ()
    process: int = 0

    @property
    def nbytes(self) -> int:
        return sum(memoryview(frame).nbytes for frame in self.frames)


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Envelope)


def encode_header(sender: str, body: AnyBody, process: int = 0) -> bytes:
    return _encoder.encode(Envelope(sender, body, process))


def decode_header(header: Buffer) -> Envelope:
    """The envelope, or FrameRefused."""
    view = memoryview(header)
    if view.nbytes > HEADER_BYTES:
        raise FrameRefused(f"a header of {view.nbytes} bytes; the limit is {HEADER_BYTES}")
    try:
        return _decoder.decode(view)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameRefused(f"unreadable header: {error}") from error


def checksum(frames: Sequence[Buffer]) -> int:
    crc = 0
    for frame in frames:
        crc = crc32c(frame, crc)
    return crc
