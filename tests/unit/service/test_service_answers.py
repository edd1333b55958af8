"""Answers by numpy are those of the net in torch; damaged model files are never used."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from service_models import LABELS, TEXTS, scores_in_torch, write_random_model

from slipstream.apps.service.answers import Model
from slipstream.apps.service.errors import Damaged
from slipstream.apps.service.model_file import SHA256, TEXT, _digest

REMOVED = object()
UNSEEN = ["will it be hot tomorrow", "rain", "x", "Is it windy, today?", "天気"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_answers_equal_the_nets(tmp_path: Path) -> None:
    net = write_random_model(tmp_path / "m")
    model = Model.load(tmp_path / "m")
    known = [text for text in TEXTS + UNSEEN if model._encoder.encode(text).known]
    assert len(known) > len(TEXTS)
    deep, wide = scores_in_torch(net, known)
    mean = ((deep / 1.3).softmax(1) + (wide / 0.4).softmax(1)) / 2
    expected = (mean.log() / 0.6).softmax(1).numpy()
    for text, row in zip(known, expected, strict=True):
        np.testing.assert_allclose(model.probabilities(text), row, atol=1e-6)


def test_ten_best_highest_first(path: Path) -> None:
    model = Model.load(path)
    for answer in model.classify(TEXTS):
        assert len(answer) == 10
        assert answer == sorted(answer, key=lambda pair: (-pair[1], pair[0]))
    assert sum(sure for _, sure in model.classify(["rain"], 12)[0]) == pytest.approx(1)
    assert model.nbytes < path.stat().st_size


def test_ties_are_by_name(path: Path) -> None:
    model = Model.load(path)
    model.labels = LABELS[::-1]
    equal = np.full(len(LABELS), 1 / len(LABELS))
    assert [name for name, _ in model._best(equal, 10)] == LABELS[:10]


@pytest.mark.parametrize("text", ["", "   ", "ξψζ"])
def test_a_text_of_which_nothing_is_known_answers_with_shares(path: Path, text: str) -> None:
    answer = Model.load(path).classify([text])[0]
    assert answer[0] == ("class 11", pytest.approx(12 / 78))


@pytest.mark.parametrize("text", ["\0", "\ud800 rain", "a" * 100_000, "ﷺ" * 2048, "\u202e"])
def test_any_text_has_an_answer(path: Path, text: str) -> None:
    assert len(Model.load(path).classify([text])[0]) == 10


def test_no_bit_can_be_flipped(path: Path) -> None:
    whole = path.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    chance = random.Random(1)
    places = [chance.randrange(8 + length) for _ in range(150)]
    places += [chance.randrange(8 + length, len(whole)) for _ in range(50)]
    for place in [*range(8), *places]:
        broken = bytearray(whole)
        broken[place] ^= 1 << chance.randrange(8)
        path.write_bytes(broken)
        with pytest.raises(Damaged):
            Model.load(path)


@pytest.mark.parametrize("keep", [0, 7, 8, 100, -1])
def test_a_file_that_is_cut_off(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(Damaged):
        Model.load(path)


def test_a_missing_file_and_a_folder(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "none"):
        with pytest.raises(Damaged, match="cannot be read"):
            Model.load(place)


def with_text(path: Path, **changes: Any) -> None:
    """Change the metadata, and the checksum with it; sizes in the header stay."""
    whole = path.read_bytes()
    tensors = load_file(path)
    length = struct.unpack("<Q", whole[:8])[0]
    header = json.loads(whole[8 : 8 + length])
    text = json.loads(header["__metadata__"]["slipstream.text"])
    setting = changes.pop("setting", {})
    text = {name: value for name, value in (text | changes).items() if value is not REMOVED}
    setting = text["setting"] | setting
    text["setting"] = {name: value for name, value in setting.items() if value is not REMOVED}
    changed = json.dumps(text)
    header["__metadata__"] |= {TEXT: changed, SHA256: _digest(changed, tensors)}
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + whole[8 + length :])


def test_another_format_is_named(path: Path) -> None:
    with_text(path, format=2)
    with pytest.raises(Damaged, match="has format 2; this version of slipstream reads 1"):
        Model.load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": LABELS[1:]},
        {"labels": []},
        {"temperatures": [0.0, 1.0]},
        {"mean_temperature": -1.0},
        {"tokenizer": "other"},
        {"setting": {"windows": []}},
        {"setting": {"windows": [2, 3, 10**9]}},
        {"setting": {"dimensions": -1}},
        {"setting": {"characters": [0, 5]}},
    ],
)
def test_settings_that_do_not_fit(path: Path, changes: dict[str, Any]) -> None:
    with_text(path, **changes)
    with pytest.raises(Damaged):
        Model.load(path)


def test_settings_of_training_that_are_no_more_are_ignored(path: Path) -> None:
    before = Model.load(path).probabilities("rain")
    with_text(path, setting={"word_dropout": 0.1})
    np.testing.assert_array_equal(Model.load(path).probabilities("rain"), before)


def test_a_file_without_a_third_temperature_answers_with_the_mean(path: Path) -> None:
    with_text(path, mean_temperature=1.0)
    mean = Model.load(path).probabilities("rain")
    with_text(path, mean_temperature=REMOVED)
    np.testing.assert_array_equal(Model.load(path).probabilities("rain"), mean)


def test_a_file_without_feature_words_uses_as_many_words_in_both_parts(path: Path) -> None:
    """Earlier files have one number of words, which both parts were trained with."""
    text = "snow " + "hot " * 20 + "rain"
    with_text(path, setting={"text_words": 4, "feature_words": 4})
    as_trained = Model.load(path).probabilities(text)
    with_text(path, setting={"feature_words": 1024})
    assert (Model.load(path).probabilities(text) != as_trained).any()
    with_text(path, setting={"feature_words": REMOVED})
    np.testing.assert_array_equal(Model.load(path).probabilities(text), as_trained)


def test_a_header_that_asks_for_all_memory(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(Damaged):
        Model.load(path)


def test_the_command_answers_without_torch(path: Path) -> None:
    code = (
        "import sys; sys.argv[0] = 'slipstream'\n"
        "import atexit; atexit.register(lambda: print('torch' in sys.modules))\n"
        "from slipstream.apps.cli import main; main()"
    )
    command = [sys.executable, "-c", code, "predict", str(path)]
    run = subprocess.run(
        [*command, "--json", "--top", "2", "rain", "snow"], capture_output=True, text=True
    )
    first, second, torch_loaded = run.stdout.splitlines()
    assert torch_loaded == "False"
    expected = Model.load(path).classify(["rain", "snow"], 2)
    for line, text, answer in zip((first, second), ("rain", "snow"), expected, strict=True):
        found = json.loads(line)
        assert (found["text"], found["top_class"]) == (text, answer[0][0])
        assert [(c["class_name"], c["confidence"]) for c in found["classes"]] == answer
    piped = subprocess.run(command, capture_output=True, text=True, input="rain\n\nsnow\n")
    assert len(piped.stdout.splitlines()) == 3
    broken = subprocess.run([*command[:-1], "/dev/null", "x"], capture_output=True, text=True)
    assert broken.returncode == 2
    assert "Traceback" not in broken.stderr
