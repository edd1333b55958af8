"""Notices weights that a loop writes outside of its optimizer's steps, while peers add to them.

Whoever swaps weights out and restores them also removes what peers have added meanwhile, and they
never get what the loop writes itself. A write through ``.data`` leaves no version behind, so a few
values of each parameter are compared: those after the last update, and those before the next.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.torch.tensors.script_lines import level_of_the_script
from slipstream.torch.tensors.staging import as_real

WATCHED = 64  # parameters
SAMPLE = 8  # values of each


class Sample:
    """A few values of one parameter: the first ones of the row in its middle."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter, self._at, self._memory = parameter, -1, memoryview(b"")
        self._known: bytes | None = None  # none before the first step

    @property
    def changed(self) -> bool:
        """Whether the values are others than those that were noted."""
        return self._known is not None and self.read() != self._known

    def note(self) -> None:
        """These are the values after an update."""
        self._known = self.read()

    def note_again(self) -> None:
        """The same, if there were any."""
        if self._known is not None:
            self._known = self.read()

    def read(self) -> bytes:
        """The values of now; memory is looked for once, as long as the loop does not replace it."""
        if self._at != self._parameter.data_ptr():
            self._find()
        return self._memory.tobytes() if self._at >= 0 else as_bytes(self._row()).tobytes()

    def _find(self) -> None:
        weights = as_real(self._parameter.data)
        if weights.device.type == "cpu" and weights.is_contiguous():
            self._at, self._memory = self._parameter.data_ptr(), as_bytes(self._row())

    def _row(self) -> Tensor:
        """A view of the values."""
        weights = as_real(self._parameter.data)
        rows = weights.view(1) if weights.dim() == 0 else weights
        while rows.dim() > 1:
            rows = rows[len(rows) // 2]
        return rows[:SAMPLE]


class WrittenWeights:
    """The samples of a model's parameters; the lock of the weights must be held.

    Args:
        names: Of the parameters.
        constant: Whether only updates change a parameter.

    Attributes:
        found: The first parameter that the loop was found to have written, and nothing is compared
            any more; empty before.
    """

    def __init__(
        self, names: Sequence[str], parameters: Sequence[Tensor], constant: Callable[[Tensor], bool]
    ) -> None:
        self.found = ""
        self._names = names
        on_host = all(parameter.device.type == "cpu" for parameter in parameters)
        most = WATCHED if on_host else 1  # to read a value takes an accelerator long
        every = max(1, -(-len(parameters) // most))
        self._samples = {
            at: Sample(parameter)
            for at, parameter in enumerate(parameters)
            if at % every == 0 and parameter.numel() and constant(parameter)
        }

    def look(self, at: int) -> None:
        """An update is about to change a parameter: has the loop written it since the last one?"""
        sample = self._samples.get(at)
        if sample is not None and sample.changed:
            self.found = self._names[at]
            self._samples.clear()

    def note(self, at: int) -> None:
        """An update has changed a parameter."""
        sample = self._samples.get(at)
        if sample is not None:
            sample.note_again()

    def look_at_all(self) -> None:
        """The same before an update of all."""
        for at in list(self._samples):
            self.look(at)

    def note_all(self) -> None:
        """All weights are known from now on."""
        for sample in self._samples.values():
            sample.note()

    def note_all_again(self) -> None:
        """The same, if there was a step."""
        for sample in self._samples.values():
            sample.note_again()


class WrittenWarning:
    """Warns once of weights that the loop has written.

    Args:
        written: Where it is noticed.
        is_first: Whether this worker is the one that warns.
    """

    def __init__(self, written: WrittenWeights, is_first: Callable[[], bool]) -> None:
        self._written, self._is_first, self._told = written, is_first, False

    def give(self, step: int) -> None:
        """Warn if it was noticed since the last step."""
        if not self._written.found or self._told:
            return
        self._told = True
        if self._is_first():
            warnings.warn(
                f"the loop has written weights outside of optimizer.step() (in step {step} "
                f"{self._written.found!r}, and maybe others): peers do not get such a change, and "
                "weights that are put back after an evaluation lack what peers have added "
                "meanwhile. Swap weights (EMA, Lookahead) within `with job.swapped_weights():`; "
                "load them before the first step. Later writes are not reported",
                stacklevel=level_of_the_script(),
            )


def as_bytes(row: Tensor) -> memoryview:
    """Values on the host as bytes: a view, if they are there and next to each other."""
    return memoryview(row.contiguous().cpu().view(torch.uint8).numpy())
