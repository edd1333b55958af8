"""Notices weights that a loop writes outside of its optimizer's steps, while peers add to them.

Whoever swaps weights out and restores them also removes what peers have added meanwhile, and they
never get what the loop writes itself. A write through ``.data`` leaves no version behind, so a few
values of each parameter are compared: those after the last update, and those before the next.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from slipstream.torch.tensors.script_lines import level_of_the_script
from slipstream.torch.tensors.staging import as_real

WATCHED = 64  # parameters
SAMPLE = 8  # values of each


class Sample:
    """A few values of one parameter that are next to each other in a row.

    Args:
        start: The first one's number, in the order of rows.
    """

    def __init__(self, parameter: Tensor, start: int) -> None:
        self._parameter, self._start = parameter, start
        self._at, self._memory, self._known = -1, memoryview(b""), b""

    @property
    def changed(self) -> bool:
        """Whether the values are others than those that were noted."""
        return self.read() != self._known

    def note(self) -> None:
        """These are the values after an update."""
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
        rows, start = weights.view(1) if weights.dim() == 0 else weights, self._start
        while rows.dim() > 1:
            row, start = divmod(start, rows[0].numel())
            rows = rows[row]
        return rows[start : start + SAMPLE]


class WrittenWeights:
    """The samples of a model's parameters; the lock of the weights must be held.

    Each has one in its middle, and one where each piece begins that peers have added since the last
    step: a loop that puts back what it has read before that piece came puts back the values there.

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
        self._names, self._parameters = names, parameters
        self._on_host = all(parameter.device.type == "cpu" for parameter in parameters)
        most = WATCHED if self._on_host else 1  # to read a value takes an accelerator long
        every = max(1, -(-len(parameters) // most))
        self._middles = {
            at: Sample(parameter, middle_of(parameter))
            for at, parameter in enumerate(parameters)
            if at % every == 0 and parameter.numel() and constant(parameter)
        }
        self._added: dict[int, dict[int, Sample]] = {}  # by parameter, by the first value's number
        self._begun = False  # whether there was a step: before it, the loop may load weights

    def look(self, at: int, start: int, stop: int) -> None:
        """Peers are about to add to these values of a parameter: has the loop written it since the
        last update?"""
        if self._begun and any(sample.changed for sample in self._of(at, start, stop)):
            self._find(at)

    def note(self, at: int, start: int, stop: int) -> None:
        """Peers have added to these values of a parameter."""
        if not self._begun or at not in self._middles:
            return
        if self._on_host:
            pieces = self._added.setdefault(at, {})
            if start not in pieces:
                pieces[start] = Sample(self._parameters[at], start)
        for sample in self._of(at, start, stop):
            sample.note()

    def _of(self, at: int, start: int, stop: int) -> Iterator[Sample]:
        """The sample in a parameter's middle, and those with some of these values."""
        if at in self._middles:
            yield self._middles[at]
        for first, sample in self._added.get(at, {}).items():
            if start - SAMPLE < first < stop:
                yield sample

    def _find(self, at: int) -> None:
        self.found = self._names[at]
        self._middles.clear()
        self._added.clear()

    def look_at_all(self) -> None:
        """The same before an update of all."""
        for at in list(self._middles) if self._begun else ():
            pieces = self._added.get(at, {}).values()
            if any(sample.changed for sample in [self._middles[at], *pieces]):
                self._find(at)
                return

    def note_all(self) -> None:
        """All weights are known from now on."""
        self._begun = True
        self._added.clear()
        for sample in self._middles.values():
            sample.note()

    def note_all_again(self) -> None:
        """The same, if there was a step."""
        if self._begun:
            self.note_all()


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


def middle_of(parameter: Tensor) -> int:
    """The number of the first value of the row in the middle of a parameter."""
    weights = as_real(parameter.data)
    in_row = weights.shape[-1] if weights.dim() else 1
    return weights.numel() // in_row // 2 * in_row


def as_bytes(row: Tensor) -> memoryview:
    """Values on the host as bytes: a view, if they are there and next to each other."""
    return memoryview(row.contiguous().cpu().view(torch.uint8).numpy())
