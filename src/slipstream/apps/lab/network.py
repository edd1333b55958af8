"""``Lab``: many hosts with slow links on one machine."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, Self

from slipstream.apps.lab import crosstraffic
from slipstream.apps.lab import plan as planning
from slipstream.apps.lab.plan import Command, Plan, Site
from slipstream.apps.lab.removal import (
    NAME_PREFIX,
    existing,
    pids_in,
    remove,
    signal_all,
    start_watchdog,
)
from slipstream.apps.lab.shaping import Rate, Trouble
from slipstream.errors import LaunchError
from slipstream.units import bits_per_second

_COMMAND_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes a host has sent and received, from its link's kernel counters.

    A super-packet's headers count once, so a large transfer counts as its payload plus well under
    1%.
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
        """The command prefix that runs a command on this host."""
        return self._site.prefix

    @property
    def rack(self) -> int:
        return self._site.rack

    def pids(self) -> set[int]:
        """Return every program that runs on this host."""
        return pids_in([self.name])

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

        Its pid is the program's own. It ends at the latest with the lab.
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


class Network:
    """A lab that exists, and can be observed and changed while programs run in it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.hosts = tuple(Host(site) for site in plan.sites)

    @property
    def name(self) -> str:
        return self._plan.name

    @property
    def racks(self) -> int:
        return self._plan.racks

    @property
    def rates(self) -> tuple[float | None, ...]:
        """Every link's rate in bits per second, as set in the kernel; None if unshaped."""
        shaped = self._shaped()
        return tuple(shaped.get(site.port) for site in self._plan.sites)

    @property
    def core_rate(self) -> float | None:
        """The rate of a rack's cable to the core, in bits per second."""
        return self._shaped().get(self._plan.uplink(0)[0])

    def bytes(self) -> tuple[Traffic, ...]:
        """Return what every host has sent and received so far, from the kernel's counters."""
        return tuple(_traffic(port) for port in self._ports(site.port for site in self._plan.sites))

    def core_bytes(self) -> tuple[Traffic, ...]:
        """Return what every rack has sent to the core and received from it."""
        if self.racks == 1:
            return ()
        uplinks = (self._plan.uplink(rack)[1] for rack in range(self.racks))
        return tuple(_traffic(port) for port in self._ports(uplinks))

    def links_up(self) -> tuple[bool, ...]:
        ports = self._ports(site.port for site in self._plan.sites)
        return tuple("UP" in port["flags"] for port in ports)

    def set_rate(self, host: int, rate: Rate) -> None:
        """Change one host's link, both ways, while it is in use."""
        in_netem = any(queue["kind"] == "netem" for queue in self._queues())
        for command in planning.new_rate(self._plan, host, rate, in_netem=in_netem):
            _run(command)

    def set_core_rate(self, rate: Rate) -> None:
        """Change every rack's cable to the core."""
        if self.racks == 1:
            raise LaunchError(
                f"lab {self.name} has one switch and no core; make one with racks (--tiers)"
            )
        for rack in range(self.racks):
            for command in planning.shape_uplink(self._plan, rack, rate):
                _run(command)

    def set_link(self, host: int, *, up: bool) -> None:
        """Disconnect a host's link, or connect it again; its rate stays."""
        _run(planning.set_link(self._plan, host, up=up))

    def freeze(self, host: int) -> None:
        """Stop every program on a host, as if the machine hung; its link stays up."""
        # Repeat until nothing new appears: a process that was just forked is found the next time.
        seen: set[int] = set()
        while new := self.hosts[host].pids() - seen:
            signal_all([self.hosts[host].name], new, signal.SIGSTOP)
            seen |= new

    def thaw(self, host: int) -> None:
        """Let a frozen host continue."""
        signal_all([self.hosts[host].name], self.hosts[host].pids(), signal.SIGCONT)

    @contextlib.contextmanager
    def traffic(
        self, source: int, sink: int, rate: str | int | float, seconds: float = math.inf
    ) -> Iterator[subprocess.Popen[str]]:
        """Send competing UDP traffic between hosts at a constant rate, during the block."""
        bps, address = bits_per_second(rate), self.hosts[sink].address
        if source == sink:
            raise LaunchError("traffic from a host to itself crosses no link; name two hosts")
        program = [sys.executable, "-I", "-S", crosstraffic.__file__]
        receiver = self.hosts[sink].popen(
            [*program, "receive", address, str(crosstraffic.PORT)], stdout=subprocess.PIPE
        )
        try:
            assert receiver.stdout is not None
            if receiver.stdout.readline() != "ready\n":
                raise LaunchError(f"nothing can receive traffic on {self.hosts[sink].name}")
            arguments = [address, str(crosstraffic.PORT), str(bps), str(seconds)]
            sender = self.hosts[source].popen([*program, "send", *arguments])
            try:
                yield sender
            finally:
                _end(sender)
        finally:
            _end(receiver)

    def _ports(self, names: Iterable[str]) -> list[dict[str, Any]]:
        listed = json.loads(_run(planning.counters(self._plan)))
        by_name: dict[str, dict[str, Any]] = {link["ifname"]: link for link in listed}
        wanted = list(names)
        # Hosts of a lab are removed one by one, and its switch may be the last.
        if absent := [name for name in wanted if name not in by_name]:
            raise LaunchError(
                f"lab {self.name} has no port {', '.join(absent)} any more: it is being removed, "
                f"or half of it was; `slipstream lab down {self.name}` removes the rest"
            )
        return [by_name[name] for name in wanted]

    def _queues(self) -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = json.loads(_run(planning.queues(self._plan)))
        return listed

    def _shaped(self) -> dict[str, float]:
        buckets = (queue for queue in self._queues() if queue["kind"] == "tbf")
        return {queue["dev"]: queue["options"]["rate"] * 8.0 for queue in buckets}


class Lab(Network):
    """A lab of network namespaces on one switch, with every link shaped both ways.

        with Lab(hosts=4, rate="200mbit") as lab:
            server = lab.hosts[0].popen(["python", "serve.py"])
            client = lab.hosts[1].popen(["python", "fetch.py", lab.hosts[0].address])

    ``rate`` is one rate for all hosts or a sequence with one for each; None leaves a link unshaped.
    With ``racks``, hosts are on separate switches (the first rack has the first hosts), and a link
    of ``core_rate`` connects each to the core. The lab and every process in it are removed when the
    block ends, however it ends; ``keep()`` makes a lab that stays.

    ``congestion`` is the hosts' TCP congestion control. Every namespace may choose Reno, and with
    it results do not depend on the machine's default. BBR, for example, left a fifth of a 100
    Mbit/s link unused that carried data one way and another flow's acknowledgements the other way.
    None keeps the machine's default. ``delay_ms`` and ``loss_percent``, for each direction of each
    host's link, need a kernel with ``netem``.
    """

    def __init__(
        self,
        hosts: int = 4,
        rate: Rate | Sequence[Rate] = "200mbit",
        *,
        racks: int = 1,
        core_rate: Rate = None,
        delay_ms: float = 0.0,
        loss_percent: float = 0.0,
        congestion: str | None = "reno",
    ) -> None:
        name = NAME_PREFIX + secrets.token_hex(planning.TAG_NBYTES)
        super().__init__(planning.plan(name, hosts, racks))
        if core_rate is not None and racks == 1:
            raise LaunchError(f"a core of {core_rate} needs racks to join; give at least 2 racks")
        self._trouble = Trouble(delay_ms, loss_percent)
        rates = planning.rate_per_host(hosts, rate)
        # Invalid rates are refused here, before anything is created.
        self._commands = tuple(
            planning.build(self._plan, rates, core_rate, self._trouble, congestion=congestion)
        )
        self._watchdog: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._check()
        self._watchdog = start_watchdog(self.name)
        try:
            self._make()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def keep(self) -> Network:
        """Make a lab that outlives this process; ``remove`` it by name."""
        self._check()
        try:
            self._make()
        except BaseException:
            remove(self.name)
            raise
        return Network(self._plan)

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
            # If the removal was interrupted, the watchdog finishes it.
            watchdog.stdin.close()
        for host in self.hosts:
            host._reap()
        watchdog.wait(timeout=_COMMAND_LIMIT_S)

    def _check(self) -> None:
        if (reason := missing_tools()) is not None:
            raise LaunchError(reason)
        if self.name in existing():
            raise LaunchError(f"lab {self.name} is there already; make a new Lab")

    def _make(self) -> None:
        for command in self._commands:
            try:
                _run(command)
            except LaunchError as error:
                if "netem" in command:
                    raise LaunchError(
                        "this kernel has no netem, which delay and loss need; leave them out, or "
                        f"use a kernel with CONFIG_NET_SCH_NETEM ({error})"
                    ) from error
                raise


def find(name: str | None = None) -> Network:
    """Return an existing lab: the one of this name, or the only one."""
    if (reason := missing_tools()) is not None:
        raise LaunchError(reason)
    names = existing()
    if not names:
        raise LaunchError("there is no lab on this machine; `slipstream lab up` makes one")
    if name is None and len(names) > 1:
        raise LaunchError(f"there are several labs, {', '.join(names)}: name one (--lab NAME)")
    name = name or names[0]
    if name not in names:
        raise LaunchError(f"there is no lab {name!r}; there is {', '.join(names)}")
    return Network(_existing_plan(name))


def _existing_plan(name: str) -> Plan:
    """Return the plan of a lab, reconstructed from the kernel's state."""
    ports = {link["ifname"] for link in json.loads(_run(planning.counters(Plan(name, ()))))}
    hosts = sum(port.startswith(f"{name}-p") for port in ports)
    racks = sum(port.startswith(f"{name}-u") for port in ports)
    if not hosts:
        raise LaunchError(f"lab {name} is broken; `slipstream lab down {name}` removes it")
    return planning.plan(name, hosts, max(1, racks))


def _traffic(port: Mapping[str, Any]) -> Traffic:
    # The switch receives what a host sends.
    stats = port["stats64"]
    return Traffic(stats["rx"]["bytes"], stats["tx"]["bytes"])


def _end(process: subprocess.Popen[str]) -> None:
    process.terminate()
    process.wait(timeout=_COMMAND_LIMIT_S)
    if process.stdout is not None:
        process.stdout.close()


def missing_tools() -> str | None:
    """Return what this machine lacks for a lab, without trying; None if nothing."""
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
    """Return why no lab can be made here, after trying a small one; None if one can."""
    if (reason := missing_tools()) is not None:
        return reason
    try:
        with Lab(hosts=1, rate="100mbit"):
            return None
    except LaunchError as error:
        return str(error)


def _run(command: Command) -> str:
    # In its own session: Ctrl-C reaches this process, which then removes the lab.
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
        raise LaunchError(f"a lab's command failed: `{' '.join(command)}`: {reason}")
    return result.stdout
