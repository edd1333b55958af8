"""What happens where a framework is not installed."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def last_line(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    assert ended.returncode == 1
    return ended.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("name", ["ray", "mlflow", "wandb", "opentelemetry"])
def test_the_error_says_what_to_install(name: str, tmp_path: Path) -> None:
    hidden = f"import sys; sys.modules[{name!r}] = None; import slipstream.integrations.{name}"
    last = last_line(hidden, tmp_path)
    assert f"slipstream.integrations.{name} needs " in last
    assert last.endswith(f"pip install 'slipstream[{name}]'")


@pytest.mark.skipif(find_spec("ray") is not None, reason="Ray is installed")
def test_a_folder_that_is_called_ray_is_not_ray(tmp_path: Path) -> None:
    (tmp_path / "ray").mkdir()
    last = last_line("import slipstream.integrations.ray", tmp_path)
    assert last.endswith("pip install 'slipstream[ray]'")
