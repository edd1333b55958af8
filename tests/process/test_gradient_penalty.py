"""Gradients of gradients, as of a WGAN-GP: the same weights, however a layer's gradient is sent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fork_server import ForkServer
from launches import SLIPSTREAM, Launch

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("penalty_worker.py")
# What is measured on a busy machine may choose otherwise.
FACTORS = "poseidon(rate='200mbit')"
DENSE = "poseidon(dense=['body.*', 'hea?'])"


def test_factors_and_dense_gradients_train_alike(fork_server: ForkServer) -> None:
    systems = ("push_pull", "adam_factors", FACTORS, DENSE)
    runs = [fork_server.start(WORKER, system, ranks=2) for system in systems]
    told = {}
    for system, run in zip(systems, runs, strict=True):
        assert run.wait() == [0, 0], f"{system}: {run.told()}"
        told[system] = json.loads((run.folder / "told.0.json").read_text())
    assert any(scheme.startswith("factors") for scheme in told[FACTORS]["schemes"])
    assert not any(scheme.startswith("factors") for scheme in told[DENSE]["schemes"])
    for name, values in told["push_pull"]["weights"].items():
        for system in systems[1:]:
            got = torch.tensor(told[system]["weights"][name])
            assert torch.allclose(got, torch.tensor(values), atol=1e-5), f"{system}: {name}"


def test_learners_have_them_too(launch: Callable[..., Launch]) -> None:
    command = (SLIPSTREAM, "run", "--workers=1", "--strategy=gadei", str(WORKER), "gadei")
    job = launch(*command)
    assert job.wait() == 0, job.stderr
