"""Servers' reports of rounds and of gradients' ages, and their merge."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from slipstream.consistency.decisions import RoundRecord
from slipstream.printable import printable
from slipstream.runtime.exchange.aggregator import Aggregator


class ServerFigures(msgspec.Struct, frozen=True):
    """One server's report; if hosts are the workers, a host's lowest rank represents it."""

    staleness: dict[str, dict[int, int]]  # by tensor: number of gradients by age
    makers: list[tuple[int, list[int]]]  # by round: the workers whose gradients it contains
    made: dict[int, int] = {}  # by worker: rounds that contain its gradient
    dropped: dict[int, int] = {}
    late: list[tuple[int, int]] = []  # rounds and workers of the last gradients that were dropped
    first: list[tuple[int, int | None]] = []  # (from round, N)
    durations_s: dict[int, list[float]] = {}  # by worker: its last steps
    arrivals: dict[int, list[tuple[float, int]]] = {}  # of the k-th gradient: histogram
    refused: int = 0  # messages
    last_refusal: str = ""  # sender of the last one, and the reason


def figures_of(holder: Aggregator, record: RoundRecord | None) -> ServerFigures:
    staleness = {name: dict(ages) for name, ages in holder.staleness().items()}
    cluster = holder.plan.cluster

    def rank_at(worker: int) -> int:
        return cluster.ranks_at(worker)[0]

    makers = [(round_, list(map(rank_at, workers))) for round_, workers in holder.makers]
    if record is None:
        return ServerFigures(staleness, makers)
    arrivals = record.arrivals
    return ServerFigures(
        staleness,
        makers,
        {rank_at(worker): rounds for worker, rounds in record.made.items()},
        {rank_at(worker): rounds for worker, rounds in record.dropped.items()},
        [(round_, rank_at(worker)) for round_, worker in record.late],
        list(record.first),
        {rank_at(w): [round(s, 6) for s in steps] for w, steps in arrivals.durations.items()},
        {k: histogram.as_pairs() for k, histogram in sorted(arrivals.kth.items())},
    )


def merge_figures(accounts: Sequence[ServerFigures]) -> dict[str, Any]:
    """Merge all servers' figures into plain data; empty if there are none."""
    ages: dict[str, Counter[int]] = {}
    for account in accounts:
        for name, counts in account.staleness.items():
            ages.setdefault(name, Counter()).update(counts)
    merged: dict[str, Any] = {"staleness": {name: summarized(c) for name, c in ages.items() if c}}
    if refused := [account for account in accounts if account.refused]:
        merged["refused_by_servers"] = {
            "messages": sum(account.refused for account in refused),
            "last": [account.last_refusal for account in refused],
        }
    for account in accounts:
        if account.arrivals:
            merged["rounds"] = {
                "made": account.made,
                "dropped": account.dropped,
                "late": account.late,
                "first": account.first,
                "arrivals_s": account.arrivals,
                "durations_s": account.durations_s,
            }
    return merged


def merge_pairs(accounts: Sequence[Sequence[ServerFigures]]) -> dict[str, Any]:
    """Merge the figures of every pair and server; rounds are those of the first pair.

    With several pairs, the names of tensors begin with the number of their pair.
    """
    if not accounts:
        return {}
    if len(accounts) == 1:
        return merge_figures(accounts[0])
    merged: list[ServerFigures] = []
    for pair, servers in enumerate(accounts):
        known = max((len(before) for before in accounts[:pair]), default=0)
        for index, account in enumerate(servers):
            staleness = {f"pair {pair}: {name}": c for name, c in account.staleness.items()}
            about = msgspec.structs.replace(account, staleness=staleness)
            if index < known:  # all reports of a server have the same refusals
                about = msgspec.structs.replace(about, refused=0, last_refusal="")
            merged.append(about if pair == 0 else msgspec.structs.replace(about, arrivals={}))
    return merge_figures(merged)


def staleness_text(ages: Mapping[str, Mapping[str, float]]) -> str:
    """Return a table with one row per tensor."""
    head = ("tensor", "min", "mean", "median", "max", "std", "count")
    rows = [
        (
            printable(name),
            *(f"{age[key]:.4g}" for key in head[1:-1]),
            str(int(age["count"])),
        )
        for name, age in ages.items()
    ]
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    lines = [
        "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(pairs))
        for pairs in (list(zip(row, widths, strict=True)) for row in (head, *rows))
    ]
    return "\n".join(line.rstrip() for line in lines)


def summarized(ages: Mapping[int, int]) -> dict[str, float]:
    """Summarize ages as in the first table of the paper on backup workers."""
    values = sorted(ages.items())
    count = sum(number for _, number in values)
    mean = sum(age * number for age, number in values) / count
    spread = sum(number * (age - mean) ** 2 for age, number in values) / count
    return {
        "min": values[0][0],
        "mean": mean,
        "median": median(values, count),
        "max": values[-1][0],
        "std": spread**0.5,
        "count": count,
    }


def median(values: Iterable[tuple[int, int]], count: int) -> float:
    """Return the median of counted values in ascending order."""
    wanted = ((count - 1) // 2, count // 2)
    middle: list[int] = []
    counted = 0
    for value, number in values:
        middle += [value for place in wanted if counted <= place < counted + number]
        counted += number
    return statistics.fmean(middle)
