"""A broadcast tree as a picture, with predicted times and the bytes that each host sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

import matplotlib.pyplot as plt

from slipstream.planning.overlays import Candidate, Choice, Network
from slipstream.planning.overlays.drawing import spots

INK, CORE, CHOSEN, OTHER = "#222222", "#c44e52", "#4878a8", "#c8d3de"
RACKS = mpl.color_sequences["Set2"]
MIB = 1024 * 1024
TREES_SHOWN = 5


def draw(file: Path, network: Network, choice: Choice, candidate: Candidate, server: int) -> None:
    """Write a PNG (or the format of the file's suffix)."""
    placed = spots(network, server, candidate.children[server])
    columns = max(spot.x for spot in placed) + 1
    levels = max(spot.depth for spot in placed) + 1
    width = min(max(9.0, 0.62 * columns), 40.0)
    tall = min(max(2.6, 0.85 * levels), 30.0)
    figure, axes = plt.subplot_mosaic(
        [["tree", "tree"], ["times", "egress"]],
        figsize=(width, tall + 3.4),
        height_ratios=[tall, 3.0],
        layout="constrained",
    )
    _tree(axes["tree"], network, candidate, server)
    _times(axes["times"], choice, candidate)
    _egress(axes["egress"], network, candidate)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def plain(name: str) -> str:
    """Return a name without dollar signs, between which matplotlib would read formulas."""
    return name.replace("$", r"\$")


def _tree(axis: Any, network: Network, candidate: Candidate, server: int) -> None:
    placed = spots(network, server, candidate.children[server])
    for spot in placed[1:]:
        above = placed[spot.above]
        crosses = network.hosts[above.host].rack != network.hosts[spot.host].rack
        local = above.host == spot.host
        axis.plot(
            [above.x, spot.x],
            [-above.depth, -spot.depth],
            color=CORE if crosses else INK,
            linewidth=2.2 if crosses else 1.0,
            linestyle=":" if local else "-",
            zorder=1,
        )
    for spot in placed:
        rack = network.hosts[spot.host].rack
        name = f"server {server}" if spot.depth == 0 else f"rank {spot.rank}"
        axis.text(
            spot.x,
            -spot.depth,
            f"{name}\n{plain(network.hosts[spot.host].name)}",
            ha="center",
            va="center",
            fontsize=7,
            color=INK,
            bbox={"boxstyle": "round", "facecolor": RACKS[rack % len(RACKS)], "edgecolor": INK},
        )
    _legend(axis, network)
    axis.set_xlim(-0.7, max(spot.x for spot in placed) + 0.7)
    axis.set_ylim(-max(spot.depth for spot in placed) - 0.5, 0.5)
    axis.axis("off")
    axis.set_title(f"{candidate.name}: how server {server}'s shard is sent", fontsize=9, color=INK)


def _legend(axis: Any, network: Network) -> None:
    for index, rack in enumerate(network.racks):
        axis.plot([], [], "s", color=RACKS[index % len(RACKS)], label=f"rack {plain(rack.name)}")
    axis.plot([], [], color=CORE, linewidth=2.2, label="across the core")
    axis.plot([], [], color=INK, linewidth=1.0, label="within a rack")
    axis.plot([], [], color=INK, linewidth=1.0, linestyle=":", label="within a host")
    axis.legend(fontsize=7, loc="upper left", frameon=False)


def _times(axis: Any, choice: Choice, candidate: Candidate) -> None:
    shown = choice.leading(TREES_SHOWN)
    names = []
    for one in shown:
        limits = one.limits
        pins = (
            "" if limits is None else f" T={limits.degree} H={limits.depth}, leaf {limits.alpha:g}"
        )
        names.append(f"{one.name}{pins}")
    seconds = [one.prediction.seconds for one in shown]
    colors = [CHOSEN if one is candidate else OTHER for one in shown]
    axis.barh(names, seconds, color=colors, height=0.7)
    for name, value in zip(names, seconds, strict=True):
        axis.text(value, name, f" {value:.3g} s", va="center", fontsize=7, color=INK)
    axis.invert_yaxis()
    axis.set_xlim(right=1.2 * max(seconds))
    axis.set_xlabel("predicted seconds a broadcast (dark: drawn above)", fontsize=8)
    axis.tick_params(labelsize=7)


def _egress(axis: Any, network: Network, candidate: Candidate) -> None:
    names = [plain(host.name) for host in network.hosts]
    sent = [nbytes / MIB for nbytes in candidate.prediction.egress_bytes]
    colors = [RACKS[host.rack % len(RACKS)] for host in network.hosts]
    axis.bar(names, sent, color=colors, edgecolor=INK, linewidth=0.5)
    axis.set_ylabel("MiB that a host sends, all trees", fontsize=8)
    axis.tick_params(labelsize=7)
    if len(names) > 16:
        axis.tick_params(axis="x", labelrotation=90)
