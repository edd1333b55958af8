"""The part common to the channels of a host's workers, leader or not."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Sequence

import msgspec

from slipstream.codecs.matrices import Matrix
from slipstream.errors import RuntimeFault
from slipstream.runtime.exchange.rounds import completed_twice
from slipstream.runtime.exchange.send_buffers import Loan, SendBuffers
from slipstream.runtime.hosts.layers import HostLayers
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.types import Settings, Values

AddGradient = Callable[[int, Values], None]


class HostChannel:
    """A worker's rounds within its host.

    All workers of a host make the same rounds, which count from 0; hosts may count rounds between
    themselves in another way. The sum of a round overwrites the last result, so a worker
    contributes to a tensor after it has taken that result.

    Args:
        worker: The worker's number on the host; 0 represents it.
        memory: The memory that the host's workers share.
        member: This worker's endpoint.
        limit_s: The longest wait.
        layers: The layers that may be sent in compact form.
        settings: The optimizer's settings, which are sent with a round; None if none are.
    """

    takes_early = False  # the rows of a host are sent together
    takes_encoded = False  # and are encoded together

    def __init__(
        self,
        worker: int,
        memory: HostMemory,
        member: Endpoint,
        limit_s: float,
        layers: HostLayers | None,
        settings: Callable[[], Settings] | None,
    ) -> None:
        self.rank, self._memory = worker, memory
        self._member, self._limit_s = member, limit_s
        self._layers = layers
        self._settings = settings
        self._compact_units: Collection[int] | None = None  # layers in compact form; None: all
        self._buffers = SendBuffers()
        self._skipped: Collection[int] = ()
        self._round = 0
        self._ready_tensors: set[int] = set()

    def _settings_number(self) -> int:
        """Return a number that is equal for equal settings."""
        settings = None if self._settings is None else self._settings()
        return 0 if settings is None else zlib.crc32(msgspec.msgpack.encode(settings))

    def _refuse_second(self, tensor: int) -> None:
        if tensor in self._ready_tensors:
            raise completed_twice(self._memory.specs[tensor].name)

    def _unready_tensors(self) -> list[int]:
        """Return the tensors that are not ready, and take part in this round."""
        others = {*self._ready_tensors, *self._skipped}
        return [tensor for tensor in range(len(self._memory.specs)) if tensor not in others]

    def skip_round(self, tensors: Collection[int]) -> None:
        self._skipped = tensors

    # ---- layers in compact form; implements ``LayerChannel``

    def travel_compact(self, units: Collection[int]) -> None:
        self._compact_units = units

    def buffer(self, unit: int, place: int, nbytes: int) -> Loan:
        return self._buffers.take((unit, place), nbytes)

    def early(self, unit: int, matrix: Matrix, loan: Loan) -> int:
        raise RuntimeFault("the rows of a host are sent together")

    def early_round(self, unit: int) -> int | None:
        return None

    def ready_layer(
        self, unit: int, matrices: Sequence[tuple[Matrix, Loan]] | None, *, early: bool = False
    ) -> None:
        """Fix a layer's contribution to this round; None: the worker did not use the layer."""
        raise NotImplementedError

    def _flush_layers(self, captured: Collection[int]) -> None:
        """Contribute nothing to layers that no pass has used."""
        for unit in self._layers.units if self._layers is not None else ():
            is_compact = self._compact_units is None or unit in self._compact_units
            if is_compact and unit not in captured:
                self.ready_layer(unit, None)
