"""Compares replicas that should be equal during training, without a round trip or a wait."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
import torch

from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.figures.replica_reports import (
    KEPT,
    Difference,
    ReplicaComparison,
    ReplicaReport,
    difference_of_replaced,
)
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.members.member import HUB
from slipstream.torch.capture.synchronizer import Synchronizer
from slipstream.torch.tensors.inventory import as_texts, group_settings
from slipstream.torch.tensors.script_lines import level_of_the_script
from slipstream.torch.tensors.tensor_sums import sums_of
from slipstream.transports.protocol import CONTROL
from slipstream.transports.wire import Message, Replicas, checksum
from slipstream.types import Buffer, rank_of

EVERY, EARLY = 64, (0, 8)  # steps
NONE_HANDED: Mapping[int, int] = MappingProxyType({})  # where servers do not update


def keeps_replicas_equal(plan: Plan) -> bool:
    """Whether all workers' weights are equal after each step."""
    in_step = plan.consistency.lockstep and plan.delivers_every_result
    return in_step and plan.partial_exchange is None and plan.local_steps is None


def is_due(step: int) -> bool:
    """Whether replicas are compared before this step."""
    return step % EVERY == 0 or step in EARLY


class ReplicaCheck:
    """One worker's part in the comparison of one model's replicas.

    Its report is made when this step's gradients have been handed over: all weights of the step
    before have arrived then, and none of this step's.

    Args:
        own: The optimizer that runs here, on mean gradients; None where servers update.
        of_loop: The optimizer whose settings the loop changes.
        handed: Where servers update, by tensor: see ``ServerUpdates``.
    """

    def __init__(
        self,
        synchronizer: Synchronizer,
        own: torch.optim.Optimizer | None,
        of_loop: torch.optim.Optimizer,
        member: Endpoint,
        handed: Mapping[int, int],
    ) -> None:
        self._handed = handed
        self._synchronizer, self._of_loop, self._member = synchronizer, of_loop, member
        inventory = synchronizer.inventory
        self._tensors = [inventory.tensors[i] for i in inventory.parameters]
        self._known = {id(tensor) for tensor in self._tensors}
        self._rank = rank_of(member.name)
        names = [inventory.specs[i].name for i in inventory.parameters]
        self._comparison = ReplicaComparison(names) if self._rank == 0 else None
        self._arrived: list[tuple[int, ReplicaReport]] = []
        self._unsent: ReplicaReport | None = None
        self._checked = self._after_step = -1
        self._versions: list[int] = []
        self._found: Difference | None = None  # and reported
        synchronizer.driver.call_after_flush(self._flushed)
        member.on(Replicas, self._on_report)
        self._hooks: list[Any] = []
        if own is not None:
            self._hooks = [
                own.register_step_pre_hook(self._before_update),
                own.register_step_post_hook(self._after_update),
            ]

    def report(self, step: int) -> ReplicaReport:
        """What this worker's replica is now."""
        versions = [tensor._version for tensor in self._tensors]
        outside: list[int] = []
        if self._after_step == step:
            outside = [i for i, v in enumerate(versions) if v != self._versions[i]]
        named = self._synchronizer.model.named_parameters()
        replaced = [name for name, p in named if p.requires_grad and id(p) not in self._known]
        settings = [as_texts(group_settings(group)) for group in self._of_loop.param_groups]
        return ReplicaReport(
            step=step,
            sums=sums_of(self._tensors),
            gradients=[],
            writes=versions,
            outside=outside,
            replaced=replaced,
            settings=settings,
            handed=[self._handed.get(i, 0) for i in self._synchronizer.inventory.parameters],
        )

    def find(self) -> Difference | None:
        """On rank 0: compare the reports that have arrived."""
        if self._comparison is None:
            return None
        with self._member.lock:
            arrived, self._arrived = self._arrived, []
        for rank, report in arrived:
            self._comparison.add(rank, report)
        return self._comparison.find()

    def find_at_end(
        self, own: ReplicaReport, others: Sequence[tuple[int, ReplicaReport]]
    ) -> Difference | None:
        """On rank 0: compare the last reports, which came with the workers' figures."""
        assert self._comparison is not None
        earlier = self._found or self.find()
        self._comparison.add_own(own)
        for rank, report in others:
            self._comparison.add(rank, report)
        return earlier or self._comparison.find() or difference_of_replaced(own, others)

    # ---- the training thread

    def begin(self) -> None:
        """Note the weights as the job has made them: writes before the next step are the loop's."""
        self._after_step = self._synchronizer.step
        self._versions = [tensor._version for tensor in self._tensors]

    def _flushed(self) -> None:
        """This step's gradients have been handed over."""
        step = self._synchronizer.step
        if is_due(step) and step != self._checked:
            self._checked = step
            self._send()
            self._unsent = self.report(step)
            if not self._hooks:
                self._send()
        if self._found is None and self._arrived and (found := self.find()) is not None:
            self._found = found._replace(is_reported=True)
            self._warn(found)

    def _before_update(self, *_: Any) -> None:
        """The optimizer is about to use the gradients."""
        if self._unsent is not None:
            gradients = sums_of([tensor.grad for tensor in self._tensors])
            self._unsent = msgspec.structs.replace(self._unsent, gradients=gradients)
            self._send()

    def _after_update(self, *_: Any) -> None:
        if is_due(self._synchronizer.step):
            self.begin()

    def _send(self) -> None:
        report, self._unsent = self._unsent, None
        if report is None:
            return
        if self._comparison is not None:
            self._comparison.add_own(report)
            return
        frames = [msgspec.msgpack.encode(report)]
        self._member.send(HUB, Replicas(checksum(frames)), frames, priority=CONTROL)

    def _warn(self, found: Difference) -> None:
        name = self._synchronizer.plan.strategy.name
        warnings.warn(
            f"rank {found.rank} has other weights than rank 0, although {name} keeps them equal: "
            f"{found.text}",
            stacklevel=level_of_the_script(),
        )

    # ---- the member's thread

    def _on_report(self, message: Message[Replicas]) -> None:
        rank = rank_of(message.sender)
        if self._comparison is None or rank <= 0:
            raise FrameRefused(f"{message.sender} reports its replica to {self._member.name}")
        if len(message.frames) != 1 or checksum(message.frames) != message.body.crc:
            raise FrameRefused(f"a report of a replica in {len(message.frames)} frames")
        report = decoded(message.frames[0], len(self._tensors))
        with self._member.lock:
            self._arrived.append((rank, report))
            del self._arrived[: -KEPT * self._synchronizer.plan.cluster.ranks]

    def close(self) -> None:
        """Remove the hooks of the optimizer."""
        for hook in self._hooks:
            hook.remove()


def decoded(frame: Buffer, tensors: int) -> ReplicaReport:
    """A report of another rank.

    Raises:
        FrameRefused: It is none, or of another model.
    """
    try:
        report = msgspec.msgpack.decode(frame, type=ReplicaReport)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise FrameRefused(f"unreadable report of a replica: {error}") from error
    lengths = report.sums, report.writes, report.handed, report.gradients or report.sums
    counts = set(map(len, lengths))
    if counts != {tensors}:
        raise FrameRefused(f"a report of {sorted(counts)} parameters: expected {tensors}")
    return report
