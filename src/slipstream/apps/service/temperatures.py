"""How the scores of the net's two parts become one answer.

    m = (softmax(deep / T_d) + softmax(wide / T_w)) / 2,   answer = softmax(ln m / T_m)

T_m changes no order of classes. Without it, where one part cannot learn a data set, half of every
answer would be a guess, and no confidence above 1/2 + 1/(2 · classes).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
import numpy as np
import numpy.typing as npt

LEAST_SHARE = 1e-300  # its logarithm is finite

Scores = npt.NDArray[np.floating]
Shares = npt.NDArray[np.float64]
Temperature = Annotated[float, msgspec.Meta(gt=0, le=1000)]


class Temperatures(msgspec.Struct, frozen=True):
    """What scores are divided by before each softmax; the higher, the less sure the answer.

    Attributes:
        deep: T_d, for the scores of the deep part.
        wide: T_w, for the scores of the wide part.
        mean: T_m, for the logarithms of the mean of both parts' probabilities.

    >>> scores = np.zeros(2), np.array([np.log(3), 0.0])
    >>> Temperatures(deep=1.0, wide=1.0).answer(*scores).round(3).tolist()
    [0.625, 0.375]
    """

    deep: Temperature
    wide: Temperature
    mean: Temperature = 1.0

    def answer(self, deep: Scores, wide: Scores) -> Shares:
        """The probabilities of the classes, which are the last axis; in float64."""
        mean = (softmax(deep, self.deep) + softmax(wide, self.wide)) / 2
        return softmax(np.log(np.maximum(mean, LEAST_SHARE)), self.mean)


def softmax(scores: Scores, temperature: float) -> Shares:
    """The softmax of scores over the last axis, in float64."""
    scaled = scores.astype(np.float64) / temperature
    powers = np.exp(scaled - scaled.max(-1, keepdims=True))
    shares: Shares = powers / powers.sum(-1, keepdims=True)
    return shares
