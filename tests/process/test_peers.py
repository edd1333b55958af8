"""Systems of others train as DDP does, and leave nothing behind, where they are installed."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from launches import SLIPSTREAM, Launch

from slipstream.apps.bench.contestants import PEERS, why_missing

pytestmark = pytest.mark.process

OPTIONS = ("--workers=2", "--repetitions=1", "--steps=5", "--json=figures.json")


# DiLoCo with an outer optimizer that does nothing but take the mean, each step, is DDP with SGD.
EXACT = {
    "torchft_local_sgd": "torchft_local_sgd(every=1)",
    "torchft_diloco": "torchft_diloco(every=1, lr=1, momentum=0)",
}
NEEDING_MORE = [EXACT.get(name, name) for name, peer in PEERS.items() if peer.needs]


@pytest.mark.parametrize("system", NEEDING_MORE)
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


def test_fragments_are_judged_by_the_weights_that_all_share(launch: Callable[..., Launch]) -> None:
    """The steps end between two exchanges, when every worker has weights of its own."""
    system = "torchft_diloco(every=4, fragments=2, delay=1)"
    if (reason := why_missing(system)) is not None:
        pytest.skip(reason)
    bench = launch(
        *(SLIPSTREAM, "bench", "gpt", f"--compare={system},local", *OPTIONS, "--target=3"),
        "--sizes=layers=1,width=16,heads=2,context=8",
    )
    assert bench.wait(150) == 0, bench.stderr
    shared, local = json.loads((bench.folder / "figures.json").read_text())["results"]
    judged, own = ([j["metric"] for j in r["runs"][0]["judgements"]] for r in (shared, local))
    assert judged[0] == judged[1]
    assert own[0] != own[1]
    assert bench.remains.left() == []
