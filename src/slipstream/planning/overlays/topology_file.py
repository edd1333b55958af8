"""A topology file (TOML) as a network; docs/trees.md describes its content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.errors import ConfigError
from slipstream.planning.overlays.network import (
    Host,
    MeasuredCosts,
    Network,
    PositionCosts,
    Rack,
)
from slipstream.planning.overlays.toml_table import TomlTable
from slipstream.printable import printable, shown

MOST_BYTES = 1 << 20  # of a topology file


def read_topology(text: str, source: str) -> Network:
    """Read a topology file's text; ``source`` is the name of the file in messages."""
    file = TomlTable.parse(text, source)
    tables = file.tables("hosts")
    if not tables:
        raise file.refusal("hosts", "there is none; write [[hosts]] for every host")
    racks = _racks(file, tables)
    hosts = _hosts(file, tables, list(racks))
    workers = _places(file, tables, "workers")
    if not workers:
        raise file.refusal("hosts", "none has a worker; write workers = [0] in the first")
    # As in a job: a server colocated with the first worker of every host.
    servers = _places(file, tables, "servers") or tuple(dict.fromkeys(workers))
    costs = _costs(file)
    for table in (*tables, file):
        table.done()
    try:
        return Network(tuple(racks.values()), hosts, workers, servers, costs)
    except ConfigError as error:
        raise ConfigError(printable(f"{source}: {error}")) from error


def _racks(file: TomlTable, tables: Sequence[TomlTable]) -> dict[str, Rack]:
    """Return the racks by name, in the order in which hosts name them."""
    core_rate, described = file.rate("core_rate"), file.table("racks")
    racks = {}
    for name in dict.fromkeys(table.text("rack", "r0") for table in tables):
        own = described.table(name)
        uplink = own.rate("core_rate", core_rate)
        racks[name] = Rack(name, own.text("aggregation", name), uplink)
        own.done()
    for name in described.content:
        if name not in racks:
            raise described.refusal(name, 'no host is in this rack; write rack = "…" in its hosts')
    return racks


def _hosts(file: TomlTable, tables: Sequence[TomlTable], racks: list[str]) -> tuple[Host, ...]:
    for_all = file.rate("rate")
    hosts: dict[str, Host] = {}
    for index, table in enumerate(tables):
        name = table.text("name", f"h{index}")
        if name in hosts:
            raise table.refusal("name", f"another host is called {name!r}; give each its own")
        rate = table.rate("rate", for_all)
        if rate is None:
            raise table.refusal("rate", "is missing; give it here or, for all hosts, at the top")
        hosts[name] = Host(name, racks.index(table.text("rack", "r0")), rate)
    return tuple(hosts.values())


def _places(file: TomlTable, tables: Sequence[TomlTable], key: str) -> tuple[int, ...]:
    """Return the host of each worker or server, which hosts list by number."""
    places: dict[int, int] = {}
    for host, table in enumerate(tables):
        for number in table.list(key):
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise table.refusal(key, f"{shown(number)} is no number of one; count from 0")
            if number in places:
                where = f"hosts[{places[number]}]"
                raise table.refusal(key, f"{shown(number)} is in {where} already; list it once")
            places[number] = host
    for number in range(len(places)):
        if number not in places:
            highest = len(places) - 1
            raise file.refusal("hosts", f"{key}: {number} is on none; number them 0 to {highest}")
    return tuple(places[number] for number in range(len(places)))


def _costs(file: TomlTable) -> PositionCosts | MeasuredCosts:
    paper, table = PositionCosts(), file.table("costs")
    costs = PositionCosts(
        table.number("same_edge", paper.same_edge),
        table.number("same_aggregation", paper.same_aggregation),
        table.number("otherwise", paper.otherwise),
    )
    table.done()
    measured = file.list("bandwidths")
    if not measured:
        return costs
    if table.content:
        raise file.refusal("costs", "bandwidths say what links cost; leave out one of the two")
    return MeasuredCosts.of([_bandwidths(file, i, measured) for i in range(len(measured))])


def _bandwidths(file: TomlTable, i: int, rows: list[Any]) -> list[float]:
    """Return host i's bandwidth to every other host; that to itself is ignored."""
    row = rows[i]
    if not isinstance(row, list) or len(row) != len(rows):
        raise file.refusal(f"bandwidths[{i}]", f"give a list of {len(rows)}, one for each row")
    return [
        0.0 if i == j else file.as_rate(f"bandwidths[{i}][{j}]", value)
        for j, value in enumerate(row)
    ]
