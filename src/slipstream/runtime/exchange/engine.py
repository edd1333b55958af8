"""The interface between a framework and the engine. ``slipstream.torch`` implements it.

A second framework would implement these protocols, and nothing else would change: strategies,
plans, channels, servers, members, transports.

- ``Slots`` (``exchange/channel.py``): where a tensor's contribution is, and where its result goes.
  ``torch/tensors/slots.py`` uses gradients and weights.
- ``LayerMath`` (``codecs/matrices.py``): a layer's gradient from stacked rows.
  ``torch/tensors/layer_math.py`` uses one GEMM into ``.grad``.
- ``LayerSource`` (``driver.py``): layers whose gradients are captured in compact form.
  ``torch/capture/compact_gradients.py`` has them from autograd.
- ``Applier``: when results are awaited, and what is done with them. ``torch/`` has five: the user's
  optimizer runs at this worker (``WorkerUpdates``), at the servers (``ServerUpdates``), clock by
  clock (``StreamedUpdates``), on a vector that peers add to (``PartialUpdates``), or on this
  worker's own weights between outer rounds (``OuterUpdates``).

A framework then drives a ``Driver``: ``ready(tensor)`` when a gradient is final, ``flush()`` when
the backward pass has ended or the step begins, ``wait()`` before results are used, ``resume(step)``
when a step has ended. ``torch/capture/synchronizer.py`` does this from autograd's hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.codecs.matrices import LayerMath
from slipstream.runtime.exchange.channel import Slots
from slipstream.runtime.exchange.driver import Driver, LayerSource

__all__ = ["Applier", "Driver", "Hook", "LayerMath", "LayerSource", "Slots"]


class Hook(Protocol):
    """Something registered with the framework."""

    def remove(self) -> None: ...


class Applier(Protocol):
    """Decides when to wait for results, and applies them. It keeps its own state.

    It also decides what ends a step: a hook of the user's optimizer, or a method of the optimizer
    that replaces the user's.

    Attributes:
        hooks: To be removed when the model and the optimizer become ordinary ones again.
    """

    hooks: Sequence[Hook] = ()

    def takes_pass(self) -> bool:
        """Whether a further backward pass in one step is exchanged, when one was before."""
        ...

    def pass_ended(self) -> None:
        """A backward pass outside ``job.accumulate`` is over; by default nothing leaves before the
        step, and passes add up."""
        return

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        """Wait until these of this worker's weights (default all) are up to date."""
        return
