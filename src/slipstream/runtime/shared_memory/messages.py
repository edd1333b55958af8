"""Messages between the launcher, the learners and the server of one machine."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.planning.segment import SegmentPlan, SharedTensor


class Body(msgspec.Struct, frozen=True, tag=True):
    """A message."""


# ---- a learner to the launcher


class Hello(Body, frozen=True):
    """A learner's model and optimizer; ``config_fingerprint`` must be equal on all learners."""

    config_fingerprint: list[str]
    tensors: list[SharedTensor]
    optimizer: str
    settings: list[list[float]]  # by group
    updates: str  # "server" or "direct"
    slots: int
    consistent: bool
    checkpoints: str | None
    every_s: float


class Networked(Body, frozen=True):
    """This worker joins the others over the network, because of what it is ``doing``."""

    doing: str


class Filled(Body, frozen=True):
    """The first learner has written its weights."""


class Share(Body, frozen=True):
    """A value for all learners; the first under a key counts."""

    key: str
    value: Any


class Lease(Body, frozen=True):
    """Requests ``number`` batches, of ``batches`` per epoch; returns the last ``returned``."""

    batches: int
    number: int
    returned: int


class Save(Body, frozen=True):
    """Requests a checkpoint at a path."""

    path: str


class Load(Body, frozen=True):
    """Requests to continue from the checkpoint at a path.

    ``takes_nonfinite``: also if some of it is NaN or infinite.
    """

    path: str
    takes_nonfinite: bool = False


class Ask(Body, frozen=True):
    """Requests the server's account; requests to the server are numbered, and so are answers."""

    number: int = 0


class Trained(Body, frozen=True):
    """The learner has made its last step, and all of its gradients are applied."""


class Departing(Body, frozen=True):
    """The learner has the last weights; ``figures`` are its WorkerFigures."""

    figures: bytes
    ages: dict[int, int]  # of gradients that it applied itself


FromLearner = Hello | Networked | Filled | Share | Lease | Save | Load | Ask | Trained | Departing


# ---- the launcher to a learner


class Welcome(Body, frozen=True):
    """Sent with the memory's descriptor; ``fill``: this learner writes the initial weights."""

    plan: SegmentPlan
    fill: bool


class Begin(Body, frozen=True):
    """The weights are in place."""


class Shared(Body, frozen=True):
    """The answer to a Share."""

    value: Any


class Leased(Body, frozen=True):
    """The answer to a Lease: epoch and number of each batch."""

    batches: list[tuple[int, int]]


class Done(Body, frozen=True):
    """The answer to a Save or Load; ``trouble``: why it failed, or empty."""

    trouble: str = ""


class Account(Body, frozen=True):
    """The server's figures; ``staleness``: number of gradients by age."""

    staleness: dict[int, int]
    refused: int = 0
    checkpoints: int = 0


class Awaited(Body, frozen=True):
    """At the end: the learners that have not come as far as this one, which waits for them."""

    ranks: list[int]


class Final(Body, frozen=True):
    """No learner trains any more, and the server is done: the weights do not change again."""


class Farewell(Body, frozen=True):
    """The figures of all learners, for one of them."""

    figures: list[bytes]
    account: Account | None = None
    restarts: int = 0


class Refused(Body, frozen=True):
    """The learner cannot join, or its request is refused."""

    trouble: str


ToLearner = (
    Welcome | Begin | Shared | Leased | Done | Account | Awaited | Final | Farewell | Refused
)


# ---- the launcher to the server, and back


class Start(Body, frozen=True):
    """Sent with the memory's descriptor. Where updates are ``direct`` there is nothing to apply,
    and the weights may be used ``as_they_are``: a server's death cannot have damaged them."""

    job: str
    plan: SegmentPlan
    optimizer: str
    settings: list[list[float]]
    direct: bool
    consistent: bool
    checkpoints: str
    every_s: float
    as_they_are: bool = False


class Keep(Body, frozen=True):
    """A checkpoint: in the directory, or at a path."""

    number: int
    path: str | None = None


class Restore(Body, frozen=True):
    """Requests to continue from the checkpoint at a path; see Load."""

    number: int
    path: str
    takes_nonfinite: bool = False


class Finish(Body, frozen=True):
    """No more gradients will be pushed: apply the rest, write a checkpoint, and end."""


ToServer = Start | Keep | Restore | Finish | Ask


class Ready(Body, frozen=True):
    """The server has mapped the memory. ``restored``: the weights are a checkpoint's, which
    contains the first ``taken`` gradients of each learner; those up to ``let_go`` will not be
    applied."""

    restored: bool
    version: int
    notes: list[str]
    taken: list[int] = []
    let_go: list[int] = []


class Kept(Body, frozen=True):
    """The answer to a Keep or Restore; ``trouble``: why it failed, or empty."""

    trouble: str
    number: int


class AccountReply(Body, frozen=True):
    """The answer to an Ask."""

    number: int
    account: Account


class Finished(Body, frozen=True):
    """``trouble``: why the last checkpoint could not be written, or empty."""

    account: Account
    trouble: str = ""


class Note(Body, frozen=True):
    """A line for the launcher to print."""

    text: str


FromServer = Ready | Kept | AccountReply | Finished | Note
