"""How long a broadcast takes as a star and as the overlay that is chosen (root needed).

    python benchmarks/broadcast.py --json broadcast.json

Hosts in two racks around a core that carries half a link's rate out of each rack, or all of it.
Workers push next to nothing, and the servers publish every byte of a model: a step is a broadcast.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from slipstream.apps.lab import Lab
from slipstream.codecs import Above, Dense, Filter
from slipstream.methods import Rounds
from slipstream.planning.overlays import Choice, choose_overlay, even_network
from slipstream.routes import Everywhere, Route
from slipstream.runtime.launch.launch import Settings, launch
from slipstream.runtime.launch.processes import Placement
from slipstream.schedules import AfterBackward
from slipstream.strategy import Strategy
from slipstream.topologies import Sharded, Topology, Tree
from slipstream.units import bits_per_second

PORT = 29600
BLOCK_BYTES = 512 * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=12)
    parser.add_argument("--racks", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=50)
    parser.add_argument("--rate", default="200mbit")
    parser.add_argument("--broadcasts", type=int, default=1, help="timed ones, after one more")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(json.loads(os.environ["BROADCAST"]))
        return
    found = []
    for core_share, servers in ((0.5, 1), (0.5, 0), (None, 1), (None, 0)):
        found.append(compared(args, core_share, servers))
        if args.json:
            args.json.write_text(json.dumps(found, indent=2) + "\n")


def compared(args: argparse.Namespace, core_share: float | None, servers: int) -> dict[str, Any]:
    """Star and the chosen overlay, on one lab."""
    bits_s = bits_per_second(args.rate)
    network = even_network(
        hosts=args.hosts,
        racks=args.racks,
        link_bits_s=bits_s,
        uplink_bits_s=None if core_share is None else core_share * bits_s,
        servers=servers,
    )
    nbytes = args.megabytes * 1e6
    choice = choose_overlay(network, nbytes, BLOCK_BYTES)
    core = None if core_share is None else core_share * bits_s
    a_rack = args.hosts // args.racks + servers  # a dedicated server stands in the first one
    told: dict[str, Any] = {"core": core_share, "dedicated": servers, "chosen": choice.best.name}
    with Lab(args.racks * a_rack, bits_s, racks=args.racks, core_rate=core) as lab:
        hosts = [
            h for i, h in enumerate(lab.hosts) if servers == 0 or i % a_rack < a_rack - servers
        ]
        spare = [host for host in lab.hosts if host not in hosts][:servers]
        overlays = {"star": choice.star, choice.best.name: choice.best}
        for name, candidate in overlays.items():
            topology: Topology = Sharded() if name == "star" else Tree(candidate.children)
            run = broadcast(args, lab, hosts, spare, topology)
            told[name] = run | {"predicted_s": candidate.prediction.seconds}
            print(core_share, servers, name, told[name], flush=True)
    told["ratio"] = told[choice.best.name]["seconds"] / told["star"]["seconds"]
    print(summary(told, choice), flush=True)
    return told


def summary(told: dict[str, Any], choice: Choice) -> str:
    core = "full core" if told["core"] is None else f"core {told['core']}"
    where = "a dedicated server" if told["dedicated"] else "shards beside workers"
    return f"{core}, {where}: {choice.best.name} {told['ratio']:.2f} x star"


def broadcast(
    args: argparse.Namespace, lab: Any, hosts: list[Any], spare: list[Any], topology: Topology
) -> dict[str, Any]:
    env = {"TORCH_CPP_LOG_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        asked = {
            "children": topology.children if isinstance(topology, Tree) else None,
            "values": round(args.megabytes * 1e6 / 4),
            "broadcasts": args.broadcasts,
            "told": str(Path(folder) / "told.json"),
        }
        env["BROADCAST"] = json.dumps(asked)
        before = lab.bytes()
        code = launch(
            [sys.executable, __file__],
            [Placement(host.prefix, host.address, env) for host in hosts],
            servers=[Placement(host.prefix, host.address, env) for host in spare],
            settings=Settings(address=hosts[0].address, port=PORT, encrypt=False),
        )
        moved = [after - was for was, after in zip(before, lab.bytes(), strict=True)]
        if code:
            raise SystemExit(f"a job ended with code {code}")
        seconds = json.loads(Path(asked["told"]).read_text())
    return {
        "seconds": statistics.median(seconds),
        "all": seconds,
        "sent_mb": [round(each.sent / 1e6, 1) for each in moved],
        "received_mb": [round(each.received / 1e6, 1) for each in moved],
    }


def work(asked: dict[str, Any]) -> None:
    """One worker: nothing to push, everything to receive."""
    import torch
    from torch import nn

    import slipstream

    topology = Sharded() if asked["children"] is None else Tree(asked["children"])
    strategy = Strategy(
        "broadcast",
        Rounds(
            Everywhere(Route(topology, up=Filter(Above(0.0)), down=Dense())),
            schedule=AfterBackward(),
            chunk_bytes=BLOCK_BYTES,
        ),
    )
    model = nn.ParameterList([nn.Parameter(torch.zeros(asked["values"]))])
    with slipstream.init(start_limit_s=300) as job:
        net, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), 0.1), strategy)
        times = []
        for _ in range(1 + asked["broadcasts"]):
            for parameter in net.parameters():
                parameter.grad = torch.zeros_like(parameter)
            job.broadcast(None)
            begun = time.perf_counter()
            optimizer.step()
            job.broadcast(None)  # the last one to have everything ends it
            times.append(time.perf_counter() - begun)
        if job.rank == 0:
            Path(asked["told"]).write_text(json.dumps(times[1:]))


if __name__ == "__main__":
    main()
