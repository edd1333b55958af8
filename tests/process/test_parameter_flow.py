"""Parameter Flow by real processes: what is equal to what, and who goes on without whom."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fork_server import ForkServer, Run

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("flow_worker.py")
RANKS, STEPS = 3, 16
CHAIN = [[[1], [], [2], [0]]]  # the server to rank 1, rank 1 to 2, rank 2 to 0
Told = dict[str, Any]
Deaths = dict[str, tuple[Path, Run]]  # by name of the case, and where it tells

DENSE = {"name": "dense", "strategy": "push_pull()"}
WHOLE = {"name": "whole", "strategy": "parameter_flow(delta=0.0)"}
FILTERED = {"name": "filtered", "strategy": "parameter_flow(delta='85%', chunk_bytes=4096)"}
BY_VALUE = {"name": "by value", "strategy": "parameter_flow(delta={'first*': 0.003, '*': '80%'})"}
ROUNDED = {"name": "rounded", "strategy": "parameter_flow(codec='bfloat16', delta='70%')"}
STALE = {
    "name": "stale",
    "strategy": "parameter_flow(staleness=2)",
    "pause_s": [0.0, 0.004, 0.012],
}
STALE_ADAM = {
    "name": "stale adam",
    "strategy": "parameter_flow(staleness=3, chunk_bytes=2048)",
    "optimizer": "Adam",
    "momentum": False,
    "lr": 0.01,
    "pause_s": [0.01, 0.0, 0.002],
}
OWN_STEPS = {"name": "own steps", "strategy": "parameter_flow(payload='update', delta=0.0)"}
STALE_STEPS = {
    "name": "stale steps",
    "strategy": "parameter_flow(payload='update', staleness=1)",
    "pause_s": [0.0, 0.003],
}
RELAYED = {"name": "relayed", "children": CHAIN, "options": {"delta": "85%", "chunk_bytes": 4096}}
CASES = (
    DENSE, WHOLE, FILTERED, BY_VALUE, ROUNDED, STALE, STALE_ADAM, OWN_STEPS, STALE_STEPS, RELAYED,
)  # fmt: skip


def start(fork_server: ForkServer, folder: Path, *cases: Told, servers: int = 1) -> Run:
    file = folder / "cases.json"
    file.write_text(json.dumps([{"steps": STEPS, **case} for case in cases]))
    settings = {"SLIPSTREAM_SERVERS": str(servers)}
    return fork_server.start(WORKER, str(file), ranks=RANKS, env=settings)


def see_out(run: Run) -> list[int]:
    codes = run.wait(200)
    assert run.remains.left() == []
    return codes


def run(fork_server: ForkServer, folder: Path, *cases: Told) -> list[int]:
    return see_out(start(fork_server, folder, *cases))


def told(folder: Path, case: Told, ranks: int | list[int] = RANKS) -> list[Told]:
    """What each rank said, none of which may be an error."""
    of = range(ranks) if isinstance(ranks, int) else ranks
    said = [json.loads((folder / f"{case['name']}.{rank}.json").read_text()) for rank in of]
    for each in said:
        assert "error" not in each, each["trace"]
    return said


def digest_of(said: list[Told]) -> str:
    (digest,) = {each["digest"] for each in said}
    return str(digest)


@pytest.fixture(scope="module")
def folder(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flow")
    assert run(fork_server, folder, *CASES) == [0] * RANKS
    return folder


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_all_workers_end_with_the_same_bits_and_learn(folder: Path, case: Told) -> None:
    said = told(folder, case)
    assert digest_of(said)
    assert {each["step"] for each in said} == {STEPS}
    for each in said:
        assert sum(each["losses"][-3:]) < 0.9 * sum(each["losses"][:3])


def test_without_a_bound_it_is_push_pull_bit_for_bit(folder: Path) -> None:
    assert digest_of(told(folder, WHOLE)) == digest_of(told(folder, DENSE))


def test_a_tree_changes_nothing_but_the_way(folder: Path) -> None:
    assert digest_of(told(folder, RELAYED)) == digest_of(told(folder, FILTERED))


def test_what_waits_does_not_travel(folder: Path) -> None:
    dense, filtered = told(folder, DENSE), told(folder, FILTERED)
    assert digest_of(filtered) != digest_of(dense)
    assert filtered[1]["sent"] < 0.45 * dense[1]["sent"]  # biases and statistics travel whole


def test_training_goes_on_from_a_checkpoint_to_the_same_bits(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """Residuals and the optimizer's state are in it; nothing is under way when it is written."""
    save = {"save_at": 8, "save": str(tmp_path / "checkpoint")}
    through = {**FILTERED, "name": "through", **save}
    resumed = {**FILTERED, "name": "resumed", "load": save["save"]}
    ahead = {**STALE, "name": "ahead", "save_at": 8, "save": str(tmp_path / "ahead")}
    again = {**STALE, "name": "again", "steps": 8, "load": ahead["save"]}
    assert run(fork_server, tmp_path, through, resumed, ahead, again) == [0] * RANKS
    assert digest_of(told(tmp_path, resumed)) == digest_of(told(tmp_path, through))
    (saved,) = {each["saved"] for each in told(tmp_path, ahead)}
    assert {each["loaded"] for each in told(tmp_path, again)} == {saved}


# ---- deaths

RELAYS = [
    {
        **RELAYED,
        "name": f"relay, {staleness}",
        "options": {"delta": "85%", "chunk_bytes": 4096, "staleness": staleness},
        "killed": [1, 6],
        "steps": 30,
    }
    for staleness in (0, 2)
]
DEATHS = {
    "at the beginning of a step": {"killed": [1, 6]},
    "with a gradient half sent": {"killed_within": [1, 6]},
    "before a checkpoint": {"killed_after": [1, 6], "save_at": 7},
}
DIED = [
    {
        "name": f"{death}, {staleness}",
        "strategy": f"parameter_flow(staleness={staleness}, chunk_bytes=4096)",
        "steps": 20,
        "save": "checkpoint",
        **when,
    }
    for staleness in (0, 2)
    for death, when in DEATHS.items()
]


@pytest.fixture(scope="module")
def deaths(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Deaths:
    """Several at a time: most of it is waiting for somebody who has gone silent."""
    runs: Deaths = {}
    for together, servers in ((RELAYS, 1), (DIED, 2)):
        for case in together:
            folder = tmp_path_factory.mktemp("death")
            runs[case["name"]] = folder, start(fork_server, folder, case, servers=servers)
    return runs


@pytest.mark.parametrize("case", RELAYS, ids=[case["name"] for case in RELAYS])
def test_a_relay_dies_and_nobody_misses_an_update(deaths: Deaths, case: Told) -> None:
    folder, run = deaths[case["name"]]
    assert see_out(run) == [0, -9, 0]
    said = told(folder, case, [0, 2])
    assert digest_of(said)
    assert {each["step"] for each in said} == {30}


@pytest.mark.parametrize("case", DIED, ids=[case["name"] for case in DIED])
def test_the_rest_go_on_whenever_one_dies(deaths: Deaths, case: Told) -> None:
    """Also where one of two servers has its gradient and the other has not."""
    folder, run = deaths[case["name"]]
    assert see_out(run) == [0, -9, 0]
    said = told(folder, case, [0, 2])
    assert digest_of(said)
    assert {each["step"] for each in said} == {20}
    assert (run.folder / "checkpoint").exists() == ("save_at" in case)


def test_one_that_was_away_for_too_long_is_told_so(fork_server: ForkServer, tmp_path: Path) -> None:
    case = {**FILTERED, "name": "away", "steps": 30, "stopped": [1, 6]}
    run(fork_server, tmp_path, case)
    assert digest_of(told(tmp_path, case, [0, 2]))
    away = json.loads((tmp_path / "away.1.json").read_text())
    assert away["error"].startswith("LeftBehind: rank 1 was not heard")


def test_frames_that_do_not_fit_are_refused_named_and_counted(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    """And the job goes on as if they had not come."""
    plain = {**FILTERED, "name": "plain"}
    forged = {**FILTERED, "name": "forged", "forges": [1, 5]}
    assert run(fork_server, tmp_path, plain, forged) == [0] * RANKS
    assert digest_of(told(tmp_path, forged)) == digest_of(told(tmp_path, plain))
    assert [each["refused"] for each in told(tmp_path, plain)] == [None] * RANKS
    for each in told(tmp_path, forged):
        assert each["refused"]["messages"] == 4
        assert each["refused"]["last"][0].startswith("rank 1: ")
