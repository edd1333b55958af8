"""What a framework brings to the engine, written down. ``slipstream.torch`` is the first.

A second framework implements these protocols, and everything else stays as it is: strategies,
plans, channels, servers, members, transports.

- ``Slots`` (``exchange/channel.py``): where a tensor's contribution is, and where its result goes.
  ``torch/slots.py`` has gradients and weights behind them.
- ``LayerMath`` (``codecs/matrices.py``): a layer's gradient from stacked rows.
  ``torch/layer_math.py`` has one GEMM into ``.grad``.
- ``LayerSource`` (``driver.py``): layers whose gradients are captured in compact form.
  ``torch/compact_gradients.py`` has them from autograd.
- ``Applier``: when results are awaited, and what is done with them. ``torch/`` has five: the user's
  optimizer runs at this worker (``WorkerUpdates``), at the servers (``ServerUpdates``), clock by
  clock (``StreamedUpdates``), on a vector that peers add to (``PartialUpdates``), or on this
  worker's own weights between outer rounds (``OuterUpdates``).

A framework then drives a ``Driver``: ``ready(tensor)`` when a gradient is final, ``flush()`` when
the backward pass has ended or the step begins, ``wait()`` before results are used, ``resume(step)``
when a step has ended. ``torch/synchronizer.py`` does this from autograd's hooks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from slipstream.codecs.matrices import LayerMath
from slipstream.runtime.driver import Driver, LayerSource
from slipstream.runtime.exchange.channel import Slots

__all__ = ["Applier", "Driver", "Hook", "LayerMath", "LayerSource", "Slots"]


class Hook(Protocol):
    """Something registered with the framework."""

    def remove(self) -> None: ...


class Applier(Protocol):
    """Decides when results are awaited, and applies them. What it remembers is its own.

    What ends a step is its own affair, too: a hook of the user's optimizer, or a method that the
    optimizer calls which stands for it.

    Attributes:
        single_pass: What makes a second backward pass in one step an error, as the first one's
            gradients have left; empty if nothing does.
        hooks: What is to be removed when the model and the optimizer become ordinary ones again.
    """

    @property
    def single_pass(self) -> str: ...

    @property
    def hooks(self) -> Sequence[Hook]: ...

    def pass_ended(self) -> None:
        """A backward pass outside ``job.accumulate`` is over."""
        ...

    def wait(self, tensors: Sequence[int] | None = None) -> None:
        """Until these of this worker's weights (default all) are up to date."""
        ...

    def begin_step(self) -> None:
        """A step has ended, or other weights were loaded."""
        ...
