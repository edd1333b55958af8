"""Answers of a trained classifier, with numpy alone.

The same computation as the net's in torch, for one text at a time. A text of which nothing is known
answers with the classes' shares in the training data.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from slipstream.service.features import Encoded, Encoder
from slipstream.service.model_file import Array, ModelHead, read_model
from slipstream.service.refusals import Damaged

Scores = npt.NDArray[np.float32]
TOP = 10


class Model:
    """A classifier from a model file. Threads may share it.

    Attributes:
        labels: The classes' names.
        nbytes: The memory that it takes.
    """

    def __init__(self, head: ModelHead, tensors: dict[str, Array]) -> None:
        self.labels = head.labels
        self.nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self._head, self._tensors = head, tensors
        self._encoder = Encoder(tensors["words"], tensors["features"], tensors["idf"], head.setting)

    @classmethod
    def load(cls, path: Path | str) -> Model:
        """Read a model file and check it.

        Args:
            path: Where it is.

        Raises:
            Damaged: It cannot be read, was damaged, or has another format.
        """
        head, tensors = read_model(Path(path))
        for name in ("words", "features"):
            if (tensors[name][1:] <= tensors[name][:-1]).any():
                raise Damaged(f"the model file's {name} are not sorted")
        return cls(head, tensors)

    def classify(self, texts: Sequence[str], top: int = TOP) -> list[list[tuple[str, float]]]:
        """The classes of some texts.

        Args:
            texts: Any texts.
            top: How many classes to name for each.

        Returns:
            For each text, classes with their confidence, highest first, ties by name.
        """
        return [self._best(self.probabilities(text), top) for text in texts]

    def probabilities(self, text: str) -> npt.NDArray[np.float64]:
        """The probability of every class; they sum to 1.

        Args:
            text: Any text.
        """
        encoded = self._encoder.encode(text)
        if not encoded.known:
            return np.asarray(self._tensors["shares"], np.float64)
        deep, wide = self._head.temperatures
        return mean_softmax(self._deep(encoded), self._wide(encoded), deep, wide)

    def _deep(self, encoded: Encoded) -> Scores:
        """Convolutions as products of windows, max over time, one layer."""
        setting, tensors = self._head.setting, self._tensors
        missing = max(setting.windows) - len(encoded.words)
        words = np.pad(encoded.words, (0, max(missing, 0)))
        embedded = tensors["embedding"][words]
        pooled = []
        for window in setting.windows:
            places = len(words) - window + 1
            rows = np.hstack([embedded[i : i + places] for i in range(window)])
            maps = rows @ tensors[f"window{window}"] + tensors[f"window{window}.bias"]
            pooled.append(np.maximum(maps.max(0), 0))
        scores: Scores = np.concatenate(pooled) @ tensors["classifier"]
        return scores + tensors["classifier.bias"]

    def _wide(self, encoded: Encoded) -> Scores:
        scores: Scores = encoded.values @ self._tensors["wide"][encoded.features]
        return scores

    def _best(self, probabilities: npt.NDArray[np.float64], top: int) -> list[tuple[str, float]]:
        """The highest, ties by name; labels are compared only among candidates."""
        count = min(top, len(self.labels))
        least = np.partition(probabilities, -count)[-count] if count else np.inf
        candidates = np.flatnonzero(probabilities >= least)
        named = [(self.labels[i], float(probabilities[i])) for i in candidates]
        return sorted(named, key=lambda pair: (-pair[1], pair[0]))[:count]


def mean_softmax(
    deep: npt.NDArray[np.floating], wide: npt.NDArray[np.floating], t_deep: float, t_wide: float
) -> npt.NDArray[np.float64]:
    """The mean of two softmaxes over the last axis, each with its temperature.

    >>> mean_softmax(np.zeros(2), np.array([np.log(3), 0.0]), 1.0, 1.0).tolist()
    [0.625, 0.375]
    """
    return (softmax(deep / t_deep) + softmax(wide / t_wide)) / 2


def softmax(scores: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Probabilities over the last axis, in float64.

    >>> softmax(np.array([1000.0, 1000.0])).tolist()
    [0.5, 0.5]
    """
    exact = scores.astype(np.float64)
    powers = np.exp(exact - exact.max(-1, keepdims=True))
    shares: npt.NDArray[np.float64] = powers / powers.sum(-1, keepdims=True)
    return shares
