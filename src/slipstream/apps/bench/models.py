"""The nets that workloads train."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slipstream.apps.bench.data import RatingBatch, SparseBatch
from slipstream.apps.bench.data.vocabulary import PADDING
from slipstream.apps.bench.tables import Table, table

# The smallest image for which the last convolutions have 3 × 3 positions: every parameter keeps its
# shape, and a step takes a fraction of the computation.
ALEXNET_SIDE = 63


def fc_net() -> nn.Sequential:
    """Return a 2048-2048-2048-1000 net: 10.4M parameters, nearly all in three matrices."""
    return nn.Sequential(
        *(nn.Linear(2048, 2048), nn.ReLU()),
        *(nn.Linear(2048, 2048), nn.ReLU()),
        nn.Linear(2048, 1000),
    )


def conv_net(classes: int = 10) -> nn.Sequential:
    """Return a net of 9.7M parameters, all but 5,000 of them in convolutions."""

    def conv(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]

    return nn.Sequential(
        *conv(3, 64),
        nn.MaxPool2d(2),
        *conv(64, 512),
        nn.MaxPool2d(2),
        *(layer for _ in range(4) for layer in conv(512, 512)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(512, classes),
    )


def vgg_net(scale: float = 1.0) -> nn.Sequential:
    """Return VGG19's layers; small images are pooled up to the 7 × 7 of its first matrix."""
    net = table("vgg19").scaled(scale)
    layers: list[nn.Module] = []
    inputs = 3
    for name, outputs in _outputs(net, "conv").items():
        if name.endswith("_1") and layers:
            layers.append(nn.MaxPool2d(2))
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        inputs = outputs
    layers += [nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(7), nn.Flatten()]
    return nn.Sequential(*layers, *_classifier(net, 49 * inputs))


def alexnet_net(scale: float = 1.0, *, classes: int = 1) -> nn.Sequential:
    """Return AlexNet's layers, with one tower; small images are pooled up to 6 × 6.

    The classifier's outputs shrink with every other layer's, but not below ``classes``.
    """
    net = table("alexnet").scaled(scale)
    first, second, third, fourth, fifth = _outputs(net, "conv").values()
    model = nn.Sequential(
        *(nn.Conv2d(3, first, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(first, second, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2)),
        *(nn.Conv2d(second, third, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(third, fourth, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(fourth, fifth, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(6), nn.Flatten()),
        *_classifier(net, 36 * fifth, least=classes),
    )
    return _ready_to_learn(model)


def _ready_to_learn(model: nn.Sequential) -> nn.Sequential:
    """Set initial weights after He et al.; with torch's, eight layers hardly learn."""
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            assert layer.bias is not None
            nn.init.zeros_(layer.bias)
    return model


def _outputs(net: Table, kind: str) -> dict[str, int]:
    return {layer.name: layer.shapes[0][0] for layer in net.layers if layer.kind == kind}


def _classifier(net: Table, inputs: int, *, least: int = 1) -> list[nn.Module]:
    """Return the classifier's layers, with at least so many outputs."""
    layers: list[nn.Module] = []
    widths = [*_outputs(net, "fc").values()]
    widths[-1] = max(least, widths[-1])
    for outputs in widths:
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        inputs = outputs
    return layers[:-1]


def small_image_net(classes: int = 10) -> nn.Sequential:
    """Return two convolutions and two matrices for images of 28 × 28: 0.2M parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 5), nn.ReLU(), nn.MaxPool2d(2)),
        nn.Flatten(),
        *(nn.Linear(32 * 4 * 4, 256), nn.ReLU()),
        nn.Linear(256, classes),
    )


class SparseLogistic(nn.Module):
    """Logistic regression on sparse rows: one weight per feature, and a bias."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(features, 1, mode="sum")
        self.bias = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.weights.weight)

    def forward(self, rows: SparseBatch) -> Tensor:
        indices, values, offsets = rows
        product: Tensor = self.weights(indices, offsets, per_sample_weights=values)
        return product.squeeze(1) + self.bias


class Factorisation(nn.Module):
    """A model of a rating as r ≈ μ + b_u + b_i + p_u · q_i."""

    def __init__(self, users: int, items: int, rank: int, mean: float) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, rank), nn.Embedding(items, rank)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.mean = mean
        for factors in (self.users, self.items):
            nn.init.normal_(factors.weight, std=0.1)
        for bias in (self.user_bias, self.item_bias):
            nn.init.zeros_(bias.weight)

    def forward(self, pairs: Tensor) -> Tensor:
        user, item = pairs.unbind(1)
        product = (self.users(user) * self.items(item)).sum(1)
        biases = (self.user_bias(user) + self.item_bias(item)).squeeze(1)
        rating: Tensor = self.mean + biases + product
        return rating


class TextNet(nn.Module):
    """GaDei's text model: embedding, parallel convolutions, max over time, softmax.

    The paper gives no sizes; these are those of Kim (2014) with a smaller embedding.
    """

    def __init__(
        self,
        words: int,
        classes: int,
        *,
        dimensions: int = 128,
        windows: Sequence[int] = (3, 4, 5),
        maps: int = 100,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, dimensions, padding_idx=PADDING)
        nn.init.uniform_(self.embedding.weight, -0.25, 0.25)
        self.convolutions = nn.ModuleList(nn.Conv1d(dimensions, maps, window) for window in windows)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(maps * len(windows), classes)

    def forward(self, rows: Tensor) -> Tensor:
        embedded = self.embedding(rows).transpose(1, 2)
        pooled = [conv(embedded).relu().amax(2) for conv in self.convolutions]
        output: Tensor = self.classifier(self.dropout(torch.cat(pooled, 1)))
        return output


class Recommender(nn.Module):
    """A model of a rating from embeddings of its user, its item and the item's genres.

    The net's input is these embeddings, and the user's times each of the others, entry by entry.
    """

    def __init__(
        self, users: int, items: int, genres: int, *, width: int, hidden: int, mean: float
    ) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, width), nn.Embedding(items, width)
        self.genres = nn.EmbeddingBag(genres, width, mode="mean")
        self.net = nn.Sequential(
            *(nn.Linear(5 * width, hidden), nn.ReLU()),
            nn.Linear(hidden, 1),
        )
        self.mean = mean
        for embedding in (self.users, self.items, self.genres):
            nn.init.normal_(embedding.weight, std=0.1)

    def forward(self, rated: RatingBatch) -> Tensor:
        pairs, bags = rated
        user, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        genres = self.genres(bags.indices, bags.offsets)
        inputs = torch.cat([user, item, genres, user * item, user * genres], 1)
        rating: Tensor = self.mean + self.net(inputs).squeeze(1)
        return rating
