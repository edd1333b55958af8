"""The worker's half of a round over collectives: flat buckets, all-reduced in a fixed order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.codecs import Dense
from slipstream.errors import IncompatibleRoute, RuntimeFault
from slipstream.plan import Plan
from slipstream.routes import Collective
from slipstream.runtime.members.joining import Membership
from slipstream.torch.finite_gradients import FiniteGradients, magnitude_of
from slipstream.torch.inventory import Inventory
from slipstream.torch.link_store import LinkStore
from slipstream.torch.slots import GradientPlaces, OwnGradients, wire_dtypes
from slipstream.torch.staging import as_real, is_lazy, shaped_as
from slipstream.transports.collective import Collectives
from slipstream.types import Chunk, Cluster


@dataclass(slots=True)
class Bucket:
    """One chunk's flat memory; the last elements say which segments this worker has, and a step.

    These marks ride in the bucket itself: summed over workers they tell whether anybody had a
    gradient, and whether all are at the same step, without a collective of their own.
    """

    chunk: Chunk
    flat: torch.Tensor
    unready: int
    work: Any = None

    def values(self, start: int, numel: int) -> torch.Tensor:
        return self.flat[start : start + numel]

    @property
    def marks(self) -> torch.Tensor:
        return self.flat[self.chunk.numel : -1]

    @property
    def parity(self) -> torch.Tensor:
        """The step modulo 2, which the shortest format can sum; who differs, differs by one."""
        return self.flat[-1]


class CollectiveChannel:
    """All chunks of a plan that travel by collectives; implements ``Channel``.

    Args:
        gradients: What is summed, and where sums go; by default the parameters' own.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Sequence[torch.Tensor],
        collectives: Collectives,
        member: Any,
        finite: FiniteGradients | None = None,
        gradients: GradientPlaces | None = None,
    ) -> None:
        self.plan = plan
        self.step = 0
        self.wait_s = 0.0
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._parameters = parameters
        self._gradients = gradients or OwnGradients(parameters)
        self.collectives = collectives
        self._member = member
        self._finite = finite or FiniteGradients()
        self._travels_as = wire_dtypes(plan)
        self._buckets = [
            self._bucket(chunk)
            for chunk in plan.chunks
            if isinstance(plan.routes[chunk.route].over, Collective)
        ]
        self._places = self._find_places()
        self._fired: set[int] = set()
        self._skipped: Collection[int] = ()
        self._next = 0
        self._launched: list[Bucket] = []
        self._outstanding = False

    def _bucket(self, chunk: Chunk) -> Bucket:
        codec = self.plan.routes[chunk.route].up
        if not isinstance(codec, Dense):
            raise IncompatibleRoute(f"collectives carry dense values only, not {codec.name}")
        dtype = getattr(torch, codec.wire_dtype(chunk.dtype))
        size = chunk.numel + len(chunk.segments) + 1
        flat = torch.zeros(size, dtype=dtype, device=self.collectives.device)
        return Bucket(chunk, flat, len(chunk.segments))

    def _find_places(self) -> dict[int, list[tuple[int, int, int, int]]]:
        """For each tensor: (bucket, segment number, start in tensor, start in bucket)."""
        places: dict[int, list[tuple[int, int, int, int]]] = {}
        for b, bucket in enumerate(self._buckets):
            offset = 0
            for s, segment in enumerate(bucket.chunk.segments):
                places.setdefault(segment.tensor, []).append((b, s, segment.start, offset))
                offset += segment.numel
        return places

    def ready(self, tensor: int) -> None:
        """The tensor's contribution to this round is final.

        Raises:
            RuntimeFault: It was completed twice in one backward pass.
        """
        if tensor not in self._places:
            return
        if tensor in self._fired:
            raise RuntimeFault(
                f"the gradient of {self.plan.specs[tensor].name!r} was completed twice in one "
                "backward pass (re-entrant checkpointing of a shared weight does this): use "
                "checkpoint(..., use_reentrant=False) or a strategy with overlap=False"
            )
        self._fired.add(tensor)
        flat = self._contribution(tensor)
        for b, s, start, offset in self._places[tensor]:
            bucket = self._buckets[b]
            numel = bucket.chunk.segments[s].numel
            values = bucket.values(offset, numel)
            bucket.marks[s] = flat is not None
            if flat is None:
                values.zero_()
            else:
                divide(flat[start : start + numel], self.plan.cluster.workers, values)
            bucket.unready -= 1
        self._launch_complete()

    def _contribution(self, tensor: int) -> torch.Tensor | None:
        gradient = self._gradients[tensor]
        if gradient is None:
            return None
        flat = flatten(gradient)
        # Of the whole value, not of its share: where all shares fit, their sum may not.
        name, travels_as = self.plan.specs[tensor].name, self._travels_as[tensor]
        if self._finite.admits(name, magnitude_of(flat), travels_as):
            return flat
        self._gradients[tensor] = None
        return None

    def _launch_complete(self) -> None:
        # Every rank must start its collectives in the same order.
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not self._is_skipped(bucket):
                if bucket.unready:
                    return
                bucket.parity.fill_(self.step % 2)
                bucket.work = self.collectives.all_reduce(bucket.flat)
                self._launched.append(bucket)
                self._count(bucket)
            self._next += 1

    def _is_skipped(self, bucket: Bucket) -> bool:
        return all(segment.tensor in self._skipped for segment in bucket.chunk.segments)

    def _count(self, bucket: Bucket) -> None:
        """A ring moves 2(n-1)/n of the bucket in all, half of it out."""
        n = self.plan.cluster.workers
        nbytes = bucket.flat.numel() * bucket.flat.element_size()
        scheme = self.plan.routes[bucket.chunk.route].scheme
        self.sent[scheme] += 2 * (n - 1) * nbytes // n
        self.received[scheme] += 2 * (n - 1) * nbytes // n

    def skip_round(self, tensors: Collection[int]) -> None:
        self._skipped = tensors

    def flush(self) -> None:
        for tensor in self._places:
            if tensor not in self._fired and tensor not in self._skipped:
                self.ready(tensor)
        self._launch_complete()
        self._fired.clear()
        self._next = 0
        self._outstanding = True
        self._member.round = max(self._member.round, self.step + 1)

    def refresh(self) -> None:
        """Nothing comes unasked."""

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        if not self._outstanding:
            return
        begun = time.monotonic()
        for bucket in self._launched:
            self.collectives.wait(bucket.work)
        self.wait_s += time.monotonic() - begun
        self._agree_on_step()
        carried = {segment.tensor for b in self._launched for segment in b.chunk.segments}
        for tensor in self._places:
            if tensor in carried:
                self._write(tensor)
        for bucket in self._buckets:
            bucket.unready = len(bucket.chunk.segments)
        self._launched = []
        self._outstanding = False

    def _agree_on_step(self) -> None:
        together = self.plan.cluster.workers * (self.step % 2)
        if any(float(bucket.parity) != together for bucket in self._launched):
            raise RuntimeFault(
                f"workers ran different numbers of backward passes up to step {self.step}: every "
                "worker must call backward() equally often a step (use job.accumulate() for "
                "passes that only add up)"
            )

    def _write(self, tensor: int) -> None:
        first_bucket, first_segment, _, _ = self._places[tensor][0]
        if not self._buckets[first_bucket].marks[first_segment]:
            return  # nobody used it: its gradient stays as it is
        gradient = self._gradients[tensor]
        if gradient is None or gradient.is_sparse:
            empty = torch.empty_like(self._parameters[tensor], requires_grad=False)
            self._gradients[tensor] = empty
            gradient = self._gradients[tensor]
            assert gradient is not None
        in_place = gradient.is_contiguous() and not is_lazy(gradient)
        flat = as_real(gradient if in_place else torch.empty_like(gradient)).reshape(-1)
        for b, s, start, offset in self._places[tensor]:
            bucket = self._buckets[b]
            numel = bucket.chunk.segments[s].numel
            flat[start : start + numel].copy_(bucket.values(offset, numel))
        if not in_place:
            gradient.copy_(shaped_as(gradient, flat))


def divide(values: torch.Tensor, by: int, out: torch.Tensor) -> None:
    """A share of the mean: divided before it is summed, so that short formats do not overflow."""
    if values.dtype == out.dtype and values.device == out.device:
        torch.div(values, by, out=out)
    else:
        out.copy_(values / by)


def flatten(gradient: torch.Tensor) -> torch.Tensor:
    dense = gradient.to_dense() if gradient.is_sparse else gradient
    return as_real(dense).reshape(-1)


def collectives_for(
    cluster: Cluster, device: torch.device, membership: Membership, key: str
) -> Collectives:
    """A process group for this pair's collectives; all workers of the cluster call it."""
    # NCCL copies the store it is given, which only torch's own can be.
    on_links = device.type != "cuda"
    return Collectives(
        LinkStore(membership.gathering) if on_links else membership.rendezvous.store,
        key,
        cluster.worker(membership.member.name),
        cluster.workers,
        host=membership.host,
        device=device,
        limit_s=membership.limits.wait_s,
        check=membership.member.check,
        grace_s=membership.limits.silence_s + 2,
    )


def collective_device(inventory: Inventory) -> torch.device:
    """NCCL where all parameters are on one CUDA device; the CPU otherwise."""
    devices = {tensor.device for tensor in inventory.tensors}
    device = next(iter(devices))
    return device if len(devices) == 1 and device.type == "cuda" else torch.device("cpu")
