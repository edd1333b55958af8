"""A service under load: answers while it trains, its memory, and how fast it starts.

    python benchmarks/service_load.py [--seconds 60] [--connections 4] [--json load.json]

Starts ``slipstream serve`` on a free port and a temporary directory. One classifier is trained on
``--csv``; then a job of ``--rows`` made-up rows trains for as long as requests are sent:

- one phrase a request, one after the other: milliseconds, p50 and p95
- one phrase a request, on several connections, as fast as answers come: requests a second
- 30 phrases a request, 500 phrases a second in all: codes, and how much the API's memory grows

Run it on a quiet machine.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from service_client import Client, serving

from slipstream.apps.bench.comparison import machine_facts

TRIPS = Path(__file__).parents[1] / "examples" / "trips.csv"
COLLECTION = 30
PHRASES_S = 500


def made_up(rows: int) -> bytes:
    """Rows of five of 5,000 words, in 50 classes."""
    chance = random.Random(0)
    lines = (
        " ".join(f"word{chance.randrange(5000)}" for _ in range(5)) + f",class {number % 50}"
        for number in range(rows)
    )
    return "\n".join(lines).encode()


def one_by_one(client: Client, ask: Callable[[Client], int], seconds: float) -> dict[str, float]:
    took = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        assert ask(client) == 200
        took.append(1000 * (time.monotonic() - began))
    hundredths = statistics.quantiles(took, n=100)
    return {"requests": len(took), "p50_ms": hundredths[49], "p95_ms": hundredths[94]}


def together(
    url: str, ask: Callable[[Client], int], seconds: float, connections: int, every_s: float
) -> dict[str, Any]:
    """Ask on several connections; each begins a request ``every_s`` after the last, or later."""
    codes: Counter[int] = Counter()
    until = time.monotonic() + seconds

    def work() -> None:
        client, due = Client(url), time.monotonic()
        while (now := time.monotonic()) < until:
            if now < due:
                time.sleep(due - now)
            due = max(due + every_s, now - every_s)
            codes[ask(client)] += 1

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    requests_s = sum(codes.values()) / (time.monotonic() - began)
    return {"requests_s": requests_s, "codes": {str(code): codes[code] for code in codes}}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Train, ask, and look at the memory."""
    mib = 1 << 20
    found: dict[str, Any] = {"machine": machine_facts()}
    with serving(folder, ["--epochs", str(args.epochs), "--rate", "10000000"]) as (url, api, start):
        found["start_to_ready_s"] = start
        found["api_mib_at_start"] = api.memory_info().rss / mib
        client = Client(url)
        small = client.create(args.csv.read_bytes())
        client.wait(small, lambda state: state["state"] == "done")
        large = client.create(made_up(args.rows))
        client.wait(large, lambda state: state["updates"] > 0)
        texts = [line.rpartition(",")[0] for line in args.csv.read_text().splitlines()]

        def one(client: Client) -> int:
            return client.classify(small, random.choice(texts))

        def many(client: Client) -> int:
            return client.classify_collection(small, random.choices(texts, k=COLLECTION))[0]

        found["one_phrase"] = one_by_one(client, one, args.seconds / 4)
        found["phrases"] = together(url, one, args.seconds / 4, args.connections, 0.0)
        before = api.memory_info().rss
        every_s = args.connections * COLLECTION / PHRASES_S
        paced = together(url, many, args.seconds, args.connections, every_s)
        paced["phrases_s"] = COLLECTION * paced.pop("requests_s")
        paced["memory_grows_mib"] = (api.memory_info().rss - before) / mib
        found["collections"] = paced
        found["api_mib_at_end"] = api.memory_info().rss / mib
        found["job"] = client.send("GET", f"/api/classifiers/{large}")[1]
        found["trained_all_the_time"] = found["job"]["state"] == "running"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--csv", type=Path, default=TRIPS)
    parser.add_argument("--rows", type=int, default=10_000)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(args, Path(folder))
    text = json.dumps(found, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
