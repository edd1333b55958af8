"""Batches of a data set for workers whose gradients may not all count."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized

import torch
from torch.utils.data import Sampler

from slipstream.consistency.leases import Batch
from slipstream.errors import ConfigError


class LeasedBatches(Sampler[list[int]]):
    """A batch sampler: ``DataLoader(dataset, batch_sampler=job.sampler(dataset, 32))``.

    Every epoch is a shuffle of the whole set, cut into batches that workers lease one at a time.
    A pass ends when the first batch of a later epoch comes; batches that were given back in an
    earlier epoch are dealt in this one. If a loader's processes lease ahead, batches belong to
    steps in order; ``trained`` returns the number of steps made.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int,
        lease: Callable[[int, int], Batch],
        trained: Callable[[], int],
        *,
        workers: int,
        shuffle: bool,
        seed: int,
    ) -> None:
        if batch_size < 1 or len(dataset) < batch_size:
            raise ConfigError(
                f"batches of {batch_size} from {len(dataset)} samples: choose a size from 1 to that"
            )
        self._samples, self._batch_size = len(dataset), batch_size
        self._lease, self._trained, self._workers = lease, trained, workers
        self._leased = trained()  # batches that belong, or will belong, to a step
        self._shuffle, self._seed = shuffle, seed
        self._orders: dict[int, list[int]] = {}
        self._ahead: Batch | None = None
        self.epoch = 0

    @property
    def batches(self) -> int:
        """The number of batches per epoch, for all workers together; the last may be smaller."""
        return -(-self._samples // self._batch_size)

    def __len__(self) -> int:
        """About the number of batches that this worker gets per epoch."""
        return -(-self.batches // self._workers)

    def __iter__(self) -> Iterator[list[int]]:
        # Batches of a pass that was aborted belong to no step.
        returned = 0 if self._ahead else self._leased - self._trained()
        self._leased -= returned
        while True:
            batch, self._ahead = self._ahead or self._next(returned), None
            returned = 0
            if batch.epoch > self.epoch:
                # By one: a worker that missed an epoch makes as many passes as the others.
                self.epoch, self._ahead = self.epoch + 1, batch
                return
            yield self._content(batch)

    def _next(self, returned: int) -> Batch:
        self._leased += 1
        return self._lease(self.batches, returned)

    def _content(self, batch: Batch) -> list[int]:
        order = self._order(batch.epoch)
        start = batch.number * self._batch_size
        return order[start : start + self._batch_size]

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            generator = torch.Generator().manual_seed(self._seed + epoch)
            indices = torch.randperm(self._samples, generator=generator)
            if not self._shuffle:
                indices = torch.arange(self._samples)
            self._orders[epoch] = indices.tolist()
            for old in [e for e in self._orders if e < epoch - 1]:
                del self._orders[old]
        return self._orders[epoch]
