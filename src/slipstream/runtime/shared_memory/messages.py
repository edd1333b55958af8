"""Messages between the launcher, the learners and the server of one machine."""

from __future__ import annotations

from typing import Any

import msgspec

from slipstream.planning.segment import SegmentPlan, SharedTensor


class Body(msgspec.Struct, frozen=True, tag=True):
    """A message."""


# ---- a learner to the launcher


class Hello(Body, frozen=True):
    """Its model and optimizer; ``config_fingerprint`` lists what must be equal on all learners."""

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
    """The first one's weights are in place."""


class Share(Body, frozen=True):
    """A value for all learners; the first under a key counts."""

    key: str
    value: Any


class Lease(Body, frozen=True):
    """Asks for ``number`` batches, of ``batches`` an epoch; gives back the last ``returned``."""

    batches: int
    number: int
    returned: int


class Save(Body, frozen=True):
    """Asks for a checkpoint at a path."""

    path: str


class Load(Body, frozen=True):
    """Asks to continue from the checkpoint at a path."""

    path: str


class Ask(Body, frozen=True):
    """For the server's account; requests to the server have numbers, by which it answers."""

    number: int = 0


class Departing(Body, frozen=True):
    """The learner has finished; ``figures`` are its WorkerFigures."""

    figures: bytes
    ages: dict[int, int]  # of gradients that it applied itself


FromLearner = Hello | Networked | Filled | Share | Lease | Save | Load | Ask | Departing


# ---- the launcher to a learner


class Welcome(Body, frozen=True):
    """With the memory's descriptor; ``fill``: this one's weights are the first."""

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
    """The server's figures; ``staleness``: how many gradients were how old."""

    staleness: dict[int, int]
    refused: int = 0
    checkpoints: int = 0


class Farewell(Body, frozen=True):
    """Everybody's figures, for one of them."""

    figures: list[bytes]
    account: Account | None = None
    restarts: int = 0


class Refused(Body, frozen=True):
    """The learner cannot join, or cannot have what it asked for."""

    trouble: str


ToLearner = Welcome | Begin | Shared | Leased | Done | Account | Farewell | Refused


# ---- the launcher to the server, and back


class Start(Body, frozen=True):
    """With the memory's descriptor; where updates are ``direct`` there is nothing to apply, and the
    weights may be ``as_they_are``: no server's death can have spoilt them."""

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
    """Asks to continue from the checkpoint at a path."""

    number: int
    path: str


class Finish(Body, frozen=True):
    """Nothing more will be pushed: drain, keep a checkpoint, and go."""


ToServer = Start | Keep | Restore | Finish | Ask


class Ready(Body, frozen=True):
    """It maps the memory; ``restored`` if the weights are a checkpoint's, which has the first
    ``taken`` gradients of each learner in this job. Those up to ``let_go`` will not be applied."""

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
    """``trouble``: why there is no last checkpoint, or empty."""

    account: Account
    trouble: str = ""


class Note(Body, frozen=True):
    """For people."""

    text: str


FromServer = Ready | Kept | AccountReply | Finished | Note
