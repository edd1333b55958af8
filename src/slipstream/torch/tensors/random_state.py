"""The state of torch's, Python's and numpy's random generators, as JSON."""

from __future__ import annotations

import base64
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
import torch
from torch import Tensor

WORDS = 624  # of a Mersenne twister's state
Word = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
# numpy does not check the position, and would read outside of the words.
Position = Annotated[int, msgspec.Meta(ge=0, le=WORDS)]
Words = Annotated[list[Word], msgspec.Meta(min_length=WORDS, max_length=WORDS)]
WordsAndPosition = Annotated[list[Word], msgspec.Meta(min_length=WORDS + 1, max_length=WORDS + 1)]


class Saved(msgspec.Struct, frozen=True):
    """One rank's part of a checkpoint."""

    torch: str
    cuda: list[str]
    python: tuple[Literal[3], WordsAndPosition, float | None]
    numpy: tuple[Literal["MT19937"], Words, Position, Literal[0, 1], float]


@dataclass(frozen=True, slots=True)
class Generators:
    """The same in the generators' own types, checked by sample generators."""

    torch: Tensor
    cuda: list[Tensor]
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Generators:
        """Raises ValueError if a state is invalid; does not change any generator in use."""
        try:
            saved = msgspec.convert(state, Saved)
            found = cls(
                as_tensor(saved.torch),
                [as_tensor(text) for text in saved.cuda],
                (saved.python[0], tuple(saved.python[1]), saved.python[2]),
                (saved.numpy[0], np.array(saved.numpy[1], np.uint32), *saved.numpy[2:]),
            )
            found._try()
        # Each generator raises its own type of error.
        except (msgspec.ValidationError, ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"the state of its random generators is none: {error}") from error
        return found

    def _try(self) -> None:
        torch.Generator().set_state(self.torch)
        for device, state in enumerate(self._cuda_here()):
            torch.Generator(f"cuda:{device}").set_state(state)
        random.Random().setstate(self.python)
        np.random.RandomState().set_state(self.numpy)
        if not all(math.isfinite(gauss or 0.0) for gauss in (self.python[2], self.numpy[4])):
            raise ValueError("the next normal number is not finite")

    def _cuda_here(self) -> list[Tensor]:
        """The states of the job's CUDA devices, if this machine has as many."""
        here = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return self.cuda if len(self.cuda) == here else []

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if states := self._cuda_here():
            torch.cuda.set_rng_state_all(states)
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # noqa: NPY002


def as_tensor(text: str) -> Tensor:
    state = bytearray(base64.b64decode(text, validate=True))
    if not state:
        raise ValueError("a generator's state is empty")
    return torch.frombuffer(state, dtype=torch.uint8)


def random_state() -> dict[str, Any]:
    """The state of the generators in use."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "cuda": [
            base64.b64encode(state.numpy().tobytes()).decode()
            for state in (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])
        ],
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }
