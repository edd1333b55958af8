"""Checkpoints that earlier code wrote load, and training goes on from them to the same weights.

``python tests/process/test_kept_checkpoints.py`` wrote ``tests/checkpoints/kept``: with two workers
and one server, half of the run; ``digests.json`` has the weights then, and after the other half.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fork_server import ForkServer

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
WORKER = HERE / "kept_checkpoint_worker.py"
KEPT = HERE.parent / "checkpoints" / "kept"
DIGESTS = KEPT / "digests.json"
STRATEGIES = {
    "push_pull": "push_pull",
    "allreduce": "allreduce",
    "poseidon": "poseidon(rate='10mbit')",
    "servers_update": "push_pull(update='server')",
    "backup_workers": "backup_workers(first=2, averaged=0.9)",
    "bounded_staleness": "bounded_staleness(s=1)",
    "one_bit": "one_bit(chunk_bytes=4096)",
    "parameter_flow": "parameter_flow(delta=0.001)",
    "updates_ahead": "parameter_flow(delta=0.001, staleness=1)",
    "ako": "ako(partitions=1, staleness=0)",
    "diloco": "diloco(every=3)",
    "diloco_first": "diloco(every=3, first=2)",
}
# Of these, the weights after some steps depend on who was quicker; or sums are made by others; or
# the outer optimizer that wrote them rounded some products and sums once.
INEXACT = {"ako", "bounded_staleness", "updates_ahead", "allreduce", "diloco", "diloco_first"}


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_was_kept_loads(fork_server: ForkServer, tmp_path: Path, name: str) -> None:
    told = tmp_path / "told.json"
    settings = {"SLIPSTREAM_STRATEGY": STRATEGIES[name], "SLIPSTREAM_SERVERS": "1"}
    if STRATEGIES[name].startswith(("allreduce", "poseidon", "ako")):
        del settings["SLIPSTREAM_SERVERS"]
    checkpoint = str(KEPT / f"{name}.safetensors")
    run = fork_server.run(WORKER, checkpoint, "read", str(told), ranks=2, env=settings)
    assert set(run.codes.values()) == {0}, run.told()
    found, known = json.loads(told.read_text()), json.loads(DIGESTS.read_text())[name]
    if name in INEXACT:
        found, known = ({k: v for k, v in d.items() if k != "after"} for d in (found, known))
    assert found == known


def write() -> None:
    KEPT.mkdir(parents=True, exist_ok=True)
    digests = {}
    for name, strategy in STRATEGIES.items():
        file = KEPT / f"{name}.safetensors"
        with tempfile.TemporaryDirectory() as folder:
            told = Path(folder) / "told.json"
            for doing in ("write", "read"):
                command = [Path(sys.executable).parent / "slipstream", "run", "--workers", "2"]
                if not strategy.startswith(("allreduce", "poseidon", "ako")):
                    command += ["--servers", "1"]
                command += ["--strategy", strategy, WORKER, file, doing, told]
                subprocess.run(command, check=True)
            digests[name] = json.loads(told.read_text())
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    write()
