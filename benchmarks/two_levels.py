"""Two levels against one, on lab hosts that several workers share (root needed).

    python benchmarks/two_levels.py --json two_levels.json

Each host's link is counted by the kernel, and each step is timed on rank 0. The model is one dense
layer after the other, so small a batch that the link is what takes time.

- alone: one worker on each host
- flat: several workers on each host, each exchanging by itself
- two levels: the same workers, whose hosts aggregate first
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WARM, STEPS = 2, 6
SYSTEMS = {  # with two levels, and with one
    "push_pull": ("push_pull", "push_pull(hierarchical=False)"),
    "push_pull_server": (
        "push_pull(update='server')",
        "push_pull(update='server', hierarchical=False)",
    ),
    "allreduce": ("allreduce", "allreduce(hierarchical=False)"),
    "allreduce_int8": ("allreduce(wire='int8')", "allreduce(wire='int8', hierarchical=False)"),
    "backup_workers": ("backup_workers(backup=0, hierarchical=True)", "backup_workers(backup=0)"),
    "local_sgd": ("local_sgd(every=1, hierarchical=True)", "local_sgd(every=1)"),
}


def moved() -> int:
    """Bytes of this host's link, both ways, as the kernel counts them."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    fields = [line.partition(":")[2].split() for line in lines if not line.strip().startswith("lo")]
    return sum(int(each[0]) + int(each[8]) for each in fields)


def worker(folder: Path, width: int) -> None:
    """What each worker runs."""
    import torch
    from torch import nn

    import slipstream

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with slipstream.init() as job:
        model, optimizer = job.distribute(model, optimizer)
        for step in range(WARM + STEPS):
            if step == WARM:
                job.broadcast(None)  # a barrier
                begun, before = time.monotonic(), moved()
            optimizer.zero_grad()
            model(torch.randn(4, width)).square().mean().backward()
            optimizer.step()
        job.broadcast(None)
        took, counted = time.monotonic() - begun, moved() - before
        file = folder / f"{job.rank}.json"
        file.write_text(json.dumps({"step_s": took / STEPS, "step_bytes": counted / STEPS}))


def measure(
    strategy: str, workers: int, *, hosts: int, rate: str, width: int, encrypt: bool
) -> dict[str, Any]:
    """One run: seconds a step, and bytes of the busiest host's link."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(str(Path(sys.executable).with_name("slipstream")), "run"),
            *(f"--lab={hosts}x{rate}", f"--workers={workers}", f"--strategy={strategy}"),
            *("--encrypt" if encrypt else "--no-encrypt", __file__),
            *("--worker", folder, "--width", str(width)),
        ]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        told = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    return {
        "strategy": strategy,
        "workers": workers,
        "step_s": statistics.median(one["step_s"] for one in told),
        "link_bytes_a_step": max(one["step_bytes"] for one in told),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--systems", nargs="*", default=["push_pull"], choices=list(SYSTEMS))
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--each", type=int, default=4, help="workers on a host")
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--encrypt", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.worker is not None:
        worker(args.worker, args.width)
        return
    from slipstream.apps.bench.comparison import machine_facts

    report: dict[str, Any] = {"machine": machine_facts(), "rate": args.rate, "hosts": args.hosts}
    for system in args.systems:
        two, flat = SYSTEMS[system]
        same = {key: getattr(args, key) for key in ("hosts", "rate", "width", "encrypt")}
        alone = measure(two, args.hosts, **same)
        first = measure(two, args.hosts * args.each, **same)
        apart = measure(flat, args.hosts * args.each, **same)
        report[system] = {
            "runs": [alone, first, apart],
            "bytes_against_one_worker_a_host": first["link_bytes_a_step"]
            / alone["link_bytes_a_step"],
            "faster_than_flat": apart["step_s"] / first["step_s"],
        }
        print(json.dumps(report[system], indent=2))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
