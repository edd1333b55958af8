"""Labelled text in three formats, recognized by the files in the folder.

data_full.json, or any .json   {"train": [["text", "label"], …], "test": […]}   (clinc150)
*.label                        LABEL:fine text …, one per line                   (trec)
anything else                  a file per class, a sentence per line             (mr)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slipstream.apps.bench.reading import lines_of, parse_json, read_text, refused
from slipstream.errors import ConfigError
from slipstream.printable import shown

Sentence = tuple[str, str]  # text, label
_WAY_OUT = "give a folder with one .json, with *.label files, or with one text file a class"


@dataclass(frozen=True, slots=True)
class LabelledText:
    """Sentences with their labels; an empty ``test`` means that they are not split yet."""

    train: tuple[Sentence, ...]
    test: tuple[Sentence, ...]
    origin: str


def read_labelled_text(folder: Path, *, fine: bool = False) -> LabelledText:
    """Read the text in a folder; ``fine`` uses the whole of a two-part label, LABEL:fine."""
    if not folder.is_dir():
        raise refused(folder, None, "no such folder", _WAY_OUT)
    files = sorted(path for path in folder.iterdir() if path.is_file() and not _is_about(path))
    by_json = [path for path in files if path.suffix == ".json" and _holds_sentences(path)]
    by_label = [path for path in files if path.suffix == ".label"]
    if by_json:
        return read_json_sentences(by_json[0])
    if by_label:
        return _trec(folder, by_label, fine=fine)
    return read_class_files({path.suffix.lstrip(".") or path.name: path for path in files})


def read_class_files(files: dict[str, Path]) -> LabelledText:
    """Read one file per class, one sentence per line."""
    if len(files) < 2:
        place = next(iter(files.values()), Path())
        raise refused(place, None, f"{len(files)} classes are nothing to tell apart", _WAY_OUT)
    sentences = [
        (line.strip(), label)
        for label, path in files.items()
        for line in lines_of(read_text(path, _WAY_OUT))
        if line.strip()
    ]
    return LabelledText(tuple(sentences), (), origin=str(next(iter(files.values())).parent))


def read_prefixed(path: Path, *, fine: bool = False) -> tuple[Sentence, ...]:
    """Read ``LABEL:fine text`` from each line."""
    sentences = []
    for number, line in enumerate(lines_of(read_text(path, _WAY_OUT)), start=1):
        if not line.strip():
            continue
        label, _, text = line.partition(" ")
        coarse, colon, rest = label.partition(":")
        if not (coarse and colon and rest and text.strip()):
            raise refused(path, number, f"{line[:40]!r} has no label", "write LABEL:fine text …")
        sentences.append((text.strip(), label if fine else coarse))
    return tuple(sentences)


def read_json_sentences(path: Path) -> LabelledText:
    """Read ``{"train": [[text, label], …], "test": …}``; a missing test is empty."""
    content = _parsed(path)
    if not isinstance(content, dict) or "train" not in content:
        raise refused(path, None, 'no "train" in it', 'write {"train": [["text", "label"], …]}')
    train, test = (_pairs(path, part, content.get(part, [])) for part in ("train", "test"))
    return LabelledText(train, test, origin=str(path))


def _trec(folder: Path, files: list[Path], *, fine: bool) -> LabelledText:
    """Return the file whose name mentions training, and the other one."""
    training = [path for path in files if "train" in path.name.lower()] or files[:1]
    testing = [path for path in files if path not in training]
    train, test = (
        tuple(sentence for path in part for sentence in read_prefixed(path, fine=fine))
        for part in (training, testing)
    )
    return LabelledText(train, test, origin=str(folder))


def _is_about(path: Path) -> bool:
    """Return whether a file describes the data, and is not data."""
    return path.name.startswith(".") or path.stem.lower() in ("readme", "license", "licence")


def _holds_sentences(path: Path) -> bool:
    content = _parsed(path)
    return isinstance(content, dict) and "train" in content


def _parsed(path: Path) -> Any:
    return parse_json(path, read_text(path, _WAY_OUT))


def _pairs(path: Path, part: str, entries: Any) -> tuple[Sentence, ...]:
    if not isinstance(entries, list):
        raise refused(path, None, f"{part!r} is not a list", 'write [["text", "label"], …]')
    for index, entry in enumerate(entries):
        if not (
            isinstance(entry, list) and len(entry) == 2 and all(isinstance(e, str) for e in entry)
        ):
            problem = f"entry {index + 1} of {part!r} is {shown(entry)}"
            raise refused(path, None, problem, 'write ["text", "label"]')
    return tuple((text, label) for text, label in entries)


def check_enough(text: LabelledText) -> None:
    if len(text.train) < 2 or len({label for _, label in text.train}) < 2:
        raise ConfigError(f"{text.origin}: fewer than two sentences or classes; {_WAY_OUT}")
