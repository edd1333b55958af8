"""``slipstream probe``: measures the available bandwidth of a path to another host."""

from __future__ import annotations

import os
import re
import threading
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from slipstream.apps.cli.options import prepare_file, write_report
from slipstream.apps.probing.probing import LOOPBACK, PORT, Counts, Listener, measure
from slipstream.errors import ConfigError, LaunchError
from slipstream.planning.bandwidth import Available
from slipstream.printable import printable_lines, shown
from slipstream.runtime.process.environment import read_secret
from slipstream.units import bits_per_second, human_bytes

MOST_AMOUNT = 1e15
_AMOUNTS = {"kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def probe(
    host: Annotated[
        str | None,
        typer.Argument(
            metavar="HOST[:PORT]",
            help=f"The listener's address; with --listen, its own. Port {PORT} by default.",
        ),
    ] = None,
    listen: Annotated[
        bool,
        typer.Option("--listen", help="Answer probers, until Ctrl-C; loopback by default."),
    ] = False,
    threshold: Annotated[
        str | None,
        typer.Option(metavar="RATE", help="Report whether this is available, such as 50mbit."),
    ] = None,
    fastest: Annotated[
        str, typer.Option(metavar="RATE", help="Try no rates above this one.")
    ] = "1gbit",
    at_most: Annotated[
        str, typer.Option(metavar="AMOUNT", help="Send no more than this, such as 50mb.")
    ] = "200mb",
    seconds: Annotated[float, typer.Option(min=1, help="Measure for no longer than this.")] = 60.0,
    secret_file: Annotated[
        Path | None,
        typer.Option(help="Read the secret from this file; else SLIPSTREAM_SECRET."),
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write the results here.")] = None,
) -> None:
    """Measure the available bandwidth of the path to a listener, or be that listener."""
    env = os.environ if secret_file is None else {"SLIPSTREAM_SECRET_FILE": str(secret_file)}
    secret = read_secret(env)
    if listen:
        _listen(*read_place(host or LOOPBACK), secret)
        return
    if host is None:
        raise LaunchError("name the host to probe, or give --listen to answer probers")
    if json is not None:
        prepare_file("--json", json)
    threshold_bytes_s = None if threshold is None else bits_per_second(threshold) / 8
    result = measure(
        *read_place(host),
        secret,
        most_bytes_s=bits_per_second(fastest) / 8,
        at_most_nbytes=read_amount(at_most),
        limit_s=seconds,
    )
    print(printable_lines("\n".join(in_words(host, result, threshold_bytes_s))))
    if json is not None:
        write_report(json, _report(host, result, threshold_bytes_s))


def read_place(text: str) -> tuple[str, int]:
    """Parse ``10.0.0.7``, ``node3:7998``, ``[fe80::1]:7998`` or ``::1`` as host and port."""
    match = re.fullmatch(r"\[([^\]]+)\](?::(\d+))?|([^:]+)(?::(\d+))?|([^\[\]]*:[^\[\]]*:.*)", text)
    if match is None:
        raise LaunchError(
            f"{shown(text)} is no place: write HOST or HOST:PORT, such as 10.0.0.7:{PORT}"
        )
    bracketed, its_port, name, port, bare = match.groups()
    port_text = its_port or port or str(PORT)
    if len(port_text) > 5:
        raise LaunchError(f"{shown(port_text)} is no port: write one from 1 to 65535")
    return bracketed or name or bare, int(port_text)


def read_amount(text: str) -> int:
    """Parse an amount: ``50mb`` is 50,000,000 bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)([kmg]i?b)", text.strip().lower())
    if match is None:
        raise ConfigError(f"an amount of {shown(text)} is not understood; write 50mb or 1gb")
    nbytes = float(match[1]) * _AMOUNTS[match[2]]
    if nbytes > MOST_AMOUNT:
        raise ConfigError(
            f"an amount of {shown(text)} is more than {MOST_AMOUNT:g} bytes; give less"
        )
    return round(nbytes)


def in_words(host: str, result: Available, threshold_bytes_s: float | None) -> list[str]:
    """Return a line with the range, one with the cost, and one with the verdict if requested."""
    lines = [
        f"available from here to {host}: {_range(result)}",
        f"{result.fleets} fleets, {result.streams} streams, {human_bytes(result.sent_nbytes)} sent "
        f"in {result.seconds:.1f} s; {_END[result.ended]}; this machine paces up to "
        f"{_mbit(result.fastest_bytes_s)} Mbit/s",
    ]
    if 2 * result.late_streams > result.streams:
        lines.append(
            f"{result.late_streams} of {result.streams} streams were not sent in time: this "
            "machine is too busy for the range to be trusted"
        )
    if threshold_bytes_s is not None:
        verdict = _VERDICTS[result.sufficient(threshold_bytes_s)]
        lines.append(f"{verdict} {_mbit(threshold_bytes_s)} Mbit/s")
    return lines


_END = {
    "resolution": "as fine as asked for",
    "fleets": "ended because it would not settle",
    "traffic": "ended by --at-most",
    "time": "ended by --seconds",
}
_VERDICTS = {
    True: "sufficient: not below",
    False: "insufficient: below",
    None: "cannot tell: the range includes, or was not seen to end below,",
}


def _range(result: Available) -> str:
    low, high = _mbit(result.low_bytes_s), _mbit(result.high_bytes_s)
    if result.low_seen and result.high_seen:
        return f"{low} to {high} Mbit/s, mean {_mbit(result.mean_bytes_s)}"
    if result.low_seen:
        return f"at least {low} Mbit/s (not seen to end below {high}, the fastest that was allowed)"
    return (
        f"less than {high} Mbit/s"
        if result.high_seen
        else "not known: no rate was seen to fit or not to fit"
    )


def _report(
    host: str, result: Available, threshold_bytes_s: float | None
) -> dict[str, str | float | bool | None]:
    report = {"host": host, **asdict(result), "mean_bytes_s": result.mean_bytes_s}
    if threshold_bytes_s is not None:
        report["threshold_bytes_s"] = threshold_bytes_s
        report["sufficient"] = result.sufficient(threshold_bytes_s)
    return report


def _listen(address: str, port: int, secret: bytes | None) -> None:
    with Listener(address, port, secret) as listener:
        where = f"[{listener.address}]" if ":" in listener.address else listener.address
        print(f"listening on {where}:{listener.port}; Ctrl-C ends it", flush=True)
        try:
            threading.Event().wait()
        finally:
            print(_seen(listener.counts))


def _seen(counts: Counts) -> str:
    return (
        f"answered {counts.sessions} prober(s), {counts.streams} streams; ignored "
        f"{counts.untracked} packets of untracked and {counts.malformed} malformed ones"
    )


def _mbit(bytes_s: float) -> str:
    return f"{bytes_s * 8 / 1e6:.4g}"
