"""Text as characters, for models that predict the next one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slipstream.apps.bench.data.examples import Batch, Split
from slipstream.apps.bench.reading import read_text, refused
from slipstream.errors import ConfigError

TEST_SHARE = 0.1
# All models are evaluated on the same rows, so a few can distinguish systems, and quickly.
MOST_HELD_OUT = 1 << 12
_WAY_OUT = "give a text file, or a folder with one .txt file in it"


@dataclass(frozen=True, slots=True)
class Windows:
    """Rows of ``context`` characters, one every ``stride``; targets are one character later."""

    characters: Tensor
    context: int
    stride: int = 1

    def __len__(self) -> int:
        return max(0, (len(self.characters) - 1 - self.context) // self.stride + 1)

    def take(self, indices: Tensor) -> Batch:
        at = indices.unsqueeze(1) * self.stride + torch.arange(self.context + 1)
        rows = self.characters[at].long()
        return rows[:, :-1], rows[:, 1:]


@dataclass(frozen=True, slots=True)
class CharacterText:
    """Characters as their numbers in ``alphabet``.

    ``entropy`` is the least loss in nats per character that any model can have, if it is known.
    """

    characters: Tensor
    alphabet: str
    origin: str
    entropy: float | None = None

    def split(self, context: int) -> Split[Windows]:
        """Hold out the end of the text; rows for the test do not overlap, and are few.

        Args:
            context: The number of characters in a row.

        Returns:
            Rows to train on, which begin at every character, and the held-out rows.

        Raises:
            ConfigError: The text is too short for rows of this length.
        """
        num_train = len(self.characters) - max(1, round(len(self.characters) * TEST_SHARE))
        train = Windows(self.characters[:num_train], context)
        held_out = self.characters[num_train:][: max(MOST_HELD_OUT, context) + 1]
        test = Windows(held_out, context, stride=context)
        if not len(train) or not len(test):
            raise ConfigError(
                f"{self.origin}: {len(self.characters)} characters are too few for a context of "
                f"{context}; take a longer text, or a shorter context"
            )
        return Split(train, test, len(self.alphabet), self.origin)


def read_characters(path: Path) -> CharacterText:
    """Read a text file, or the only one in a folder; characters are numbered in their order."""
    file = _only_text(path) if path.is_dir() else path
    text = read_text(file, _WAY_OUT)
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    used, numbers = np.unique(codes, return_inverse=True)
    if len(used) < 2:
        raise refused(file, None, "a text of fewer than two different characters", _WAY_OUT)
    characters = torch.from_numpy(numbers.astype(np.int32))
    return CharacterText(characters, "".join(map(chr, used)), origin=str(file))


def _only_text(folder: Path) -> Path:
    files = sorted(folder.glob("*.txt"))
    if len(files) != 1:
        raise refused(folder, None, f"{len(files)} text files instead of one", _WAY_OUT)
    return files[0]
