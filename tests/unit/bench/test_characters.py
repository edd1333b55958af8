from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slipstream.apps.bench.data import CharacterText, Windows, read_characters
from slipstream.apps.bench.data.characters import MOST_HELD_OUT
from slipstream.errors import ConfigError


def numbered(count: int) -> CharacterText:
    """A text in which every character says where it stands."""
    return CharacterText(torch.arange(count, dtype=torch.int32), "ab", origin="a test")


def test_rows_begin_anywhere_and_targets_are_one_further_on() -> None:
    windows = Windows(torch.arange(10), context=4)
    assert len(windows) == 6
    inputs, targets = windows.take(torch.tensor([0, 5]))
    assert inputs.tolist() == [[0, 1, 2, 3], [5, 6, 7, 8]]
    assert torch.equal(targets, inputs + 1)


@pytest.mark.parametrize("context", [1, 7, 64])
def test_what_is_held_out_is_never_trained_on(context: int) -> None:
    split = numbered(3000).split(context)
    trained = torch.cat(
        [part.flatten() for part in split.train.take(torch.arange(len(split.train)))]
    )
    inputs, targets = split.test.take(torch.arange(len(split.test)))
    assert trained.max() < inputs.min()
    assert trained.unique().numel() == 2700
    # Each held-out character is predicted once, but for what fills no row.
    assert targets.unique().numel() == targets.numel() > 300 - 1 - context


def test_the_held_out_part_is_bounded_and_does_not_depend_on_the_context() -> None:
    text = numbered(20 * MOST_HELD_OUT)
    starts = set()
    for context in (32, 128):
        test = text.split(context).test
        inputs, _ = test.take(torch.arange(len(test)))
        assert inputs.numel() == MOST_HELD_OUT
        starts.add(int(inputs[0, 0]))
    assert starts == {18 * MOST_HELD_OUT}


def test_a_text_too_short_for_its_context_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="50 characters are too few for a context of 8; take a lon"
    ):
        numbered(50).split(8)


def test_characters_are_numbered_in_their_order(tmp_path: Path) -> None:
    (tmp_path / "input.txt").write_text("cab, ü\n", encoding="utf-8")
    (tmp_path / "README.md").write_text("about it")
    text = read_characters(tmp_path)
    assert text.alphabet == "\n ,abcü"
    assert "".join(text.alphabet[number] for number in text.characters) == "cab, ü\n"
    assert text.entropy is None
    assert torch.equal(read_characters(tmp_path / "input.txt").characters, text.characters)


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "0 text files instead of one"),
        ({"a.txt": "ab", "b.txt": "ab"}, "2 text files instead of one"),
        ({"a.txt": "aaaa"}, "fewer than two different characters"),
        ({"a.txt": ""}, "fewer than two different characters"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=said):
        read_characters(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        read_characters(tmp_path / "nowhere")
