"""What workers of a test tell of the cases they were asked to train, one file a case and rank."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from forked_servers import start_servers_by_fork

Told = dict[str, Any]


def tell_of_each(train: Callable[[Told, Told], None], cases: str) -> None:
    """``train`` is given what is asked and where to tell."""
    torch.set_num_threads(1)
    start_servers_by_fork()
    for asked in json.loads(Path(cases).read_text()):
        told: Told = {}
        try:
            train(asked, told)
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"
            told["trace"] = traceback.format_exc()
        file = Path(cases).with_name(f"{asked['name']}.{os.environ['RANK']}.json")
        file.write_text(json.dumps(told))
