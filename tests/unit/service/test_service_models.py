"""Models in memory: which files are read again, and which are not."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from service_models import write_random_model

from slipstream.apps.service import model_file
from slipstream.apps.service.answers import Model
from slipstream.apps.service.models import Models


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_random_model(tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_a_file_that_cannot_be_read_now_may_be_read_later(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    models = Models(1 << 20)
    monkeypatch.setattr(model_file, "open_regular", fail)
    assert models.damage(path) == "the model file cannot be read: Too many open files"
    monkeypatch.undo()
    assert models.damage(path) is None


def test_a_damaged_file_is_not_read_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"damaged")
    models = Models(1 << 20)
    found = models.damage(path)
    assert found is not None
    monkeypatch.delattr("slipstream.apps.service.answers.read_model")
    assert models.damage(path) == found


def test_a_model_that_is_deleted_while_it_is_loaded_is_not_kept(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, load = Models(1 << 30), Model.load

    def load_and_delete(file: Path) -> Model:
        model = load(file)
        file.unlink()
        return model

    monkeypatch.setattr(Model, "load", load_and_delete)
    models.get(path)
    assert not models._models


def test_models_whose_file_is_gone_are_dropped_with_the_next_one(path: Path) -> None:
    models = Models(1 << 30)
    models.get(path)
    other = path.with_name("other.safetensors")
    path.rename(other)
    models.get(other)
    assert [file[0] for file in models._models] == [other]
    assert [file[0] for file in models._checked] == [other]
