"""A small classifier with random weights, for tests of files and answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

from slipstream.service.batches import Examples
from slipstream.service.features import Encoder
from slipstream.service.learn import tensors_of
from slipstream.service.model_file import ModelHead, write_model
from slipstream.service.net import WideAndDeep
from slipstream.service.rows import Rows
from slipstream.service.settings import TextSetting

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


def write_random_model(path: Path, temperatures: tuple[float, float] = (1.3, 0.4)) -> WideAndDeep:
    """A model file, and the net that it was made of."""
    encoder = Encoder.of(TEXTS, len(LABELS), SETTING)
    net = random_net(encoder)
    shares = np.arange(1, len(LABELS) + 1, dtype=np.float32)
    head = ModelHead(labels=LABELS, temperatures=temperatures, setting=SETTING)
    write_model(path, head, tensors_of(net, encoder, shares / shares.sum()))
    return net


def scores_in_torch(net: WideAndDeep, texts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Of all texts in one padded batch."""
    rows = Rows(texts, [[0]] * len(texts), LABELS, [])
    examples = Examples(rows, Encoder.of(TEXTS, len(LABELS), SETTING))
    with torch.no_grad():
        deep, wide = net(*examples.batch(range(len(texts))))
    return deep, wide
