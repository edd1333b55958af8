"""slipstream on a real Ray cluster: two nodes of this machine."""

from __future__ import annotations

import functools
import importlib
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

import slipstream
from slipstream.errors import ConfigError, LaunchError, PeerFailed, RuntimeFault

ray = pytest.importorskip("ray", reason="needs Ray; run make frameworks")

import ray_loops  # noqa: E402
from ray.exceptions import ActorUnavailableError, RayActorError  # noqa: E402
from ray_nodes import IGNORED, LIMIT_S, LOSABLE, Nodes, close, same, until  # noqa: E402

from slipstream.integrations.ray import actors, run  # noqa: E402
from slipstream.integrations.ray.launch import takes_no_argument  # noqa: E402
from slipstream.integrations.ray.workers import settings_of  # noqa: E402

pytestmark = [pytest.mark.process, *IGNORED]


# ---- run


@pytest.fixture(scope="module")
def told(nodes: Nodes) -> list[dict[str, Any]]:
    """The facts of three workers, by rank."""
    return run(ray_loops.facts, workers=3, strategy=slipstream.push_pull(), placement="SPREAD")


def test_results_come_by_rank_from_main_threads(told: list[dict[str, Any]]) -> None:
    assert [each["rank"] for each in told] == [0, 1, 2]
    assert [each["summary"] for each in told] == [True, False, False]
    assert all(each["main"] for each in told)


def test_workers_are_grouped_by_node_not_by_address(told: list[dict[str, Any]]) -> None:
    places = [(each["node"], each["local_rank"], each["local_size"]) for each in told]
    first, last = told[0]["node"], told[2]["node"]
    assert first != last
    two_first = [(first, 0, 2), (first, 1, 2), (last, 0, 1)]
    one_first = [(first, 0, 1), (last, 0, 2), (last, 1, 2)]
    assert places in (two_first, one_first)


@pytest.mark.parametrize("variant", range(len(ray_loops.VARIANTS)))
def test_weights_are_those_of_one_process(told: list[dict[str, Any]], variant: int) -> None:
    found = [each["weights"][variant] for each in told]
    assert all(same(found[0], other) for other in found[1:])
    accumulates = ray_loops.VARIANTS[variant][1]
    assert close(found[0], ray_loops.reference(3, accumulates=accumulates))


def test_the_strategy_of_the_call_is_the_default(told: list[dict[str, Any]]) -> None:
    assert {each["strategy"] for each in told} == {slipstream.push_pull().to_json()}
    assert all(close(each["default"], ray_loops.reference(3)) for each in told)


def test_all_workers_have_one_secret(told: list[dict[str, Any]]) -> None:
    assert len({each["secret"] for each in told}) == 1
    assert len(told[0]["secret"]) == 64


def test_gadei_in_the_function_is_refused(told: list[dict[str, Any]]) -> None:
    assert all("slipstream run" in each["gadei"] for each in told)


def test_an_error_of_a_worker_is_the_error_of_the_call(nodes: Nodes) -> None:
    with pytest.raises(RuntimeError, match="OfUser: sample 17 of digits is damaged") as caught:
        run(ray_loops.raising, workers=2)
    assert not isinstance(caught.value, PeerFailed)
    (note,) = caught.value.__notes__
    assert note.startswith("rank 1: Traceback")
    assert 'raise OfUser(17, source="digits")' in note


@pytest.mark.parametrize(
    ("strategy", "steps", "message"),
    [
        ("push_pull", {0: 3, 1: 5}, "rank 1 still trains, but rank 0 has finished"),
        ("diloco", {0: 0, 1: 0}, r"without optimizer\.step\(\)"),
    ],
)
def test_a_job_without_a_block_ends_with_its_function(
    strategy: str, steps: dict[int, int], message: str, nodes: Nodes
) -> None:
    """And what goes wrong at its end is the error of the call."""
    with pytest.raises(RuntimeFault, match=message) as caught:
        run(functools.partial(ray_loops.without_block, steps), workers=2, strategy=strategy)
    assert "contextlib" not in str(getattr(caught.value, "__notes__", ""))
    assert run(functools.partial(ray_loops.without_block, {0: 3, 1: 3}), workers=2) == [0, 1]


def test_exit_handlers_run_and_are_not_awaited_for_ever(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors, "LEAVE_S", 8.0)
    with pytest.raises(ValueError, match="this function has failed"):
        run(ray_loops.Exiting(tmp_path), workers=2)
    ran = sorted(file.name.split(".") for file in tmp_path.iterdir())
    assert [rank for rank, _ in ran] == ["0", "1"]
    until(lambda: not any(psutil.pid_exists(int(pid)) for _, pid in ran))


def test_an_actor_out_of_reach_is_ended_before_another_takes_its_place(
    nodes: Nodes, tmp_path: Path
) -> None:
    """And if the actor is lost that notes who has come back, nobody has."""
    bundle, idle = {"CPU": 1.0}, functools.partial(ray_loops.idle, str(tmp_path))
    with actors.placed(1, bundle, "PACK", LIMIT_S) as group:
        job = actors.ActorJob(group, bundle, ray.put(idle), settings_of(None), 1)
        try:
            job.start(1)
            until(lambda: list(tmp_path.iterdir()))
            (first,) = tmp_path.iterdir()
            job._start_again(0, 1)
            until(lambda: not psutil.pid_exists(int(first.name)))
            until(lambda: len(list(tmp_path.iterdir())) == 2)
            assert job._rejoined_ranks() == []
            ray.kill(job.returns)
            assert job._rejoined_ranks() == []
        finally:
            job.end()


def test_an_actor_out_of_reach_has_not_died() -> None:
    lost = ActorUnavailableError("the network is down", None)
    assert actors.reason_of_death(lost).startswith("its process or its node cannot be reached")
    died = actors.reason_of_death(RayActorError(error_msg="the node was lost"))
    assert died == "its process or its node died (the node was lost)"


def test_a_killed_actor_comes_back(nodes: Nodes, tmp_path: Path) -> None:
    found = run(ray_loops.ComingBack(tmp_path), workers=2, strategy="ako(partitions=2)")
    require_return(found)


def test_the_actor_of_a_killed_node_comes_back_on_another(nodes: Nodes, tmp_path: Path) -> None:
    nodes.add()  # rank 0 is on either of two nodes, and the other is lost

    def node_of_rank_1() -> Any:
        noted = [file.name for file in tmp_path.glob("*")]
        return next((node for node in nodes.others if node.node_id in noted), None)

    with nodes.losing(node_of_rank_1):
        found = run(
            ray_loops.ComingBack(tmp_path, with_node=True),
            workers=2,
            strategy="ako(partitions=2)",
            resources={"CPU": 1, LOSABLE: 1},
            placement="SPREAD",
        )
    # Ray may try the dead node once more, before it knows.
    require_return(found, most_lives=5)
    (left,) = nodes.others
    assert {each["node"] for each in found} == {left.node_id}
    assert not (tmp_path / left.node_id).exists()


def require_return(found: list[dict[str, Any]], most_lives: int = 1) -> None:
    assert found[0]["life"] == 0
    assert 1 <= found[1]["life"] <= most_lives
    assert found[0]["first"] == 0
    assert found[1]["first"] > ray_loops.KILLED
    assert same(found[0]["weights"], found[1]["weights"])


def test_ctrl_c_ends_all(nodes: Nodes, tmp_path: Path) -> None:
    script = (
        "import functools, ray, ray_loops; from slipstream.integrations.ray import run\n"
        f"ray.init(address={nodes.address!r}, log_to_driver=False)\n"
        f"run(functools.partial(ray_loops.idle, {str(tmp_path)!r}), workers=2)"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        until(lambda: len(list(tmp_path.iterdir())) == 2)
        driver.send_signal(signal.SIGINT)
        _, said = driver.communicate(timeout=LIMIT_S)
    finally:
        driver.kill()
        driver.wait()
    assert "KeyboardInterrupt" in said
    until(lambda: not any(psutil.pid_exists(int(file.name)) for file in tmp_path.iterdir()))


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 2, "strategy": "gadei"}, "needs `slipstream run`"),
        ({"workers": 2, "strategy": "nonsense"}, "no strategy 'nonsense'"),
        ({"workers": 2, "strategy": 3}, "give a strategy"),
        ({"workers": 0}, "workers=0"),
        ({"workers": 2, "placement": "TIGHT"}, "PACK, SPREAD, STRICT_PACK, STRICT_SPREAD"),
        ({"workers": 2, "resources": {"CPU": -1}}, "CPU=-1"),
        ({"workers": 2, "resources": {}}, "resources are empty"),
        ({"workers": 2, "place_limit_s": 0}, "place_limit_s=0"),
        ({"workers": 2, "place_limit_s": float("inf")}, "place_limit_s=inf"),
        ({"workers": 2, "place_limit_s": "60"}, "place_limit_s='60': give seconds"),
        ({"workers": 2, "resources": 3}, "resources=3"),
        ({"workers": 2, "restarts": -1}, "restarts=-1"),
        ({"workers": 2, "restarts": 1, "strategy": "push_pull"}, "FailureConfig"),
    ],
)
def test_bad_arguments_are_refused_without_ray(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(ray_loops.facts, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 7}, "room for 6 even when idle"),
        ({"workers": 4, "placement": "STRICT_PACK"}, "room for 3 even when idle"),
        ({"workers": 3, "placement": "STRICT_SPREAD"}, "room for 2 even when idle"),
        ({"workers": 1, "resources": {"GPU": 1}}, "with GPU 1 each .* room for 0 even when idle"),
    ],
)
def test_workers_without_a_place_are_refused_in_time(
    nodes: Nodes, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=message):
        run(ray_loops.facts, **arguments, place_limit_s=0.5)


def test_a_function_that_cannot_be_sent_is_refused(nodes: Nodes) -> None:
    lock = threading.Lock()
    with pytest.raises(ConfigError, match="cannot be sent to workers"):
        run(lambda: lock.acquire(), workers=2)


def test_a_function_with_arguments_is_refused_without_ray() -> None:
    with pytest.raises(ConfigError, match=r"a function without arguments.*functools\.partial"):
        run(ray_loops.idle, workers=2)  # type: ignore[arg-type]
    assert takes_no_argument(functools.partial(ray_loops.idle, "here"))
    assert takes_no_argument(print)


def test_an_old_ray_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slipstream.integrations.ray")
    monkeypatch.setattr(ray, "__version__", "2.9.3")
    with pytest.raises(ConfigError, match=r"needs Ray 2\.51 or later, and this is 2\.9\.3: pip"):
        importlib.import_module("slipstream.integrations.ray")


def test_a_killed_node_ends_the_job_with_one_error(nodes: Nodes, tmp_path: Path) -> None:
    (second,) = nodes.others
    with (
        nodes.losing(lambda: second if len(list(tmp_path.iterdir())) == 2 else None),
        pytest.raises(RuntimeFault) as caught,
    ):
        run(ray_loops.Training(tmp_path), workers=2, placement="STRICT_SPREAD")
    started = [file.name.split(".") for file in tmp_path.iterdir()]
    (lost,) = [rank for rank, _, node in started if node == second.node_id]
    assert re.match(
        f"rank {lost} (failed: its process or its node died|is lost)", str(caught.value)
    )
    until(lambda: not any(psutil.pid_exists(int(pid)) for _, pid, _ in started))
