"""Checkpoints between outer rounds: training goes on as if it had not been interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer
from local_steps_worker import STEPS
from test_mixes import vector
from test_outer_rounds import RANKS, STREAMED, WORKER, Run, Told, composed, run

from slipstream.codecs import Quantized
from slipstream.outer_optimizers import Adam
from slipstream.routes import Route
from slipstream.topologies import Mesh, Sharded
from slipstream.torch.checkpoints.checkpoint import Checkpoint
from slipstream.updates import LocalSteps, Nesterov, Update

__all__ = ["run"]  # the fixture
pytestmark = pytest.mark.process


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tmp_path / "saved.safetensors"


AT_SERVERS = composed(
    Route(Sharded(), up=Quantized(4, block=64)), Update(LocalSteps(5), Nesterov(at="server"))
)
ADAM_AT_SERVERS = composed(Route(Sharded()), Update(LocalSteps(3), Adam(0.05, at="server")))


@pytest.mark.parametrize(
    ("strategy", "dtype", "after", "options"),
    [
        ("diloco(every=5)", "float64", 7, {"inner": "AdamW"}),  # within a round
        ("local_sgd(every=4)", "float64", 4, {"inner": "AdamW"}),  # at its end
        (STREAMED, "float64", 5, {"inner": "AdamW"}),  # two fragments are under way
        (STREAMED, "float64", 6, {"model": "norm"}),  # with their buffers
        ("diloco(every=4, fragments=2, overlap_steps=1, wire='int4')", "float32", 6, {}),
        ("diloco(every=5)", "bfloat16", 7, {"inner": "AdamW"}),
        (AT_SERVERS, "float32", 7, {}),
        (composed(Route(Mesh()), Update(LocalSteps(3), Adam(0.05))), "float64", 7, {}),
        (ADAM_AT_SERVERS, "float64", 7, {"model": "norm"}),
    ],
)
def test_a_resumed_run_goes_on_exactly_as_it_would_have(
    strategy: str, dtype: str, after: int, options: dict[str, Any], run: Run, saved: Path
) -> None:
    plain = run(strategy, dtype, **options)
    whole = run(strategy, dtype, save_after=after, **options)
    assert whole[0]["digest"] == plain[0]["digest"], "saving changes nothing"
    resumed = run(strategy, dtype, load=str(saved), **options)
    for each, before in zip(resumed, whole, strict=True):
        assert each["steps"] == list(range(after, STEPS))
        assert each["loaded"] == before["saved"], "the outer weights and its own buffers"
        assert each["own"] == before["own"], "its own weights before all take the same"
        assert each["digest"] == before["digest"]
        assert (vector(each["weights"]) - vector(plain[0]["weights"])).abs().max() <= 1e-12


def warned(
    fork_server: ForkServer, folder: Path, strategy: str, ranks: int, **options: Any
) -> tuple[str, Told]:
    """Run it; returns what was printed, and what workers wrote."""
    arguments = strategy, str(folder), "float64", json.dumps(options)
    run = fork_server.run(WORKER, *arguments, ranks=ranks)
    assert set(run.codes.values()) == {0}, run.told()
    return run.told(), [json.loads((folder / f"{r}.json").read_text()) for r in range(ranks)]


@pytest.mark.parametrize(
    ("ranks", "lost", "changed", "why"),
    [
        (RANKS, 1, {}, "rank 1: no checkpoint at"),
        (2, None, {}, "rank 1: 3 workers wrote it"),
        (RANKS, None, {"strategy": "diloco(every=4)"}, "written with LocalSteps(every=5"),
    ],
)
def test_without_all_parts_the_outer_weights_are_kept_and_it_is_said(
    ranks: int,
    lost: int | None,
    changed: dict[str, str],
    why: str,
    fork_server: ForkServer,
    run: Run,
    saved: Path,
) -> None:
    whole = run("diloco(every=5)", save_after=7)
    if lost is not None:
        saved.with_name(f"{saved.name}.rank{lost}").unlink()
    strategy = changed.get("strategy", "diloco(every=5)")
    printed, told = warned(fork_server, saved.parent, strategy, ranks, load=str(saved))
    assert why in printed
    assert "only the outer weights and momentum" in printed
    assert {each["loaded"] for each in told} == {whole[0]["saved"]}
    assert {each["begins_with"] for each in told} == {whole[0]["saved"]}, "all from there"
    assert len({each["digest"] for each in told}) == 1


def test_parts_of_another_checkpoint_are_not_taken(
    fork_server: ForkServer, run: Run, saved: Path
) -> None:
    run("diloco(every=5)", save_after=7)
    older = saved.with_name(f"{saved.name}.rank2")
    content = older.read_bytes()
    run("diloco(every=5)", save_after=8)
    older.write_bytes(content)
    printed, _ = warned(fork_server, saved.parent, "diloco(every=5)", RANKS, load=str(saved))
    assert "belongs to another checkpoint" in printed


def test_where_a_worker_cannot_write_its_part_the_checkpoint_is_written_all_the_same(
    fork_server: ForkServer, saved: Path
) -> None:
    part = saved.with_name(f"{saved.name}.rank1")
    part.mkdir()  # a file cannot replace it
    printed, _ = warned(fork_server, saved.parent, "diloco(every=5)", RANKS, save_after=7)
    assert "cannot be written (rank 1:" in printed
    assert saved.exists()


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"under_way": [7]}, "fragments [7] of 1"),
        ({"under_way": [0, 0]}, "fragments [0, 0] of 1"),
        ({"under_way": "all"}, "what was under way is damaged"),
        ({"inner": "LocalSteps(every=9)"}, "it was written with LocalSteps(every=9)"),
    ],
)
def test_a_part_that_does_not_fit_changes_nothing(
    changed: dict[str, Any], why: str, fork_server: ForkServer, tmp_path: Path
) -> None:
    _, told = warned(fork_server, tmp_path, "diloco(every=5)", 2, save_after=7)
    saved, part = tmp_path / "saved.safetensors", tmp_path / "saved.safetensors.rank1"
    checkpoint = Checkpoint.read(part)
    known = dict(checkpoint.facts["local"][0]["$dict"]) | {
        key: {"$list": value} if isinstance(value, list) else value
        for key, value in changed.items()
    }
    checkpoint.facts["local"] = [{"$dict": [[key, value] for key, value in known.items()]}]
    checkpoint.write(part)
    printed, again = warned(fork_server, tmp_path, "diloco(every=5)", 2, load=str(saved))
    assert f"rank 1: {part} does not fit this job" in printed
    assert why in printed
    assert {each["begins_with"] for each in again} == {told[0]["saved"]}
