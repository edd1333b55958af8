"""``Lab``: many hosts with slow links on one machine."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

from slipstream.errors import LaunchError
from slipstream.lab import plan as planning
from slipstream.lab.plan import Command, Site
from slipstream.lab.removal import existing, remove, start_watchdog
from slipstream.lab.shaping import Rate

_COMMAND_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes a host has sent and received, as its link's kernel counters have them.

    A super-packet's headers count once, so a large transfer shows as its payload and well under 1%.
    """

    sent: int
    received: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(self.sent - earlier.sent, self.received - earlier.received)


class Host:
    """One machine of the lab: an address, a link, and a way to run programs on it."""

    def __init__(self, site: Site) -> None:
        self._site = site
        self._processes: list[subprocess.Popen[Any]] = []

    def __repr__(self) -> str:
        return f"<Host {self.name} {self.address}>"

    @property
    def name(self) -> str:
        return self._site.namespace

    @property
    def address(self) -> str:
        return self._site.address

    @property
    def interface(self) -> str:
        return self._site.interface

    @property
    def prefix(self) -> Command:
        """Put before a command, it makes the command run on this host."""
        return self._site.prefix

    def popen(
        self,
        command: Sequence[str | os.PathLike[str]],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        stdin: int | IO[Any] | None = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[str]:
        """Start a program on this host; ``env`` is added to this process's environment.

        Its pid is the program's own. It ends with the lab at the latest.
        """
        process = subprocess.Popen(
            [*self.prefix, *command],
            env={**os.environ, **(env or {})},
            cwd=cwd,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
        )
        self._processes.append(process)
        return process

    def _reap(self) -> None:
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=5.0)


class Lab:
    """Network namespaces on one switch, every link shaped both ways.

        with Lab(hosts=4, rate="200mbit") as lab:
            server = lab.hosts[0].popen(["python", "serve.py"])
            client = lab.hosts[1].popen(["python", "fetch.py", lab.hosts[0].address])

    ``rate`` is one for all hosts or a sequence with one for each; None leaves a link unshaped. The
    lab and every process in it are gone when the block ends, however it ends.

    ``congestion`` is the hosts' TCP congestion control. Reno is the one every namespace may choose,
    and with it results do not depend on the machine's default; BBR, for one, has left a fifth of a
    100 Mbit/s link unused that carried data one way and another flow's acknowledgements the other.
    None keeps the machine's default.
    """

    def __init__(
        self,
        hosts: int = 4,
        rate: Rate | Sequence[Rate] = "200mbit",
        *,
        congestion: str | None = "reno",
    ) -> None:
        self._rates = planning.rate_per_host(hosts, rate)
        self._plan = planning.plan(secrets.token_hex(planning.TAG_NBYTES), self._rates)
        # Bad rates are refused here, before anything is made.
        self._commands = tuple(planning.build(self._plan, congestion=congestion))
        self.hosts = tuple(Host(site) for site in self._plan.sites)
        self._watchdog: subprocess.Popen[bytes] | None = None

    @property
    def name(self) -> str:
        return self._plan.name

    @property
    def rates(self) -> tuple[Rate, ...]:
        return self._rates

    def __enter__(self) -> Self:
        if (reason := missing_tools()) is not None:
            raise LaunchError(reason)
        if self.name in existing():
            raise LaunchError(f"lab {self.name} is there already; make a new Lab")
        self._watchdog = start_watchdog(self.name)
        try:
            for command in self._commands:
                _run(command)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove the lab and everything that runs in it."""
        watchdog, self._watchdog = self._watchdog, None
        if watchdog is None:
            return
        assert watchdog.stdin is not None
        try:
            remove(self.name)
            watchdog.terminate()
        finally:
            # If the removal was cut short, the watchdog finishes it on its own.
            watchdog.stdin.close()
        for host in self.hosts:
            host._reap()
        watchdog.wait(timeout=_COMMAND_LIMIT_S)

    def bytes(self) -> tuple[Traffic, ...]:
        """What every host has sent and received so far, from the kernel's counters."""
        listed = json.loads(_run(planning.counters(self._plan)))
        links = {link["ifname"]: link["stats64"] for link in listed}
        at_port = [links[site.port] for site in self._plan.sites]
        # The switch receives what a host sends.
        return tuple(Traffic(stats["rx"]["bytes"], stats["tx"]["bytes"]) for stats in at_port)

    def set_rate(self, host: int, rate: Rate) -> None:
        """Change one host's link, both ways, while it is in use."""
        for command in planning.shape(self._plan, host, rate):
            _run(command)
        rates = list(self._rates)
        rates[host] = rate
        self._rates = tuple(rates)


def missing_tools() -> str | None:
    """What this machine lacks for a lab, as far as a look tells; None if nothing."""
    if not sys.platform.startswith("linux"):
        return f"the lab needs Linux network namespaces; this is {sys.platform}"
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if absent:
        return f"the lab needs {' and '.join(absent)}; install iproute2 (apt-get install iproute2)"
    if os.geteuid() != 0:
        return "the lab needs root to make network namespaces; run as root (sudo)"
    return None


@functools.cache
def why_unavailable() -> str | None:
    """Why no lab can be made here, or None if one can. Tries with a small one."""
    if (reason := missing_tools()) is not None:
        return reason
    try:
        with Lab(hosts=1, rate="100mbit"):
            return None
    except LaunchError as error:
        return str(error)


def _run(command: Command) -> str:
    # In a session of its own: Ctrl-C reaches this process, which then takes the lab down.
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_COMMAND_LIMIT_S,
        start_new_session=True,
        check=False,
    )
    if result.returncode:
        reason = result.stderr.strip() or f"exit code {result.returncode}"
        raise LaunchError(f"the lab cannot be made here: `{' '.join(command)}`: {reason}")
    return result.stdout
