"""A small classifier with random weights, for tests of files and answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from slipstream.apps.service.batches import Examples
from slipstream.apps.service.features import Encoder
from slipstream.apps.service.model_file import ModelHead, write_model
from slipstream.apps.service.net import Scored, TextBatch, WideAndDeep
from slipstream.apps.service.rows import Rows
from slipstream.apps.service.settings import TextSetting
from slipstream.apps.service.task import tensors_of

SETTING = TextSetting(dimensions=16, maps=8)
LABELS = [f"class {number:02}" for number in range(12)]
TEXTS = [
    "How hot is it today ?",
    "Will it rain",
    "東京の天気は",
    "snow",
    "don't know; is it windy in St. John's?",
    "a " * 300,
    "wird es morgen regnen",
    "hot hot hot",
]


def random_net(encoder: Encoder) -> WideAndDeep:
    torch.manual_seed(1)
    net = WideAndDeep(len(encoder.words), len(encoder.features), len(LABELS), encoder.setting)
    nn.init.normal_(net.wide.weight)
    return net.eval()


def write_random_model(path: Path) -> WideAndDeep:
    """A model file, and the net that it was made of."""
    encoder = Encoder.of(TEXTS, len(LABELS), SETTING)
    net = random_net(encoder)
    shares = np.arange(1, len(LABELS) + 1, dtype=np.float32)
    head = ModelHead(labels=LABELS, temperatures=(1.3, 0.4), mean_temperature=0.6, setting=SETTING)
    write_model(path, head, tensors_of(net, encoder, shares / shares.sum()))
    return net


def scores_in_torch(net: WideAndDeep, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all texts in one batch."""
    rows = Rows(texts, [[0]] * len(texts), LABELS, [])
    examples = Examples(rows, Encoder.of(TEXTS, len(LABELS), SETTING))
    return reference(net, examples.batch(range(len(texts))))[:2]


def reference(net: WideAndDeep, batch: TextBatch) -> Scored:
    """The same net by torch's own operations, text by text."""
    deep, wide = [], []
    words = np.split(batch.words, batch.word_ends[:-1])
    features = np.split(batch.features, batch.feature_ends[:-1])
    values = np.split(batch.values, batch.feature_ends[:-1])
    for own, numbers, weights, kept in zip(words, features, values, batch.kept, strict=True):
        embedded = net.embedding(torch.from_numpy(own))
        pooled = []
        for layer in net.windows:
            width = layer.in_features // net.embedding.embedding_dim
            windows = embedded.unfold(0, width, 1).transpose(1, 2).flatten(1)
            pooled.append(layer(windows).relu().amax(0))
        deep.append(net.classifier(torch.cat(pooled) * torch.from_numpy(kept)))
        wide.append(torch.from_numpy(weights) @ net.wide(torch.from_numpy(numbers)))
    targets = torch.from_numpy(batch.targets)
    signs = torch.where(targets > 0, 1.0, -1.0)
    hinge = (1 - signs * torch.stack(wide)).clamp(min=0).square().sum(1).mean()
    loss = nn.functional.cross_entropy(torch.stack(deep), targets) + hinge
    return Scored(torch.stack(deep).detach(), torch.stack(wide).detach(), loss)
