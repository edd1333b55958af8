from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.apps.bench.data import SparseExamples, read_libsvm, read_sparse_rows
from slipstream.apps.bench.models import SparseLogistic
from slipstream.errors import ConfigError

ROWS = "+1 1:0.5 3:2\n\n-1 2:1e-1  # a remark\n0\n1 4:1\n"
FEATURES = 6


def dense(examples: SparseExamples) -> torch.Tensor:
    matrix = torch.zeros(len(examples), examples.features)
    for row in range(len(examples)):
        span = slice(int(examples.offsets[row]), int(examples.offsets[row + 1]))
        matrix[row, examples.indices[span]] = examples.values[span]
    return matrix


@pytest.fixture
def rows(tmp_path: Path) -> SparseExamples:
    path = tmp_path / "rows"
    path.write_text(ROWS)
    return read_libsvm(path, features=FEATURES)


def test_rows_are_read(rows: SparseExamples) -> None:
    expected = torch.zeros(4, FEATURES)
    expected[0, 0], expected[0, 2], expected[1, 1], expected[3, 3] = 0.5, 2, 0.1, 1
    assert torch.equal(dense(rows), expected)
    assert rows.targets.tolist() == [1, 0, 0, 1]


@given(chosen=st.lists(st.integers(0, 3), min_size=1, max_size=9))
def test_a_batch_gives_what_dense_rows_give(
    tmp_path_factory: pytest.TempPathFactory, chosen: list[int]
) -> None:
    path = tmp_path_factory.mktemp("libsvm") / "rows"
    path.write_text(ROWS)
    rows = read_libsvm(path, features=FEATURES)
    model = SparseLogistic(FEATURES)
    torch.nn.init.normal_(model.weights.weight)
    inputs, targets = rows.take(torch.tensor(chosen))
    expected = dense(rows)[chosen] @ model.weights.weight.squeeze(1) + model.bias
    torch.testing.assert_close(model(inputs), expected)
    assert torch.equal(targets, rows.targets[chosen])
    assert torch.equal(dense(rows.part(torch.tensor(chosen))), dense(rows)[chosen])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("yes 1:1", "label 'yes' is not a number"),
        ("3 1:1", "label '3': only two classes"),
        ("1 1=1", "'1=1' is not INDEX:VALUE"),
        ("1 1:nan", "'1:nan' is not INDEX:VALUE"),
        ("1 7:1", "index 7 with 6 features: give 7 or more"),
        ("1 0:1", "index 0 after 0: they count from 1"),
        ("1 2:1 2:1", "index 2 after 2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows"
    path.write_text(f"1 1:1\n{line}\n")
    with pytest.raises(ConfigError, match=f"rows, line 2: {said}.*LABEL INDEX:VALUE"):
        read_libsvm(path, features=FEATURES)


def test_features_are_the_widest_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1 5:1\n-1 2:1\n")
    (tmp_path / "a.t").write_text("1 3:1\n")
    split = read_sparse_rows(tmp_path)
    assert split.train.features == split.test.features == 5
    (tmp_path / "a.t").unlink()
    alone = read_sparse_rows(tmp_path)
    assert (len(alone.train), len(alone.test), alone.test.features) == (1, 1, 5)


def test_a_folder_has_to_be_clear(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds nothing; leave one file"):
        read_sparse_rows(tmp_path)
    with pytest.raises(ConfigError, match="no such folder"):
        read_sparse_rows(tmp_path / "absent")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="no rows in it"):
        read_sparse_rows(tmp_path)
    with pytest.raises(ConfigError, match="0 features; say how many"):
        read_libsvm(tmp_path / "empty", features=0)


def test_the_real_one(real_data: Callable[[str], Path]) -> None:
    split = read_sparse_rows(real_data("a9a"))
    assert (len(split.train), len(split.test), split.train.features) == (32_561, 16_281, 123)
    assert split.train.targets.mean() == pytest.approx(0.2408, abs=1e-4)
