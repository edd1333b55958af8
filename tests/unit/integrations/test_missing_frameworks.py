"""What happens where a framework is not installed."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def last_line(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 1
    return ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "name", ["accelerate", "lightning", "ray", "mlflow", "wandb", "opentelemetry"]
)
def test_the_error_says_what_to_install(name: str, tmp_path: Path) -> None:
    hidden = f"import sys; sys.modules[{name!r}] = None; import slipstream.integrations.{name}"
    last = last_line(hidden, tmp_path)
    assert f"slipstream.integrations.{name} needs " in last
    assert last.endswith(f"pip install 'slipstream[{name}]'")


@pytest.mark.parametrize(
    ("extra", "module"),
    [
        ("accelerate", "accelerate"),
        ("lightning", "lightning/environment"),
        ("ray", "ray/__init__"),
        ("jax", "jax"),
    ],
)
def test_the_extra_replaces_a_framework_that_is_too_old(extra: str, module: str) -> None:
    source = (ROOT / f"src/slipstream/integrations/{module}.py").read_text()
    oldest = re.search(r"^OLDEST = \((\d+), (\d+)\)$", source, re.MULTILINE)
    assert oldest is not None, "the module checks the version"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras[extra][0].endswith(f">={oldest[1]}.{oldest[2]}")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_a_folder_that_is_called_ray_is_not_ray(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    last = last_line("import slipstream.integrations.ray", tmp_path)
    assert last.endswith("pip install 'slipstream[ray]'")
