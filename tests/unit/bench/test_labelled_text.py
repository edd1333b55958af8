from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from slipstream.apps.bench.data import LabelledText, Vocabulary, encode_text, read_labelled_text
from slipstream.apps.bench.data.vocabulary import FEWEST_WORDS, PADDING, UNKNOWN, words
from slipstream.errors import ConfigError


def test_one_file_a_class_split_at_newlines_alone(tmp_path: Path) -> None:
    (tmp_path / "rt.neg").write_bytes(b"bad\x85 film\nworse\r\n")
    (tmp_path / "rt.pos").write_bytes(b"good caf\xe9\n\n")
    (tmp_path / "README.md").write_text("not a class")
    text = read_labelled_text(tmp_path)
    assert text.train == (("bad\x85 film", "neg"), ("worse", "neg"), ("good café", "pos"))
    assert text.test == ()


def test_labels_before_the_text(tmp_path: Path) -> None:
    (tmp_path / "TREC_10.label").write_text("NUM:dist How far ?\n")
    (tmp_path / "train_5500.label").write_text("LOC:city Where ?\nLOC:other Whence ?\n")
    coarse, fine = read_labelled_text(tmp_path), read_labelled_text(tmp_path, fine=True)
    assert coarse.train == (("Where ?", "LOC"), ("Whence ?", "LOC"))
    assert coarse.test == (("How far ?", "NUM"),)
    assert [label for _, label in fine.train] == ["LOC:city", "LOC:other"]


def test_json_of_pairs(tmp_path: Path) -> None:
    (tmp_path / "domains.json").write_text(json.dumps({"travel": ["book"]}))
    content = {"train": [["fly me", "book"], ["stop", "end"]], "test": [["go", "book"]]}
    (tmp_path / "full.json").write_text(json.dumps(content))
    text = read_labelled_text(tmp_path)
    assert text.train == (("fly me", "book"), ("stop", "end"))
    assert text.test == (("go", "book"),)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.label", "LOC:city Where\nWhere\n", r"a\.label, line 2: 'Where' has no label; write"),
        ("a.json", '{"train": [],\n', r"a\.json, line 2: not JSON"),
        ("a.json", '{"train": [["x", "y"], ["x", 1]]}', r"entry 2 of 'train' is \['x', 1\]"),
        ("a.json", '{"train": 5}', "'train' is not a list"),
        ("a.txt", "alone\n", "1 classes are nothing to tell apart"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_labelled_text(tmp_path)


def test_no_folder_no_text(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="absent: no such folder; give a folder with"):
        read_labelled_text(tmp_path / "absent")
    with pytest.raises(ConfigError, match="fewer than two sentences or classes"):
        encode_text(LabelledText((("a", "x"), ("b", "x")), (), "here"))


def test_words_are_numbered_by_use() -> None:
    assert words("It's GOOD , isn't it?") == ["it's", "good", ",", "isn't", "it", "?"]
    vocabulary = Vocabulary.of(["b a b", "c b"])
    assert len(vocabulary) == 5
    rows = vocabulary.encode(["b c", "a z a a"], 3)
    assert rows.tolist() == [[2, 4, PADDING], [3, UNKNOWN, 3]]


def test_encoding_splits_where_nobody_has() -> None:
    train = tuple((f"word{i} {label}", label) for i in range(10) for label in ("yes", "no"))
    alone = encode_text(LabelledText(train, (), "here"))
    assert (len(alone.split.train), len(alone.split.test)) == (18, 2)
    given = encode_text(LabelledText(train, (("yes", "yes"), ("?", "unheard")), "here"))
    assert (len(given.split.train), len(given.split.test), given.words) == (20, 1, 14)
    assert given.split.train.inputs.shape == (20, FEWEST_WORDS)
    assert given.split.classes == 2
    again = encode_text(LabelledText(train, (), "here"))
    assert torch.equal(alone.split.train.inputs, again.split.train.inputs)


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [("mr", 9_596, 1_066, 2), ("trec", 5_452, 500, 6), ("clinc150", 15_000, 4_500, 150)],
)
def test_the_real_ones(
    real_data: Callable[[str], Path], name: str, train: int, test: int, classes: int
) -> None:
    encoded = encode_text(read_labelled_text(real_data(name)))
    split = encoded.split
    assert (len(split.train), len(split.test), split.classes) == (train, test, classes)
    assert int(split.train.inputs.max()) == encoded.words - 1


def test_fifty_fine_labels_in_the_real_one(real_data: Callable[[str], Path]) -> None:
    text = read_labelled_text(real_data("trec"), fine=True)
    assert len({label for _, label in text.train}) == 50
