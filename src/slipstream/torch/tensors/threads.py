"""How many threads torch uses in a process that shares its host with other workers."""

from __future__ import annotations

import os

import torch


def limit_threads(count: int) -> None:
    """Use at most this many threads, here and in servers that this process starts."""
    os.environ["OMP_NUM_THREADS"] = str(count)
    if torch.get_num_threads() > count:
        torch.set_num_threads(count)
