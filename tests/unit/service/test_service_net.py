"""The net's gradients in one pass are those of torch; wrong sizes are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from service_models import LABELS, TEXTS, random_net, reference

from slipstream._native import text_net_gradients
from slipstream.service.batches import Examples
from slipstream.service.features import Encoder
from slipstream.service.net import TextBatch, WideAndDeep
from slipstream.service.rows import Rows
from slipstream.service.settings import TextSetting

CLASSES = [[number % len(LABELS)] for number in range(len(TEXTS))]
CLASSES[2] = [0, 3, 7]  # a row of several classes

SETTINGS = {
    "as the service's": TextSetting(),
    "sizes that fill no vector": TextSetting(dimensions=13, maps=7, windows=(1, 3)),
}


def made(setting: TextSetting) -> tuple[WideAndDeep, Examples]:
    encoder = Encoder.of(TEXTS, len(LABELS), setting)
    return random_net(encoder), Examples(Rows(TEXTS, CLASSES, LABELS, []), encoder)


def dense_gradients(net: WideAndDeep) -> list[torch.Tensor]:
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return [gradient.to_dense() for gradient in found if gradient is not None]


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=list(SETTINGS))
@pytest.mark.parametrize("numbers", [[3], [0, 1], [2, 3, 5, 7], range(len(TEXTS))])
def test_gradients_and_scores_equal_torchs(setting: TextSetting, numbers: list[int]) -> None:
    net, examples = made(setting)
    for rng in (None, np.random.default_rng(0)):
        batch = examples.batch(numbers, rng)
        expected = reference(net, batch)
        expected.loss.backward()
        gradients = dense_gradients(net)
        scored = net(batch)
        (3 * scored.loss).backward()
        torch.testing.assert_close(scored.deep, expected.deep, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scored.wide, expected.wide, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scored.loss, expected.loss, atol=1e-4, rtol=1e-5)
        assert len(gradients) == len(list(net.parameters()))
        for own, right in zip(dense_gradients(net), gradients, strict=True):
            torch.testing.assert_close(own, 3 * right, atol=1e-4, rtol=1e-4)


def test_tables_have_gradients_in_rows_and_padding_has_none() -> None:
    net, examples = made(TextSetting())
    net(examples.batch([3])).loss.backward()  # one word: the rest of the window is padding
    gradient = net.embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert gradient.to_dense()[0].abs().max() == 0
    assert gradient.to_dense().abs().max() > 0
    assert net.wide.weight.grad is not None
    assert net.wide.weight.grad.is_sparse


def test_scores_need_no_gradient() -> None:
    net, examples = made(TextSetting())
    with torch.no_grad():
        scored = net(examples.batch([0, 1]))
    assert not scored.loss.requires_grad
    assert scored.deep.shape == (2, len(LABELS))


WRONG = {
    "a word that the table lacks": ({"words": lambda a: a + 1_000_000}, "word 10000.* is not one"),
    "a negative feature": ({"features": lambda a: -a}, "feature -.* is not one"),
    "a text shorter than a window": (
        {"words": lambda a: a[:3], "word_ends": lambda a: a * 0 + 3},
        "fewer than 4 words",
    ),
    "ends that fall": ({"word_ends": lambda a: a[::-1].copy()}, "text 1 has fewer"),
    "ends before the end": ({"feature_ends": lambda a: a * 0}, "the texts end at 0"),
    "values of another length": ({"values": lambda a: a[:-1]}, r"batch\[3\] has"),
    "targets of too few classes": ({"targets": lambda a: a[:, :-1].copy()}, r"batch\[5\] has"),
    "a mask of one text": ({"kept": lambda a: a[:1]}, r"batch\[6\] has"),
    "no text": ({"word_ends": lambda a: a[:0]}, "no text"),
    "halves of values": (
        {"words": lambda a: a.view(np.uint8)[:-4].copy()},
        "not a whole number of values",
    ),
}


@pytest.mark.parametrize(("changes", "message"), WRONG.values(), ids=list(WRONG))
def test_a_batch_that_does_not_fit_is_refused(changes: dict[str, Any], message: str) -> None:
    net, examples = made(TextSetting())
    batch = examples.batch([0, 1])
    changed = {name: change(getattr(batch, name)) for name, change in changes.items()}
    with pytest.raises(ValueError, match=message):
        refused(net, batch._replace(**changed))


def refused(net: WideAndDeep, batch: TextBatch) -> None:
    """Buffers of the sizes that the unchanged batch would need."""
    weights = [net.embedding.weight, net.wide.weight]
    for layer in (net.classifier, *net.windows):
        weights += [layer.weight, layer.bias]
    arrays = [weight.detach().numpy() for weight in weights]
    gradients = [np.zeros((len(batch.words), 128), np.float32)]
    gradients += [np.zeros((len(batch.features), len(LABELS)), np.float32)]
    gradients += [np.zeros_like(array) for array in arrays[2:]]
    scores = np.zeros((2, 2, len(LABELS)), np.float32)
    text_net_gradients((128, 100, len(LABELS)), (2, 3, 4), arrays, batch, gradients, scores)


@pytest.mark.parametrize("sizes", [(0, 100, 12), (128, 100, 1 << 40)])
def test_sizes_out_of_range_are_refused(sizes: tuple[int, int, int]) -> None:
    net, examples = made(TextSetting())
    arrays = [np.zeros(4, np.float32)] * 10
    batch = examples.batch([0, 1])
    with pytest.raises(ValueError, match="0 or too large"):
        text_net_gradients(sizes, (2, 3, 4), arrays, batch, arrays, arrays[:2])
    del net
