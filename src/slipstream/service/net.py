"""The net: wide and deep, for few words of text.

Deep is the GaDei paper's Figure 2: embedding, parallel convolutions, max over time. Wide is a row
of class weights for each feature. They have separate losses, because in one softmax the wide
part fits the training data alone and the deep part learns nothing:

    loss = cross-entropy(deep) + Σ_c max(0, 1 - y_c · wide_c)²      y_c = ±1
    answer = (softmax(deep / T_d) + softmax(wide / T_w)) / 2

Both tables are ``nn.Embedding``, of which learners send only the rows that a batch used.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.service.features import FIRST_WORD
from slipstream.service.settings import TextSetting


class WideAndDeep(nn.Module):
    """Scores of a batch of texts, of each part.

    Args:
        words: How many words are known.
        features: How many features are known.
        classes: How many classes there are.
        setting: Sizes.

    >>> net = WideAndDeep(10, 20, 3, TextSetting())
    >>> words, features = torch.tensor([[2, 3, 4, 5]]), torch.tensor([[1, 2]])
    >>> deep, wide = net(words, torch.tensor([4]), features, torch.ones(1, 2))
    >>> deep.shape, wide.shape
    (torch.Size([1, 3]), torch.Size([1, 3]))
    """

    def __init__(self, words: int, features: int, classes: int, setting: TextSetting) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words + FIRST_WORD, setting.dimensions, padding_idx=0)
        # Torch's initial values, of norm 11, hardly move at this rate: the layers above then learn
        # random vectors by heart (held-out TREC, deep part, 8 epochs: 0.734 instead of 0.802).
        with torch.no_grad():
            self.embedding.weight.uniform_(-setting.embedding_range, setting.embedding_range)
            self.embedding.weight[0] = 0
        # A convolution as a product of each window: twice as fast as nn.Conv1d on batches of 2.
        self.windows = nn.ModuleList(
            nn.Linear(window * setting.dimensions, setting.maps) for window in setting.windows
        )
        self.dropout = nn.Dropout(setting.dropout)
        self.classifier = nn.Linear(setting.maps * len(setting.windows), classes)
        self.wide = nn.Embedding(features + 1, classes, padding_idx=0)
        nn.init.zeros_(self.wide.weight)
        self._widths = setting.windows

    def forward(
        self, words: Tensor, lengths: Tensor, features: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scores of the deep and of the wide part, a text a row.

        Args:
            words: Numbers of words, a text a row, padded with 0 to the longest.
            lengths: Words of each text with its own padding: at least the widest window.
            features: Numbers of features, padded with 0.
            values: Their tf-idf, padded with 0.
        """
        embedded = self.embedding(words)
        pooled = []
        for layer, width in zip(self.windows, self._widths, strict=True):
            places = words.shape[1] - width + 1
            windows = torch.cat([embedded[:, i : i + places] for i in range(width)], 2)
            # After ReLU nothing is below 0, so 0 hides windows that reach beyond a text's end.
            inside = torch.arange(places) < (lengths - width + 1).unsqueeze(1)
            pooled.append((layer(windows).relu() * inside.unsqueeze(2)).amax(1))
        deep = self.classifier(self.dropout(torch.cat(pooled, 1)))
        wide = torch.bmm(values.unsqueeze(1), self.wide(features)).squeeze(1)
        return deep, wide


def loss_of(deep: Tensor, wide: Tensor, targets: Tensor) -> Tensor:
    """The sum of both parts' losses, the mean over a batch.

    Args:
        deep: Scores of the deep part.
        wide: Scores of the wide part.
        targets: Shares of the classes, 1/k for each of a row's k.

    >>> loss_of(torch.zeros(1, 2), torch.tensor([[1.0, -1.0]]), torch.tensor([[1.0, 0.0]])).item()
    0.6931471824645996
    """
    signs = torch.where(targets > 0, 1.0, -1.0)
    hinge = (1 - signs * wide).clamp(min=0).square().sum(1).mean()
    return F.cross_entropy(deep, targets) + hinge
