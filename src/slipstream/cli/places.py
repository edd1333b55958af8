"""Where the processes of a job run: on this machine, or on hosts of a lab."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from slipstream.errors import LaunchError
from slipstream.lab import Lab, Network, existing, find
from slipstream.runtime.launch.launch import Settings
from slipstream.runtime.launch.processes import Placement

LAB_PORT = 29400  # a lab's hosts are new: every port is free


@dataclass(frozen=True, slots=True)
class Places:
    """A placement for every worker and every dedicated server, and the settings for them."""

    workers: list[Placement]
    servers: list[Placement]
    settings: Settings


@contextmanager
def places(
    lab: str | None, workers: int | None, servers: int, settings: Settings
) -> Iterator[Places]:
    """On this machine; or one per host of a lab, which is made for the block if necessary."""
    if lab is None:
        here = Placement()
        yield Places([here] * (workers or 1), [here] * servers, settings)
    elif lab in existing():
        yield _on_hosts(find(lab), workers, servers, settings)
    else:
        hosts, rate = _recipe(lab)
        with Lab(hosts=hosts, rate=rate) as network:
            yield _on_hosts(network, workers, servers, settings)


def _recipe(text: str) -> tuple[int, str | None]:
    match = re.fullmatch(r"(\d+)x(\w[\w.]*)", text)
    if match is None:
        raise LaunchError(
            f"--lab {text}: write hosts x rate, such as 4x200mbit, or name a lab that is up "
            "(`slipstream lab status` lists them)"
        )
    return int(match[1]), None if match[2] == "none" else match[2]


def _on_hosts(lab: Network, workers: int | None, servers: int, settings: Settings) -> Places:
    """Workers on the first hosts, dedicated servers on the next."""
    if workers is None:
        workers = max(1, len(lab.hosts) - servers)
    if workers + servers > len(lab.hosts):
        raise LaunchError(
            f"{workers} workers and {servers} servers need a host each, and the lab has "
            f"{len(lab.hosts)}: take fewer, or a larger lab"
        )
    # Hosts have no names, and torch's store would print this for every connection.
    env = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    on = [Placement(host.prefix, host.address, env) for host in lab.hosts]
    told = replace(settings, address=lab.hosts[0].address, port=settings.port or LAB_PORT)
    return Places(on[:workers], on[workers : workers + servers], told)
