"""The net: wide and deep, for few words of text.

Deep is the GaDei paper's Figure 2: embedding, parallel convolutions, max over time. Wide is a row
of class weights for each feature. They have separate losses, because in one softmax the wide
part fits the training data alone and the deep part learns nothing:

    loss = cross-entropy(deep) + Σ_c max(0, 1 - y_c · wide_c)²      y_c = ±1

``temperatures.py`` makes one answer of both parts.

Both tables are ``nn.Embedding``, of which learners send only the rows that a batch used. Loss and
gradients are computed in C++, in one pass. On batches of 2, torch's own operations take five times
as long: there are many small ones, and most of backward multiplies zeros, since only one window of
each map has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from slipstream._native import text_net_gradients
from slipstream.apps.service.features import FIRST_WORD, Ids, Values
from slipstream.apps.service.settings import TextSetting


class TextBatch(NamedTuple):
    """Some texts, one after the other.

    Attributes:
        words: Numbers of words, of each text at least as many as the widest window; 0 is padding.
        word_ends: Where each text's words end.
        features: Numbers of features.
        values: Their tf-idf.
        feature_ends: Where each text's features end.
        targets: Shares of the classes, a row a text: 1/k for each of its k.
        kept: Dropout: what each pooled value is multiplied by, a row a text.
    """

    words: Ids
    word_ends: Ids
    features: Ids
    values: Values
    feature_ends: Ids
    targets: Values
    kept: Values


class Scored(NamedTuple):
    """What the net makes of a batch: scores of each part, a row a text, and the mean loss."""

    deep: Tensor
    wide: Tensor
    loss: Tensor


class WideAndDeep(nn.Module):
    """Scores and loss of a batch of texts.

    Args:
        words: How many words are known.
        features: How many features are known.
        classes: How many classes there are.
        setting: Sizes.
    """

    def __init__(self, words: int, features: int, classes: int, setting: TextSetting) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words + FIRST_WORD, setting.dimensions, padding_idx=0)
        # Torch's initial values, of norm 11, hardly move at this rate: the layers above then learn
        # random vectors by heart (held-out TREC, deep part, 8 epochs: 0.734 instead of 0.802).
        with torch.no_grad():
            self.embedding.weight.uniform_(-setting.embedding_range, setting.embedding_range)
            self.embedding.weight[0] = 0
        # A convolution as a product of each window.
        self.windows = nn.ModuleList(
            nn.Linear(window * setting.dimensions, setting.maps) for window in setting.windows
        )
        self.classifier = nn.Linear(setting.maps * len(setting.windows), classes)
        self.wide = nn.Embedding(features + 1, classes, padding_idx=0)
        nn.init.zeros_(self.wide.weight)
        self._sizes, self._widths = (setting.dimensions, setting.maps, classes), setting.windows

    def forward(self, batch: TextBatch) -> Scored:
        """Scores and loss; ``loss.backward()`` hands out gradients that are ready."""
        weights = [self.embedding.weight, self.wide.weight]
        for layer in (self.classifier, *self.windows):
            weights += [layer.weight, layer.bias]
        run: Any = GradientsInOnePass.apply
        return Scored(*run(self._sizes, self._widths, batch, *weights))


class GradientsInOnePass(torch.autograd.Function):
    """Scores, loss and all gradients of a batch; those of the two tables in rows."""

    @staticmethod
    def forward(
        ctx: Any,
        sizes: tuple[int, int, int],
        widths: Sequence[int],
        batch: TextBatch,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        texts, classes = batch.targets.shape
        gradients = [
            np.empty((len(batch.words), weights[0].shape[1]), np.float32),
            np.empty((len(batch.features), classes), np.float32),
            *(np.empty(tuple(weight.shape), np.float32) for weight in weights[2:]),
        ]
        scores = np.empty((2, texts, classes), np.float32)
        arrays = [weight.detach().numpy() for weight in weights]
        loss = text_net_gradients(sizes, widths, arrays, batch, gradients, list(scores))
        ctx.gradients, ctx.rows = gradients, (batch.words, batch.features)
        ctx.shapes = [weight.shape for weight in weights[:2]]
        deep, wide = torch.from_numpy(scores)
        ctx.mark_non_differentiable(deep, wide)
        return deep, wide, torch.tensor(loss)

    @staticmethod
    def backward(ctx: Any, *slopes: Any) -> Any:
        slope = slopes[2]  # of the loss
        if ctx.gradients is None:  # torch has taken their memory over
            raise RuntimeError("backward() runs once for each forward pass of this net")
        found = [torch.from_numpy(gradient) for gradient in ctx.gradients]
        ctx.gradients = None
        if slope != 1:
            found = [gradient * slope for gradient in found]
        for table, rows in enumerate(ctx.rows):
            found[table] = torch.sparse_coo_tensor(
                torch.from_numpy(rows)[None],
                found[table],
                ctx.shapes[table],
                check_invariants=False,
            )
        return None, None, None, *found
