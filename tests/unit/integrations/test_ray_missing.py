"""What happens where Ray is not installed."""

from __future__ import annotations

import subprocess
import sys

HIDDEN = "import sys; sys.modules['ray'] = None; import slipstream.integrations.ray"


def test_the_error_says_what_to_install() -> None:
    ended = subprocess.run([sys.executable, "-c", HIDDEN], capture_output=True, text=True)
    assert ended.returncode == 1
    last = ended.stderr.strip().splitlines()[-1]
    assert last.startswith("ModuleNotFoundError: slipstream.integrations.ray needs Ray")
    assert last.endswith("pip install 'slipstream[ray]'")
