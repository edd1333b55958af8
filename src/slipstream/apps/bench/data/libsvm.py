"""The format of LIBSVM: ``label index:value index:value …``, indices from 1 and ascending."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import torch

from slipstream.apps.bench.data.examples import SparseExamples, Split, split_off
from slipstream.apps.bench.reading import lines_of, read_text, refused
from slipstream.errors import ConfigError
from slipstream.printable import shown

TEST_SHARE = 0.2
MOST_FEATURES = 1 << 26  # a model has a weight for each
MOST_VALUE = 1e30  # its square is still a float32's
_FORMAT = "write LABEL INDEX:VALUE INDEX:VALUE …"


def read_libsvm(path: Path, *, features: int | None = None) -> SparseExamples:
    """Read rows with targets 0 and 1; a label of −1 or 0 becomes 0.

    Give ``features`` if it is known; by default it is the file's largest index, which may be
    smaller.
    """
    if features is not None and features < 1:
        raise ConfigError(f"{path}: {features} features; say how many columns the data has")
    indices, values = array("q"), array("f")
    offsets, targets = array("q", [0]), array("f")
    for number, line in enumerate(lines_of(read_text(path, _FORMAT)), start=1):
        fields = line.split("#", 1)[0].split()
        if not fields:
            continue
        try:
            targets.append(_target(fields[0]))
            _add_entries(fields[1:], features, indices, values)
        except ConfigError as error:
            raise refused(path, number, str(error), _FORMAT) from error
        offsets.append(len(indices))
    if not targets:
        raise refused(path, None, "no rows in it", _FORMAT)
    return SparseExamples(
        torch.tensor(indices, dtype=torch.long),
        torch.tensor(values, dtype=torch.float32),
        torch.tensor(offsets, dtype=torch.long),
        torch.tensor(targets, dtype=torch.float32),
        features or 1 + max(indices, default=0),
    )


def read_sparse_rows(folder: Path, *, features: int | None = None) -> Split[SparseExamples]:
    """Read a folder's files: those for a test end in ``.t`` or mention one, the rest are to train.

    Without a test file a random fifth is for the test.
    """
    if not folder.is_dir():
        raise refused(folder, None, "no such folder", "give one with files in LIBSVM's format")
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    testing = [path for path in paths if path.suffix == ".t" or "test" in path.name.lower()]
    training = [path for path in paths if path not in testing]
    if len(training) != 1 or len(testing) > 1:
        names = ", ".join(path.name for path in paths) or "nothing"
        raise refused(
            folder, None, f"holds {names}", "leave one file to train on and at most one NAME.t"
        )
    train = read_libsvm(training[0], features=features)
    test = read_libsvm(testing[0], features=features) if testing else None
    if test is None:
        train_rows, test_rows = split_off(len(train), TEST_SHARE, seed=0)
        train, test = train.part(train_rows), train.part(test_rows)
    widest = max(train.features, test.features)
    train, test = (replace(part, features=widest) for part in (train, test))
    return Split(train, test, classes=1, origin=str(folder))


def _target(text: str) -> float:
    try:
        label = float(text)
    except ValueError:
        raise ConfigError(f"label {shown(text)} is not a number") from None
    if label not in (-1.0, 0.0, 1.0):
        raise ConfigError(f"label {shown(text)}: only two classes, -1 (or 0) and 1, are taken")
    return max(0.0, label)


def _add_entries(
    fields: list[str], features: int | None, indices: array[int], values: array[float]
) -> None:
    last = 0
    for field in fields:
        before, colon, after = field.partition(":")
        try:
            index, value = int(before), float(after)
        except ValueError:
            raise ConfigError(f"{shown(field)} is not INDEX:VALUE") from None
        if not colon or not abs(value) <= MOST_VALUE:
            problem = f"{shown(field)} is not INDEX:VALUE"
            raise ConfigError(f"{problem}, with a value up to {MOST_VALUE:g}")
        if index > MOST_FEATURES:
            raise ConfigError(f"index {shown(index)}: indices up to {MOST_FEATURES} are read")
        if features is not None and index > features:
            raise ConfigError(f"index {index} with {features} features: give {index} or more")
        if index <= last:
            raise ConfigError(f"index {index} after {last}: they count from 1 and ascend")
        indices.append(index - 1)
        values.append(value)
        last = index
