"""Systems of others train as DDP does, and leave nothing behind, where they are installed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from launches import SLIPSTREAM, Launch

from slipstream.bench.contestants import PEERS, why_missing

pytestmark = pytest.mark.process

OPTIONS = ("--workers=2", "--repetitions=1", "--steps=5", "--json=figures.json")


@pytest.mark.parametrize("system", [name for name, peer in PEERS.items() if peer.needs])
def test_a_peer_ends_where_ddp_does(system: str, launch: Callable[..., Launch]) -> None:
    if (reason := why_missing(system)) is not None:
        pytest.skip(reason)
    bench = launch(SLIPSTREAM, "bench", "mf", f"--compare=ddp,{system}", *OPTIONS)
    assert bench.wait(150) == 0, bench.stderr
    figures = json.loads((bench.folder / "figures.json").read_text())
    ddp, peer = figures["results"]
    assert peer["failures"] == ddp["failures"] == []
    assert peer["metric"] == pytest.approx(ddp["metric"], rel=1e-5)
    assert bench.remains.left() == []
