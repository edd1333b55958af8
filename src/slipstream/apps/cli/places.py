"""The places of a job's processes: this machine, or hosts of a lab."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from slipstream.apps.lab import Lab, Network, existing, find
from slipstream.errors import LaunchError
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
    """Yield places on this machine, or on a lab's hosts, which is made for the block if needed."""
    if lab is None:
        this_machine = Placement()
        yield Places([this_machine] * (workers or 1), [this_machine] * servers, settings)
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
    """Place workers on the first hosts, with equally many on each if there are more than hosts, and
    dedicated servers on the last hosts, one on each."""
    hosts = len(lab.hosts) - servers
    if hosts < 1:
        raise LaunchError(
            f"{servers} servers need a host each, and leave none of the lab's {len(lab.hosts)} for "
            "workers: take fewer, or a larger lab"
        )
    if workers is None:
        workers = hosts
    hosts = min(hosts, workers)
    if workers % hosts:
        raise LaunchError(
            f"{workers} workers on {hosts} hosts: take a multiple of {hosts}, so that all hosts "
            "have equally many"
        )
    if servers and hosts == 1 < workers:
        raise LaunchError(
            f"all {workers} workers on one host would not be reached by servers on others: take "
            "a larger lab, or leave out --servers"
        )
    # Hosts have no names, and torch's store would print this for every connection.
    env = {"TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")}
    on = [Placement(host.prefix, host.address, env) for host in lab.hosts]
    lab_settings = replace(settings, address=lab.hosts[0].address, port=settings.port or LAB_PORT)
    of_workers = [placement for placement in on[:hosts] for _ in range(workers // hosts)]
    return Places(of_workers, on[hosts : hosts + servers], lab_settings)
