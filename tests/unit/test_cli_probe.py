"""``slipstream probe``: what it measures over loopback, what it says, what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.apps.cli.probe import in_words, read_amount, read_place
from slipstream.apps.probing.probing import LOOPBACK, PORT, Listener
from slipstream.planning.bandwidth import Available

SECRET = "correct horse battery staple"
MBIT = 125_000.0
QUICK = ("--fastest=60mbit", "--at-most=10mb")


@pytest.fixture(autouse=True)
def no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLIPSTREAM_SECRET", raising=False)


@pytest.fixture
def guarded() -> Iterator[Listener]:
    with Listener(port=0, secret=SECRET.encode()) as listener:
        yield listener


def test_figures_on_the_screen_and_in_a_file(slipstream, guarded: Listener, tmp_path: Path) -> None:
    secret, file = tmp_path / "secret", tmp_path / "figures" / "probe.json"
    secret.write_text(SECRET + "\n")
    place = f"{LOOPBACK}:{guarded.port}"
    options = (f"--secret-file={secret}", f"--json={file}", "--threshold=90mbit")
    code, out, _ = slipstream("probe", place, *QUICK, *options)
    assert code == 0
    report = json.loads(file.read_text())
    assert out.startswith(f"available from here to {place}: ")
    assert f"{report['fleets']} fleets, {report['streams']} streams" in out
    assert report["sent_nbytes"] <= 10_000_000
    assert report["high_bytes_s"] <= 60 * MBIT
    assert report["threshold_bytes_s"] == 90 * MBIT
    assert report["sufficient"] is (False if report["high_seen"] else None)
    assert guarded.counts.streams > report["streams"]  # trains came before


def test_the_secret_of_the_environment(
    slipstream, guarded: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_SECRET", SECRET)
    code, _, err = slipstream("probe", f"{LOOPBACK}:{guarded.port}", *QUICK)
    assert code == 0, err
    assert (guarded.counts.sessions, guarded.counts.untracked) == (1, 0)


def test_listening_until_ctrl_c(slipstream) -> None:
    program = "from slipstream.apps.cli import main; main()"
    command = [sys.executable, "-c", program, "probe", "--listen", f"{LOOPBACK}:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as listening:
        assert listening.stdout is not None
        try:
            where = listening.stdout.readline().split(";")[0].removeprefix("listening on ")
            code, _, err = slipstream("probe", where, *QUICK)
        finally:
            listening.send_signal(signal.SIGINT)
            last, _ = listening.communicate(timeout=30)
    assert where.startswith(f"{LOOPBACK}:")
    assert code == 0, err
    assert listening.returncode == 130
    assert last.startswith("answered 1 prober(s), ")
    assert last.endswith("ignored 0 packets of untracked and 0 malformed ones\n")


def found(
    low: float, high: float, *, seen: tuple[bool, bool] = (True, True), late: int = 0
) -> Available:
    return Available(
        low * MBIT, high * MBIT, *seen, "resolution", 5, 31, late, 2**20, 9.87, 800 * MBIT, 0
    )


@pytest.mark.parametrize(
    ("available", "says", "verdict"),
    [
        (found(55, 61), "55 to 61 Mbit/s, mean 58", "sufficient: not below 50 Mbit/s"),
        (found(20, 22), "20 to 22 Mbit/s, mean 21", "insufficient: below 50 Mbit/s"),
        (found(48, 52), "48 to 52 Mbit/s, mean 50", "cannot tell: the range includes"),
        (
            found(760, 800, seen=(True, False)),
            "at least 760 Mbit/s (not seen to",
            "sufficient: not",
        ),
        (found(0, 1, seen=(False, True)), "less than 1 Mbit/s", "insufficient: below"),
        (found(0, 9, seen=(False, False)), "not known", "cannot tell"),
    ],
)
def test_in_words(available: Available, says: str, verdict: str) -> None:
    first, second, third = in_words("there", available, 50 * MBIT)
    assert first.startswith(f"available from here to there: {says}")
    assert second == (
        "5 fleets, 31 streams, 1.0 MiB sent in 9.9 s; as fine as asked for; this machine paces up "
        "to 800 Mbit/s"
    )
    assert third.startswith(verdict)
    assert in_words("there", available, None) == [first, second]


def test_a_busy_machine_is_mentioned() -> None:
    assert len(in_words("there", found(20, 22, late=15), None)) == 2
    said = in_words("there", found(20, 22, late=16), None)[2]
    assert said.startswith("16 of 31 streams were not sent in time: this machine is too busy")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("10.0.0.7", ("10.0.0.7", PORT)),
        ("node3:7000", ("node3", 7000)),
        ("::1", ("::1", PORT)),
        ("fe80::1%eth0", ("fe80::1%eth0", PORT)),
        ("[::1]:7000", ("::1", 7000)),
        ("[::1]", ("::1", PORT)),
    ],
)
def test_places(text: str, place: tuple[str, int]) -> None:
    assert read_place(text) == place


def test_amounts() -> None:
    assert [read_amount(text) for text in ("50mb", "1.5 MiB".replace(" ", ""), "2GB")] == [
        *(50_000_000, 1_572_864, 2_000_000_000),
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "name the host to probe"),
        (["192.0.2.1"], "192.0.2.1 is another host: set SLIPSTREAM_SECRET"),
        (["--listen", "0.0.0.0"], "listening on 0.0.0.0 lets other hosts in"),
        (["--listen", f"{LOOPBACK}:99999"], "port 99999"),
        ([LOOPBACK, "--threshold=fast"], "'fast' is not understood"),
        ([LOOPBACK, "--fastest=1kbit"], "the lower first"),
        ([LOOPBACK, "--at-most=lots"], "'lots' is not understood; write 50mb"),
        ([LOOPBACK, "--at-most=1kb"], "takes 9.5 MiB at the least"),
        ([LOOPBACK, "--secret-file=/no/such/file"], "cannot read the secret file"),
        ([f"{LOOPBACK}:port"], "is no place"),
        ([LOOPBACK, "--json=/"], "that is a folder"),
    ],
)
def test_what_makes_no_sense_is_one_line(slipstream, arguments: list[str], says: str) -> None:
    code, out, err = slipstream("probe", *arguments)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert says in err
