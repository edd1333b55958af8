"""The worker's half of a round over collectives: flat buckets, all-reduced in a fixed order."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from slipstream._native import largest
from slipstream.errors import RuntimeFault
from slipstream.plan import Plan
from slipstream.runtime.members.joining import Membership
from slipstream.torch.channels.buckets import (
    Bucket,
    Place,
    Reduction,
    digits,
    make_buckets,
    reductions,
)
from slipstream.torch.channels.link_store import LinkStore
from slipstream.torch.tensors.finite_gradients import magnitude_of
from slipstream.torch.tensors.inventory import Inventory
from slipstream.torch.tensors.slots import ExchangedGradients, wire_dtypes
from slipstream.torch.tensors.staging import as_real, is_lazy, shaped_as
from slipstream.transports.collective import Collectives
from slipstream.types import Cluster


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
        self._buckets = make_buckets(plan, parameters, collectives.device)
        self._places: dict[int, list[tuple[Bucket, Place]]] = {}
        for bucket in self._buckets:
            for place in bucket.places:
                self._places.setdefault(place.tensor, []).append((bucket, place))
        self._fired: set[int] = set()
        self._rounds: dict[frozenset[int], list[Reduction]] = {}  # by the tensors that they skip
        self._skipped: frozenset[int] = frozenset()
        self._round = self._reductions()
        self._next = 0
        self._begun = 0  # exchanges that this worker has begun
        self._launched: list[Reduction] = []

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
        while self._next < len(self._round) and self._round[self._next].is_ready:
            reduction = self._round[self._next]
            reduction.mark(self.step)
            reduction.work = self.collectives.all_reduce(reduction.flat)
            self._launched.append(reduction)
            self._count(reduction)
            self._next += 1

    def _count(self, reduction: Reduction) -> None:
        """A ring moves 2(n-1)/n of the values in all, half of it outgoing."""
        n = self.plan.cluster.workers
        nbytes = 2 * (n - 1) * reduction.nbytes // n
        scheme = self.plan.routes[reduction.buckets[0].chunk.route].scheme
        self.sent[scheme] += nbytes
        self.received[scheme] += nbytes

    def skip_round(self, tensors: Collection[int]) -> None:
        self._skipped = frozenset(tensors)
        self._round = self._reductions()

    def _reductions(self) -> list[Reduction]:
        """What is summed in a round, in one order; the same for rounds that skip the same."""
        if self._skipped not in self._rounds:
            taken = [b for b in self._buckets if not self._skipped.issuperset(b.tensors)]
            self._rounds[self._skipped] = reductions(taken, self.plan.rounds.chunk_bytes)
        return self._rounds[self._skipped]

    def flush(self) -> None:
        for tensor in self._places:
            if tensor not in self._fired and tensor not in self._skipped:
                self.ready(tensor)
        self._launch_complete()
        self._fired.clear()
        self._next = 0
        # A step may have several exchanges, or a loop no steps: others count these, too.
        self._begun += 1
        self._member.round = max(self._member.round, self._begun, self.step + 1)

    def refresh(self) -> None:
        """Nothing to do: results arrive only when awaited."""

    def wait(self, tensors: Iterable[int] | None = None) -> None:
        wanted = None if tensors is None else set(tensors)
        due = [r for r in self._launched if wanted is None or not wanted.isdisjoint(r.tensors)]
        if not due:
            return
        begun = time.monotonic()
        for reduction in due:
            self.collectives.wait(reduction.work)
        self.wait_s += time.monotonic() - begun
        self._launched = [reduction for reduction in self._launched if reduction not in due]
        carried: set[int] = set()  # by any worker, of those to be assembled
        whole: list[tuple[torch.Tensor, torch.Tensor]] = []
        for reduction in due:
            is_present, step = reduction.sums()
            self._agree_on_step(reduction, step)
            for place, present in zip(reduction.places, is_present, strict=True):
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
        launched = {bucket for reduction in self._launched for bucket in reduction.buckets}
        for bucket in self._buckets:
            if bucket not in launched:
                bucket.reset()

    def _agree_on_step(self, reduction: Reduction, found: list[float]) -> None:
        workers = self.plan.cluster.workers
        if found != [workers * digit for digit in digits(reduction.step)]:
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
