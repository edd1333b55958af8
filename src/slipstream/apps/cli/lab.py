"""``slipstream lab``: hosts with slow links on this machine, until they are removed."""

from __future__ import annotations

import math
import subprocess
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from slipstream.apps.lab import Lab, Network, existing, find, remove, remove_all
from slipstream.apps.lab.network import missing_tools
from slipstream.apps.lab.shaping import Rate
from slipstream.errors import LaunchError
from slipstream.units import human_bytes

app = typer.Typer(
    name="lab",
    help="Make hosts with slow links on this machine (needs root and iproute2).",
    no_args_is_help=True,
)

TABLE_WIDTH = 112

HostNumber = Annotated[str, typer.Argument(metavar="HOST", help="A host's number, or its name.")]
LabName = Annotated[
    str | None, typer.Option("--lab", help="Which lab; not needed where there is only one.")
]
RateText = Annotated[str, typer.Argument(metavar="RATE", help="Such as 50mbit, or none.")]


@app.command()
def up(
    hosts: Annotated[int | None, typer.Option(min=1, help="How many hosts; 4 by default.")] = None,
    rate: Annotated[
        str, typer.Option(help="Rate of every host's link; or one for each host, joined by commas.")
    ] = "200mbit",
    tiers: Annotated[
        str | None,
        typer.Option(help="Racks x hosts in each, such as 2x4; a core joins the racks."),
    ] = None,
    core_rate: Annotated[
        str | None, typer.Option(help="Rate of each rack's link to the core; unshaped by default.")
    ] = None,
    delay_ms: Annotated[float, typer.Option(min=0, help="Delay of each link, each way.")] = 0.0,
    loss_percent: Annotated[float, typer.Option(min=0, help="Loss of each link, each way.")] = 0.0,
) -> None:
    """Make a lab that stays until `slipstream lab down`."""
    racks, count = _size(hosts, tiers)
    rates = [_rate(part) for part in rate.split(",")]
    lab = Lab(
        hosts=count,
        rate=rates[0] if len(rates) == 1 else rates,
        racks=racks,
        core_rate=None if core_rate is None else _rate(core_rate),
        delay_ms=delay_ms,
        loss_percent=loss_percent,
    ).keep()
    _print(lab)


@app.command()
def status(name: LabName = None) -> None:
    """Show every host: address, rate, link, programs, bytes. All labs, unless one is named."""
    names = existing() if name is None else [name]
    if not names:
        print("no lab on this machine; `slipstream lab up` makes one")
    for each in names:
        try:
            _print(find(each))
        except LaunchError as error:
            if name is not None:
                raise
            print(error)  # incomplete, or just removed: show the other labs


@app.command()
def topology(
    name: LabName = None,
    servers: Annotated[
        int, typer.Option(min=0, help="Dedicated servers, on the last hosts; 0: colocated.")
    ] = 0,
) -> None:
    """Print the lab as a topology file, for `slipstream plan-tree` and parameter_flow(tree=…)."""
    print(topology_file(find(name), servers), end="")


@app.command(name="exec", context_settings={"allow_interspersed_args": False})
def execute(
    host: HostNumber,
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="After --.")],
    name: LabName = None,
) -> None:
    """Run a command on a host, in this terminal."""
    if command[0] == "--":
        command = command[1:]
    if not command:
        raise LaunchError(f"give the command to run on host {host}, such as `-- ip address`")
    lab = find(name)
    prefix = lab.hosts[_host(lab, host)].prefix
    code = subprocess.run([*prefix, *command], check=False).returncode
    raise typer.Exit(code if code >= 0 else 128 - code)


@app.command()
def down(
    name: Annotated[str | None, typer.Argument(metavar="LAB", help="Which lab.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every lab, also of running and of crashed programs.")
    ] = False,
) -> None:
    """Remove a lab and end what runs in it."""
    if existing() and (reason := missing_tools()) is not None:
        raise LaunchError(reason)
    if everything:
        removed = remove_all()
    else:
        names = existing()
        if name is None and len(names) > 1:
            raise LaunchError(f"there are several labs, {', '.join(names)}: name one, or --all")
        if name is not None and name not in names:
            raise LaunchError(f"there is no lab {name!r}; `slipstream lab status` lists them")
        removed = [name] if name else names
        for each in removed:
            remove(each)
    print(f"removed {', '.join(removed)}" if removed else "there was no lab to remove")


@app.command()
def rate(host: HostNumber, new: RateText, name: LabName = None) -> None:
    """Change the rate of a host's link while it is in use; HOST may be `core`."""
    lab = find(name)
    if host == "core":
        lab.set_core_rate(_rate(new))
    else:
        lab.set_rate(_host(lab, host), _rate(new))


@app.command()
def link(
    host: HostNumber,
    state: Annotated[str, typer.Argument(metavar="up|down")],
    name: LabName = None,
) -> None:
    """Disconnect a host's link (down), or connect it again (up)."""
    if state not in ("up", "down"):
        raise LaunchError(f"a link is up or down, not {state!r}")
    lab = find(name)
    lab.set_link(_host(lab, host), up=state == "up")


@app.command()
def freeze(host: HostNumber, name: LabName = None) -> None:
    """Stop every program on a host, as if the machine hung."""
    lab = find(name)
    lab.freeze(_host(lab, host))


@app.command()
def thaw(host: HostNumber, name: LabName = None) -> None:
    """Let a frozen host continue."""
    lab = find(name)
    lab.thaw(_host(lab, host))


@app.command()
def traffic(
    source: HostNumber,
    sink: HostNumber,
    offered: RateText,
    seconds: Annotated[float, typer.Option(min=0, help="For how long; for ever if 0.")] = 0.0,
    name: LabName = None,
) -> None:
    """Send competing UDP traffic between two hosts at a constant rate, until Ctrl-C."""
    lab = find(name)
    for_s = seconds or math.inf
    with lab.traffic(_host(lab, source), _host(lab, sink), offered, for_s) as sender:
        code = sender.wait()
    raise typer.Exit(code)


def topology_file(lab: Network, servers: int) -> str:
    """Return a topology file: workers on the first hosts, dedicated servers on the last ones."""
    workers = len(lab.hosts) - servers
    if workers < 1:
        raise LaunchError(f"{servers} servers leave no worker: the lab has {len(lab.hosts)} hosts")
    if None in lab.rates:
        raise LaunchError("a link without a rate has no place in a prediction; set one for it")
    core = "" if lab.core_rate is None else f"core_rate = {lab.core_rate:.0f}\n"
    tables = []
    for index, (host, rate) in enumerate(zip(lab.hosts, lab.rates, strict=True)):
        role = f"workers = [{index}]" if index < workers else f"servers = [{index - workers}]"
        tables.append(f'[[hosts]]\nrack = "r{host.rack}"\nrate = {rate:.0f}\n{role}\n')
    return core + "\n".join(tables)


def _size(hosts: int | None, tiers: str | None) -> tuple[int, int]:
    """Return the number of racks, and of hosts in all of them."""
    if tiers is None:
        return 1, 4 if hosts is None else hosts
    racks, _, each = tiers.partition("x")
    if not (racks.isdecimal() and each.isdecimal()):
        raise LaunchError(f"--tiers {tiers}: write racks x hosts in each, such as 2x4")
    if hosts is not None and hosts != int(racks) * int(each):
        raise LaunchError(f"--tiers {tiers} has its own number of hosts; leave --hosts out")
    return int(racks), int(racks) * int(each)


def _rate(text: str) -> Rate:
    return None if text.strip().lower() == "none" else text


def _host(lab: Network, text: str) -> int:
    numbers = {str(index): index for index in range(len(lab.hosts))}
    names = {host.name: index for index, host in enumerate(lab.hosts)}
    found = (numbers | names).get(text)
    if found is None:
        raise LaunchError(f"no host {text!r}; lab {lab.name} has 0 to {len(lab.hosts) - 1}")
    return found


def _print(lab: Network) -> None:
    """Print a table of the lab; on a narrow terminal lines wrap, to show whole addresses."""
    console = Console(soft_wrap=True)
    console.width = max(console.width, TABLE_WIDTH)
    console.print(_table(lab))


def _table(lab: Network) -> Table:
    title = f"lab {lab.name}"
    if lab.racks > 1:
        title += f": {lab.racks} racks, core {_bits(lab.core_rate)}"
    table = Table(title=title, title_justify="left")
    headings = ("host", "name", "address", "rack", "rate", "link", "programs", "sent", "received")
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    rows = zip(lab.hosts, lab.rates, lab.links_up(), lab.bytes(), strict=True)
    for index, (host, bps, is_up, traffic) in enumerate(rows):
        table.add_row(
            *(str(index), host.name, host.address, str(host.rack), _bits(bps)),
            *("up" if is_up else "down", str(len(host.pids()))),
            *(human_bytes(traffic.sent), human_bytes(traffic.received)),
        )
    return table


def _bits(bps: float | None) -> str:
    if bps is None:
        return "none"
    return f"{bps / 1e9:g}gbit" if bps >= 1e9 else f"{bps / 1e6:g}mbit"
