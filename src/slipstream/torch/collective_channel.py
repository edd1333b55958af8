"""The worker's half of a round over collectives: flat buckets, all-reduced in a fixed order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from slipstream._native import largest
from slipstream.codecs import Dense
from slipstream.errors import IncompatibleRoute, RuntimeFault
from slipstream.plan import Plan
from slipstream.routes import Collective
from slipstream.runtime.members.joining import Membership
from slipstream.torch.finite_gradients import magnitude_of
from slipstream.torch.inventory import Inventory
from slipstream.torch.link_store import LinkStore
from slipstream.torch.slots import ExchangedGradients, wire_dtypes
from slipstream.torch.staging import as_real, is_lazy, shaped_as
from slipstream.transports.collective import Collectives
from slipstream.types import Chunk, Cluster, Segment

STEP_DIGITS = 16  # of the step; workers that differ differ by less than this can tell


@dataclass(slots=True, eq=False)
class Place:
    """One segment's memory in its bucket.

    Attributes:
        start: Of the segment within its tensor.
        memory: The same bytes for the native kernels; None where the bucket is on an accelerator.
        whole: The same memory in the tensor's own shape, if the segment is a whole tensor.
    """

    tensor: int
    start: int
    values: torch.Tensor
    memory: Any
    whole: torch.Tensor | None

    @property
    def end(self) -> int:
        return self.start + self.values.numel()


@dataclass(slots=True, eq=False)
class Bucket:
    """One chunk's flat memory. Its last elements mark the segments that this worker has, and the
    step.

    These marks are part of the bucket: their sums show whether any worker had a gradient, and
    whether all are at the same step, without a separate collective. The step is sent as its last
    binary digits: even the shortest format can sum each of them.
    """

    chunk: Chunk
    flat: torch.Tensor
    places: list[Place]
    present: set[int]  # tensors with a gradient of this worker
    unready: int
    work: Any = None
    step: int = 0  # in which it was launched

    @property
    def tensors(self) -> list[int]:
        return [place.tensor for place in self.places]

    @property
    def marks(self) -> torch.Tensor:
        return self.flat[self.chunk.numel :]

    def mark(self, step: int) -> None:
        """Write the marks, before the bucket is summed."""
        self.step = step
        present = [float(place.tensor in self.present) for place in self.places]
        self.marks.copy_(torch.tensor(present + digits(step)))

    def sums(self) -> tuple[list[bool], list[float]]:
        """By segment, whether any worker had it; and the sums of the step's digits."""
        found: list[float] = self.marks.tolist()
        return [count > 0 for count in found[:-STEP_DIGITS]], found[-STEP_DIGITS:]

    def reset(self) -> None:
        self.unready = len(self.places)


class CollectiveChannel:
    """All chunks of a plan that are sent by collectives; implements ``Channel``.

    Args:
        slots: What is summed, and where sums go.
        divisor: What contributions are divided by; by default the number of workers.
    """

    def __init__(
        self,
        plan: Plan,
        parameters: Sequence[torch.Tensor],
        slots: ExchangedGradients,
        collectives: Collectives,
        member: Any,
        divisor: int | None = None,
    ) -> None:
        self.plan = plan
        self._divisor = plan.cluster.workers if divisor is None else divisor
        self.step = 0
        self.wait_s = 0.0
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self._parameters = parameters
        self.collectives = collectives
        self._member = member
        self._slots, self._finite = slots, slots.finite
        self._travels_as = wire_dtypes(plan)
        self._buckets = [
            self._bucket(chunk)
            for chunk in plan.chunks
            if isinstance(plan.routes[chunk.route].over, Collective)
        ]
        self._places: dict[int, list[tuple[Bucket, Place]]] = {}
        for bucket in self._buckets:
            for place in bucket.places:
                self._places.setdefault(place.tensor, []).append((bucket, place))
        self._fired: set[int] = set()
        self._skipped: Collection[int] = ()
        self._next = 0
        self._round = 0  # exchanges that this worker has begun
        self._launched: list[Bucket] = []

    def _bucket(self, chunk: Chunk) -> Bucket:
        codec = self.plan.routes[chunk.route].up
        if not isinstance(codec, Dense):
            raise IncompatibleRoute(f"collectives carry dense values only, not {codec.name}")
        dtype = getattr(torch, codec.wire_dtype(chunk.dtype))
        size = chunk.numel + len(chunk.segments) + STEP_DIGITS
        flat = torch.zeros(size, dtype=dtype, device=self.collectives.device)
        places, offset = [], 0
        for segment in chunk.segments:
            values = flat[offset : offset + segment.numel]
            places.append(self._place(segment, values))
            offset += segment.numel
        return Bucket(chunk, flat, places, set(), len(places))

    def _place(self, segment: Segment, values: torch.Tensor) -> Place:
        parameter = self._parameters[segment.tensor]
        is_whole = values.numel() == parameter.numel() and not parameter.is_complex()
        whole = values.view(parameter.shape) if is_whole else None
        memory = values.view(torch.uint8).numpy() if values.device.type == "cpu" else None
        return Place(segment.tensor, segment.start, values, memory, whole)

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
        has_any = self._contribute(tensor)
        for bucket, place in self._places[tensor]:
            if has_any:
                bucket.present.add(tensor)
            else:
                bucket.present.discard(tensor)
                place.values.zero_()
            bucket.unready -= 1
        self._launch_complete()

    def _contribute(self, tensor: int) -> bool:
        """Write the share of this worker into the buckets; whether there is one that counts."""
        gradient = self._slots.contributions[tensor]
        if gradient is None:
            return False
        places = self._places[tensor]
        _, first = places[0]
        if first.whole is not None and first.memory is not None and alike(gradient, first.whole):
            torch.div(gradient.detach(), self._divisor, out=first.whole)
            # A finite value has a finite share, and nothing else has, in the same format.
            magnitude = largest(first.memory, self._travels_as[tensor])
        else:
            flat = flatten(gradient)
            # Of the whole value, not of its share: where all shares fit, their sum may not.
            magnitude = magnitude_of(flat)
            for _, place in places:
                divide(flat[place.start : place.end], self._divisor, place.values)
        name = self.plan.specs[tensor].name
        if self._finite.admits(name, magnitude, self._travels_as[tensor]):
            return True
        self._slots.contributions[tensor] = None
        return False

    def _launch_complete(self) -> None:
        # Every rank must start its collectives in the same order.
        while self._next < len(self._buckets):
            bucket = self._buckets[self._next]
            if not self._is_skipped(bucket):
                if bucket.unready:
                    return
                bucket.mark(self.step)
                bucket.work = self.collectives.all_reduce(bucket.flat)
                self._launched.append(bucket)
                self._count(bucket)
            self._next += 1

    def _is_skipped(self, bucket: Bucket) -> bool:
        return bool(self._skipped) and all(t in self._skipped for t in bucket.tensors)

    def _count(self, bucket: Bucket) -> None:
        """A ring moves 2(n-1)/n of the bucket in all, half of it outgoing."""
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
        # A step may have several exchanges, or a loop no steps: others count these, too.
        self._round += 1
        self._member.round = max(self._member.round, self._round, self.step + 1)

    def refresh(self) -> None:
        """Nothing to do: results arrive only when awaited."""

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        wanted = None if tensors is None else set(tensors)
        due = [b for b in self._launched if wanted is None or not wanted.isdisjoint(b.tensors)]
        if not due:
            return
        begun = time.monotonic()
        for bucket in due:
            self.collectives.wait(bucket.work)
        self.wait_s += time.monotonic() - begun
        self._launched = [bucket for bucket in self._launched if bucket not in due]
        carried: set[int] = set()  # by any worker, of those to be assembled
        whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        for bucket in due:
            is_present, step = bucket.sums()
            self._agree_on_step(bucket, step)
            for place, present in zip(bucket.places, is_present, strict=True):
                if not present:
                    continue  # nobody used it: its gradient stays as it is
                result = self._slots.results[place.tensor]
                if place.whole is None or result is None or result.is_sparse:
                    carried.add(place.tensor)
                else:
                    whole.append((result.detach(), place.whole))
        if whole:
            targets, sources = map(list, zip(*whole, strict=True))
            torch._foreach_copy_(targets, sources)
        for tensor in self._places if carried else ():
            if tensor in carried:
                self._assemble(tensor)
        for bucket in self._buckets:
            if bucket not in self._launched:
                bucket.reset()

    def _agree_on_step(self, bucket: Bucket, found: list[float]) -> None:
        workers = self.plan.cluster.workers
        if found != [workers * digit for digit in digits(bucket.step)]:
            raise RuntimeFault(
                f"workers ran different numbers of backward passes up to step {self.step}: every "
                "worker must call backward() equally often a step (use job.accumulate() for "
                "passes that only add up)"
            )

    def _assemble(self, tensor: int) -> None:
        result = self._slots.results[tensor]
        if result is None or result.is_sparse:
            empty = torch.empty_like(self._parameters[tensor], requires_grad=False)
            self._slots.results[tensor] = empty
            result = self._slots.results[tensor]
            assert result is not None
        in_place = result.is_contiguous() and not is_lazy(result)
        flat = as_real(result if in_place else torch.empty_like(result)).reshape(-1)
        for _, place in self._places[tensor]:
            flat[place.start : place.end].copy_(place.values)
        if not in_place:
            result.copy_(shaped_as(result, flat))


def digits(step: int) -> list[float]:
    """The last binary digits of a step."""
    return [float(step >> digit & 1) for digit in range(STEP_DIGITS)]


def alike(gradient: torch.Tensor, view: torch.Tensor) -> bool:
    """Whether one elementwise operation can write the gradient into the view."""
    return (
        gradient.layout == torch.strided
        and gradient.dtype == view.dtype
        and gradient.device == view.device
    )


def divide(values: torch.Tensor, by: int, out: torch.Tensor) -> None:
    """A share of the mean: divide before summing, so that short formats do not overflow."""
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
    # NCCL copies its store, which works only with torch's own stores.
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
