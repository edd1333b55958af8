"""``slipstream plan-tree``: finds the trees over which servers should broadcast in a network."""

from __future__ import annotations

from dataclasses import asdict, astuple
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree as Branch

from slipstream.apps.cli.options import prepare_reports, write_report, writing
from slipstream.errors import ConfigError
from slipstream.input_files import read_limited
from slipstream.planning.layout import CHUNK_BYTES
from slipstream.planning.overlays import (
    Candidate,
    Choice,
    Network,
    choose_overlay,
    even_network,
    possible_limits,
    read_topology,
)
from slipstream.planning.overlays.drawing import Spot, spots
from slipstream.planning.overlays.topology_file import MOST_BYTES
from slipstream.units import bits_per_second, human_bytes

MIB = 1024 * 1024
TREES_SHOWN = 5
HOSTS_SHOWN = 24


TopologyFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The network as TOML; docs/trees.md describes it."),
]
Hosts = Annotated[
    int | None, typer.Option(min=1, help="Instead of a file: hosts with a worker each.")
]
Racks = Annotated[int | None, typer.Option(min=1, help="Racks that the hosts fill in order.")]
Rate = Annotated[str | None, typer.Option(help="Rate of every host's link; 1gbit by default.")]
CoreRate = Annotated[
    str | None,
    typer.Option(help="Rate of every rack's uplink; no limit by default."),
]
Servers = Annotated[
    int | None,
    typer.Option(min=0, help="Dedicated servers, on separate hosts; 0: colocated."),
]
ModelMib = Annotated[float, typer.Option(help="Size of the broadcast, in MiB.")]
BlockMib = Annotated[float, typer.Option(help="Size of a forwarded block, in MiB.")]
Degree = Annotated[int | None, typer.Option(min=1, help="Limit the tree: most children (T).")]
Depth = Annotated[int | None, typer.Option(min=1, help="Limit the tree: most hops (H).")]
Alpha = Annotated[float | None, typer.Option(min=0, help="Limit the tree: cost of a leaf.")]
DrawnServer = Annotated[int, typer.Option(min=0, help="The server whose tree is drawn.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", help="Write everything here, also all trees.")
]
PlotFile = Annotated[
    Path | None, typer.Option(metavar="FILE.png", help="Draw the tree and the times here.")
]


def plan_tree(
    topology: TopologyFile = None,
    hosts: Hosts = None,
    racks: Racks = None,
    rate: Rate = None,
    core_rate: CoreRate = None,
    servers: Servers = None,
    model_mib: ModelMib = 100.0,
    block_mib: BlockMib = CHUNK_BYTES / MIB,
    degree: Degree = None,
    depth: Depth = None,
    alpha: Alpha = None,
    server: DrawnServer = 0,
    json: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Predict how long a broadcast takes as a star, over trees and along a chain; draw the best."""
    prepare_reports(json, plot)
    options = {
        "--hosts": hosts,
        "--racks": racks,
        "--rate": rate,
        "--core-rate": core_rate,
        "--servers": servers,
    }
    network = read_network(topology, options)
    if server >= len(network.servers):
        raise ConfigError(
            f"--server {server}: this network has servers 0 to {len(network.servers) - 1}"
        )
    pins = {"degree": degree, "depth": depth, "alpha": alpha}
    choice, candidate = decide(network, pins, model_mib, block_mib)
    console = Console()
    console.print(_drawing(network, candidate, server))
    console.print(_times(choice, candidate))
    console.print(_egress(network, candidate))
    console.print(_in_words(choice, candidate, len(network.servers)), highlight=False)
    if json is not None:
        report = _report(network, choice, candidate, model_mib * MIB, block_mib * MIB)
        write_report(json, report, indent=None)
    if plot is not None:
        # Imported here, because matplotlib is slow to import, and may be missing.
        from slipstream.apps.cli.tree_plot import draw

        with writing("--plot", plot):
            draw(plot, network, choice, candidate, server)


def read_network(topology: Path | None, options: dict[str, Any]) -> Network:
    """Return the network of the file, or that of the options."""
    present = [option for option, value in options.items() if value is not None]
    if topology is not None:
        if present:
            raise ConfigError(
                f"{present[0]}: --topology {topology} has that already; leave out one of them"
            )
        return read_topology(_text(topology), str(topology))
    if options["--hosts"] is None:
        raise ConfigError(
            "which network? name it with --topology FILE, or with options such as "
            "--hosts 12 --racks 2 --rate 1gbit --core-rate 500mbit"
        )
    core_rate = options["--core-rate"]
    return even_network(
        hosts=options["--hosts"],
        racks=1 if options["--racks"] is None else options["--racks"],
        link_bits_s=_rate("--rate", options["--rate"] or "1gbit"),
        uplink_bits_s=None if core_rate is None else _rate("--core-rate", core_rate),
        servers=options["--servers"] or 0,
    )


def decide(
    network: Network, pins: dict[str, Any], model_mib: float, block_mib: float
) -> tuple[Choice, Candidate]:
    """Return the comparison, and the candidate to show: the best, or the best of the requested."""
    for option, size in (("--model-mib", model_mib), ("--block-mib", block_mib)):
        if not 0 < size < float("inf"):
            raise ConfigError(f"{option} {size}: give an amount above 0")
    pinned = any(value is not None for value in pins.values())
    limits = list(possible_limits(network.most_targets, **pins)) if pinned else None
    choice = choose_overlay(network, model_mib * MIB, block_mib * MIB, limits)
    return choice, choice.trees[0] if pinned else choice.best


def _rate(option: str, text: str) -> float:
    try:
        return bits_per_second(text)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def _text(topology: Path) -> str:
    try:
        return read_limited(topology, MOST_BYTES).decode()
    except FileNotFoundError:
        raise ConfigError(f"there is no topology file {topology}; docs/trees.md has one") from None
    except OSError as error:
        raise ConfigError(f"cannot read the topology file {topology}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{topology} is not text; a topology file is TOML") from None


# ---- output


def _drawing(network: Network, candidate: Candidate, server: int) -> Branch:
    """Return a drawing of which rank forwards to which; links that leave a rack are marked."""
    placed = spots(network, server, candidate.children[server])
    branches: list[Branch] = []
    for spot in placed:
        label = Text(_label(network, server, spot))
        if not branches:
            branches.append(Branch(label))
            continue
        above = placed[spot.above]
        if network.hosts[above.host].rack != network.hosts[spot.host].rack:
            label.append("  ← across the core", style="yellow")
        elif above.host == spot.host:
            label.append("  on the same host", style="dim")
        branches.append(branches[spot.above].add(label))
    return branches[0]


def _label(network: Network, server: int, spot: Spot) -> str:
    host = network.hosts[spot.host]
    who = f"server {server}" if spot.depth == 0 else f"rank {spot.rank}"
    return f"{who} on {host.name}, rack {network.racks[host.rack].name}"


def _times(choice: Choice, candidate: Candidate) -> Table:
    """Return a table of star, chain, and the fastest trees."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    numbers = ("degree", "depth", "alpha", "seconds", "of star")
    for heading in ("overlay", *numbers, "busiest link", ""):
        shown.add_column(heading, justify="right" if heading in numbers else "left", no_wrap=True)
    for one in choice.leading(TREES_SHOWN):
        limits = () if one.limits is None else astuple(one.limits)
        shown.add_row(
            one.name,
            *([f"{limit:g}" for limit in limits] or [""] * 3),
            f"{one.prediction.seconds:.4g}",
            f"{_against_star(one, choice):.2f}",
            Text(one.prediction.busiest.link),
            _mark(one, choice, candidate),
        )
    return shown


def _against_star(one: Candidate, choice: Choice) -> float:
    """Return a candidate's share of a star's time; within one host both times are 0."""
    star_s = choice.star.prediction.seconds
    return one.prediction.seconds / star_s if star_s else 1.0


def _mark(one: Candidate, choice: Choice, candidate: Candidate) -> str:
    if one is choice.best:
        return "chosen"
    return "pinned" if one is candidate else ""


def _egress(network: Network, candidate: Candidate) -> Table:
    """Return a table of what each host sends, and in how many trees it forwards."""
    shown = Table(box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for heading in ("host", "rack", "sends", "seconds", "relays in"):
        shown.add_column(heading, justify="left" if heading in ("host", "rack") else "right")
    relays = _relays(network, candidate)
    busiest = sorted(range(len(network.hosts)), key=lambda h: -candidate.prediction.egress_bytes[h])
    for index in sorted(busiest[:HOSTS_SHOWN]):
        host, nbytes = network.hosts[index], candidate.prediction.egress_bytes[index]
        shown.add_row(
            Text(host.name),
            Text(network.racks[host.rack].name),
            human_bytes(nbytes),
            f"{8 * nbytes / host.link_bits_s:.4g}",
            f"{relays[index]} of {len(candidate.children)}",
        )
    if len(busiest) > HOSTS_SHOWN:
        shown.caption = f"the {HOSTS_SHOWN} hosts of {len(busiest)} that send most"
    return shown


def _relays(network: Network, candidate: Candidate) -> list[int]:
    """Return, by host, in how many trees a rank of it sends to another host."""
    relays = [0] * len(network.hosts)
    for tree in candidate.children:
        for host, ranks in enumerate(network.ranks_by_host):
            sent_to = (network.workers[child] for rank in ranks for child in tree[rank + 1])
            relays[host] += any(other != host for other in sent_to)
    return relays


def _in_words(choice: Choice, candidate: Candidate, servers: int) -> str:
    gain = 1 / _against_star(candidate, choice)
    others = (
        f"; the other {servers - 1} have similar trees, with other positions" if servers > 1 else ""
    )
    if candidate is not choice.best:
        soonest = f"{choice.best.name} {choice.best.prediction.seconds:.4g} s"
        return f"pinned: {_name(candidate)}, {gain:.2f} x as fast as a star; soonest is {soonest}"
    if candidate is choice.star:
        return "chosen: star; nothing else is 5 % faster, so servers send to every worker"
    return f"chosen: {_name(candidate)}, {gain:.2f} x as fast as a star{others}"


def _name(one: Candidate) -> str:
    if one.limits is None:
        return one.name
    return (
        f"trees of degree {one.limits.degree}, depth {one.limits.depth}, alpha {one.limits.alpha:g}"
    )


def _report(
    network: Network, choice: Choice, candidate: Candidate, model_bytes: float, block_bytes: float
) -> dict[str, Any]:
    def figures(one: Candidate) -> dict[str, Any]:
        return {
            "overlay": one.name,
            "limits": None if one.limits is None else asdict(one.limits),
            "seconds": one.prediction.seconds,
            "fill_s": one.prediction.fill_s,
            "busiest": asdict(one.prediction.busiest),
        }

    egress = zip(network.hosts, candidate.prediction.egress_bytes, strict=True)
    return {
        "network": asdict(network),
        "model_bytes": model_bytes,
        "block_bytes": block_bytes,
        "candidates": [figures(one) for one in choice.candidates],
        "chosen": figures(choice.best),
        "drawn": figures(candidate),
        "children": candidate.children,
        "egress_bytes": {host.name: nbytes for host, nbytes in egress},
    }
