"""Answers of a trained classifier, with numpy alone.

The same computation as the net's in torch, for one text at a time. A text of which nothing is known
answers with the classes' shares in the training data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.apps.service.features import Encoder, Ids
from slipstream.apps.service.model_file import Array, ModelHead, read_model
from slipstream.apps.service.temperatures import Scores, Shares


class Model:
    """A classifier from a model file; it takes ``nbytes`` of memory. Threads may share it."""

    def __init__(self, head: ModelHead, tensors: dict[str, Array]) -> None:
        self.labels = head.labels
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._head, self._tensors = head, tensors
        self._encoder = Encoder(tensors["words"], tensors["features"], tensors["idf"], head.setting)

    @classmethod
    def load(cls, path: Path | str) -> Model:
        """Read a model file and check it; raises Damaged if it cannot be used."""
        return cls(*read_model(Path(path)))

    def classify(self, texts: Sequence[str], top: int = 10) -> list[list[tuple[str, float]]]:
        """For each text, ``top`` classes with their confidence, highest first, ties by name."""
        return [self._best(self.probabilities(text), top) for text in texts]

    def probabilities(self, text: str) -> Shares:
        """The probability of every class for a text; they sum to 1."""
        words, features, values = encoded = self._encoder.encode(text)
        if not encoded.known:
            return self._tensors["shares"].astype(np.float64)
        wide: Scores = values @ self._tensors["wide"][features]
        return self._head.all_temperatures.answer(self._deep(words), wide)

    def _deep(self, words: Ids) -> Scores:
        """Convolutions as products of windows, max over time, one layer."""
        windows, tensors = self._head.setting.windows, self._tensors
        words = np.pad(words, (0, max(max(windows) - len(words), 0)))
        embedded = tensors["embedding"][words]
        pooled = []
        for window in windows:
            places = len(words) - window + 1
            rows = np.hstack([embedded[i : i + places] for i in range(window)])
            maps = rows @ tensors[f"window{window}"] + tensors[f"window{window}.bias"]
            pooled.append(np.maximum(maps.max(0), 0))
        scores: Scores = np.concatenate(pooled) @ tensors["classifier"]
        return scores + tensors["classifier.bias"]

    def _best(self, probabilities: Shares, top: int) -> list[tuple[str, float]]:
        """The highest, ties by name; labels are compared only among candidates."""
        count = min(top, len(self.labels))
        least = np.partition(probabilities, -count)[-count]
        candidates = np.flatnonzero(probabilities >= least)
        named = [(self.labels[i], float(probabilities[i])) for i in candidates]
        return sorted(named, key=lambda pair: (-pair[1], pair[0]))[:count]
