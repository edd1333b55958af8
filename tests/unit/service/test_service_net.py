"""The net's gradients in one pass are those of torch; wrong sizes are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from service_models import LABELS, TEXTS, random_net, reference

from slipstream._native import text_net_gradients
from slipstream.apps.service.batches import Examples
from slipstream.apps.service.features import Encoder
from slipstream.apps.service.net import TextBatch, WideAndDeep
from slipstream.apps.service.rows import Rows
from slipstream.apps.service.settings import TextSetting

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
    for noise, slope in ((None, 1), (np.zeros(1, np.uint64), 1), (None, 3)):
        batch = examples.batch(numbers, noise)
        expected = reference(net, batch)
        expected.loss.backward()
        gradients = dense_gradients(net)
        scored = net(batch)
        (slope * scored.loss).backward()
        torch.testing.assert_close(scored.deep, expected.deep, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scored.wide, expected.wide, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(scored.loss, expected.loss, atol=1e-4, rtol=1e-5)
        assert len(gradients) == len(list(net.parameters()))
        for own, right in zip(dense_gradients(net), gradients, strict=True):
            torch.testing.assert_close(own, slope * right, atol=1e-4, rtol=1e-4)


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
    "ends that fall": ({"feature_ends": lambda a: a[::-1].copy()}, "features fall at text 1"),
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


Parts = dict[str, list[np.ndarray]]


def parts_of(net: WideAndDeep, batch: TextBatch) -> Parts:
    """What the kernel takes, in the right sizes."""
    weights = [net.embedding.weight, net.wide.weight]
    for layer in (net.classifier, *net.windows):
        weights += [layer.weight, layer.bias]
    arrays = [weight.detach().numpy().copy() for weight in weights]
    gradients = [np.zeros((len(batch.words), 128), np.float32)]
    gradients += [np.zeros((len(batch.features), len(LABELS)), np.float32)]
    gradients += [np.zeros_like(array) for array in arrays[2:]]
    scores = [np.zeros((2, len(LABELS)), np.float32) for _ in range(2)]
    return {"weights": arrays, "batch": list(batch), "gradients": gradients, "scores": scores}


def run(parts: Parts, widths: tuple[int, ...] = (2, 3, 4)) -> float:
    return text_net_gradients((128, 100, len(LABELS)), widths, **parts)


def refused(net: WideAndDeep, batch: TextBatch) -> None:
    run(parts_of(net, batch))


@pytest.fixture(scope="module")
def parts() -> Parts:
    net, examples = made(TextSetting())
    return parts_of(net, examples.batch([0, 1]))


def changed(parts: Parts, name: str, index: int, array: np.ndarray) -> Parts:
    return {**parts, name: [*parts[name][:index], array, *parts[name][index + 1 :]]}


SIZED = [("weights", i) for i in range(10)] + [("gradients", i) for i in range(10)]
SIZED += [("scores", 0), ("scores", 1)]


@pytest.mark.parametrize(("name", "index"), SIZED)
def test_every_size_is_checked(parts: Parts, name: str, index: int) -> None:
    run(parts)
    shorter = parts[name][index].reshape(-1)[:-1].copy()
    with pytest.raises(ValueError, match=rf"{name}\[{index}\] has"):
        run(changed(parts, name, index, shorter))


@pytest.mark.parametrize("name", ["gradients", "scores"])
def test_what_is_written_must_not_overlap(parts: Parts, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}\[0\] overlaps {name}\[1\]"):
        run(changed(parts, name, 1, parts[name][0]))
    gradients = changed(parts, "gradients", 2, parts["weights"][2])
    with pytest.raises(ValueError, match=r"gradients\[2\] overlaps weights\[2\]"):
        run(gradients)


def test_nothing_is_written_to_what_is_constant(parts: Parts) -> None:
    constant = parts["scores"][0].copy()
    constant.flags.writeable = False
    with pytest.raises(ValueError, match="must be writable"):
        run(changed(parts, "scores", 0, constant))


def test_windows_and_parts_are_counted(parts: Parts) -> None:
    for widths in ((), (2, 3, 4, 5)):
        with pytest.raises(ValueError, match="there must be"):
            run(parts, widths)
    with pytest.raises(ValueError, match="width is 0"):
        run(parts, (0, 3, 4))


@pytest.mark.parametrize("index", range(10))
def test_nan_in_any_weight_reaches_the_loss(parts: Parts, index: int) -> None:
    assert np.isfinite(run(parts))
    wrong = np.full_like(parts["weights"][index], np.nan)
    assert np.isnan(run(changed(parts, "weights", index, wrong)))


def test_a_second_backward_pass_is_refused() -> None:
    net, examples = made(TextSetting())
    loss = net(examples.batch([0, 1])).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once for each forward pass"):
        loss.backward()


@pytest.mark.parametrize("sizes", [(0, 100, 12), (128, 100, (1 << 20) + 1)])
def test_sizes_out_of_range_are_refused(parts: Parts, sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="0 or too large"):
        text_net_gradients(sizes, (2, 3, 4), **parts)
