"""examples/staleness.py runs, on few images of the real data."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from slipstream.apps.bench.data import Split, TensorExamples, read_images

EXAMPLE = Path(__file__).parents[3] / "examples" / "staleness.py"


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("staleness_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def few_images(real_data: Callable[[str], Path]) -> Split[TensorExamples]:
    full = read_images(real_data("mnist"))

    def first(examples: TensorExamples, count: int) -> TensorExamples:
        return TensorExamples(examples.inputs[:count], examples.targets[:count])

    return Split(first(full.train, 200), first(full.test, 100), full.classes, full.origin)


def test_a_run_is_repeatable_and_staleness_changes_it(
    example: ModuleType, few_images: Split[TensorExamples]
) -> None:
    fresh, again, stale = (
        example.train(few_images, example.Recipe(staleness, seed=0, steps=20))
        for staleness in (0, 0, 3)
    )
    assert fresh == again
    assert fresh.last_loss != stale.last_loss
    assert 0 <= fresh.error <= 1


def test_figures_and_plot_are_written(
    example: ModuleType,
    few_images: Split[TensorExamples],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    image = pytest.importorskip("matplotlib.image", reason="needs slipstream[bench]")
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setattr(example, "read_images", lambda folder: few_images)
    arguments = f"--data anywhere --staleness 0 3 --seeds 2 --steps 5 --json {tmp_path}/r.json"
    monkeypatch.setattr(sys, "argv", ["staleness.py", *arguments.split()])
    sys.argv += ["--plot", str(tmp_path / "r.png")]
    example.main()
    report = json.loads((tmp_path / "r.json").read_text())
    assert [
        (outcome["recipe"]["seed"], outcome["recipe"]["staleness"])
        for outcome in report["outcomes"]
    ] == [(0, 0), (0, 3), (1, 0), (1, 3)]
    assert image.imread(tmp_path / "r.png").shape[2] == 4
    assert "staleness   3:" in capsys.readouterr().out
