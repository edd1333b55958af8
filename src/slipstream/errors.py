"""Every error slipstream raises.

SlipstreamError
├── ConfigError                 before training starts: the message gives the fix
│   ├── UnknownStrategy         no system of that name, or arguments it does not take
│   ├── IncompatibleParts       parts of a strategy that are incompatible
│   ├── IncompatibleRoute       a tensor cannot take the route chosen for it
│   ├── ModelMismatch           ranks have different models or optimizers
│   ├── ForeignParameters       the optimizer holds parameters the model does not
│   ├── TooManyServers          fewer chunks than servers
│   ├── LaunchError             environment, port, address or script is unusable
│   ├── SecretError             missing or different job secret
│   └── CheckpointError         a file that cannot be loaded into this job
└── RuntimeFault                while running
    ├── PeerLost                a member went silent
    ├── PeerFailed              a member reported that it failed
    ├── LeftBehind              the other members continued without this worker
    ├── WaitLimit               a wait reached its limit; names the missing members
    ├── JobEnded                a loop trains on after the end of its job
    ├── OutOfDescriptors        this process may open no more files or connections
    ├── NonFiniteGradient       a worker's gradient has a NaN or an infinity, and the job is to stop
    └── FrameRefused            a message that does not match what was announced
        └── ContributionRefused an invalid gradient of a live worker: ends the job
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

# Exit code of a worker that ends only because another one failed (EX_UNAVAILABLE), so that
# the launcher names the one that failed, even if that one takes longer to end.
EXIT_PEER_FAILED = 69


class SlipstreamError(Exception):
    """Root of the tree; catch it to catch everything slipstream raises on purpose.

    Copies and pickles keep the message and all fields.
    """

    def __reduce__(self) -> tuple[object, ...]:
        # By default Python would call the class with the message only.
        return restored, (type(self), self.args), self.__dict__


def restored(kind: type[SlipstreamError], args: tuple[object, ...]) -> SlipstreamError:
    """Return an error whose pickled fields are set later."""
    return kind.__new__(kind, *args)


class ConfigError(SlipstreamError, ValueError):
    """A request that cannot work; nothing was started."""


class UnknownStrategy(ConfigError):
    """A strategy name that is unknown, or arguments that the system does not take."""


class IncompatibleParts(ConfigError):
    """Incompatible parts of a strategy; the message gives the reason, and what to do instead."""


class IncompatibleRoute(ConfigError):
    """A tensor that cannot take the route chosen for it."""


class ModelMismatch(ConfigError):
    """Ranks that have different models or optimizers."""


class ForeignParameters(ConfigError):
    """An optimizer with parameters that are not in the model."""


class TooManyServers(ConfigError):
    """More servers than chunks: some servers would hold nothing."""


class LaunchError(ConfigError):
    """An environment, port, address or script that is unusable.

    Args:
        message: What is wrong, and what to do.
        missing: The ranks or servers that did not come.
        only_here: Only this rank knows of the error, so it must report it.
    """

    def __init__(
        self, message: str, *, missing: Sequence[str] = (), only_here: bool = False
    ) -> None:
        self.missing = tuple(missing)
        self.only_here = only_here
        super().__init__(message)


class SecretError(ConfigError):
    """A job secret that is missing, or a value that is not signed with it.

    Args:
        message: What is wrong, and what to do.
        only_here: Only this rank knows of the error, so it must report it.
    """

    def __init__(self, message: str, *, only_here: bool = False) -> None:
        self.only_here = only_here
        super().__init__(message)


class CheckpointError(ConfigError):
    """A checkpoint that cannot be read, or is not for this job's model or optimizer."""


class DamagedCheckpoint(CheckpointError):
    """A file that was damaged after it was written, or never was a checkpoint."""


class RuntimeFault(SlipstreamError, RuntimeError):
    """An error after the start."""


class PeerLost(RuntimeFault):
    """A member that has been silent for longer than the limit."""

    def __init__(self, peer: str, silent_s: float) -> None:
        self.peer = peer
        self.silent_s = silent_s
        super().__init__(
            f"{peer} is lost: nothing heard from it for {silent_s:.1f} s "
            "(killed, hung, or cut off from the network)"
        )


class PeerFailed(RuntimeFault):
    """A member left because of its own error.

    Args:
        peer: The name of the member.
        reason: Its error, in one line.
        reported: True if the member reports its error itself, so that no other rank has to.
        where: The line of the user's code that failed on that member, if it is known.
    """

    def __init__(self, peer: str, reason: str, *, reported: bool = False, where: str = "") -> None:
        self.peer = peer
        self.reason = reason
        self.reported = reported
        self.where = where
        place = f"\n  on {peer}, at {where}" if where else ""
        super().__init__(f"{peer} failed: {reason}{place}")


class LeftBehind(RuntimeFault):
    """A worker that the other members counted as lost, and continued without."""

    def __init__(self, name: str, why: str) -> None:
        self.name = name
        super().__init__(f"{name} {why}")


class WaitLimit(RuntimeFault):
    """A wait that reached its limit.

    Args:
        what: What was waited for.
        limit_s: The limit, in seconds.
        missing: The names of the members that did not answer.
        refusal: The last message that was refused while waiting, if any.
    """

    def __init__(
        self, what: str, limit_s: float, missing: Sequence[str], refusal: str = ""
    ) -> None:
        self.what = what
        self.limit_s = limit_s
        self.missing = tuple(missing)
        names = ", ".join(missing) if missing else "unknown"
        hint = f"; last message refused here, from {refusal}" if refusal else ""
        super().__init__(f"waited {limit_s:.0f} s for {what}; missing: {names}{hint}")


class JobEnded(RuntimeFault):
    """A loop that trains on after the end of its job."""

    def __init__(self) -> None:
        super().__init__(
            "the job has ended, so nothing that this loop computes now reaches another worker: "
            "keep the whole loop before the end of the job (of its `with` block, if it has one)"
        )


class OutOfDescriptors(RuntimeFault):
    """A limit of open files or connections that this process has reached."""

    def __init__(self, doing: str, limit: int) -> None:
        self.doing = doing
        self.limit = limit
        super().__init__(
            f"{doing} needs a file descriptor, and this process has used up all {limit} that it "
            "may open: raise the limit (`ulimit -n`, LimitNOFILE= in systemd, --ulimit nofile= in "
            "docker), and see which program keeps so many connections to this host's ports open"
        )


class NonFiniteGradient(RuntimeFault):
    """A gradient with a NaN or an infinity, in a job that is set to stop then.

    Args:
        rank: The worker whose gradient it is.
        tensor: The name of the tensor.
        step: The step, counted from 0.
        cast: The dtype whose cast made a finite gradient infinite, if any.
    """

    def __init__(self, rank: int, tensor: str, step: int, cast: str = "") -> None:
        self.rank = rank
        self.tensor = tensor
        self.step = step
        self.cast = cast
        super().__init__(
            f"{self.finding}; look at this step's loss and data, lower the learning rate"
            f"{', send it in float32' if cast else ''}, or leave such gradients out with "
            "slipstream.init(nonfinite='refuse')"
        )

    @property
    def finding(self) -> str:
        """The fault, without the advice."""
        how = f"became infinite in the cast to {self.cast}" if self.cast else "is not finite"
        return f"rank {self.rank}: the gradient of {self.tensor!r} {how} at step {self.step}"


class FrameRefused(RuntimeFault):
    """A message that does not match what was announced; counted, never fatal to the receiver."""


class ContributionRefused(FrameRefused):
    """A gradient that does not match the plan, from a worker that is in the job.

    The round cannot complete without it, so it ends the job; from any other sender it is only
    counted.
    """


@contextmanager
def contribution_of(what: str) -> Iterator[None]:
    """Raise a refusal within the block as ``ContributionRefused``, of this kind of contribution."""
    try:
        yield
    except FrameRefused as error:
        raise ContributionRefused(f"{what}: {error}") from error
