"""Parts of a user's own in real jobs: servers import their module if the launcher was given it."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launches import SLIPSTREAM, TORCHRUN, Launch
from own_parts_worker import MODULE
from ports import free_port

from slipstream.runtime.launch.processes import PARTS

pytestmark = pytest.mark.process

HERE = Path(__file__).parent
DOCUMENT = HERE.parents[1] / "docs" / "composing.md"
SECRET = {"SLIPSTREAM_SECRET": "0123456789abcdef"}
RUN = (SLIPSTREAM, "run", "--workers=2")
REFUSED = rf"{MODULE}:\w+: the module {MODULE} may not be imported \(allowed: none\)"


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script, with its module beside it and far from every path of imports."""
    folder = tmp_path_factory.mktemp("scripts")
    for name in ("own_parts.py", "own_parts_worker.py"):
        shutil.copy(HERE / name, folder)
    return str(folder / "own_parts_worker.py")


def weights(job: Launch) -> list[list[float]]:
    """The weights with which both workers have ended."""
    assert job.wait() == 0, job.stderr
    first, second = (json.loads((job.folder / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second
    found: list[list[float]] = first
    return found


def test_own_parts_of_every_kind_train_as_slipstreams_that_do_the_same(
    script: str, launch: Callable[..., Launch]
) -> None:
    like = launch(*RUN, script, "like")
    allowed = f"--parts={MODULE}"
    of_workers = launch(*RUN, allowed, script, "own")
    dedicated = launch(*RUN, "--servers=1", "--parts=json", allowed, script, "own")
    wanted = weights(like)
    for job in (of_workers, dedicated):
        for found, values in zip(weights(job), wanted, strict=True):
            assert found == pytest.approx(values, rel=1e-12, abs=1e-14)


def test_own_parts_named_by_the_script_or_the_environment(
    script: str, launch: Callable[..., Launch]
) -> None:
    by_script = launch(
        TORCHRUN, "--nproc-per-node=2", "--standalone", script, "own", MODULE, env=SECRET
    )
    by_environment = launch(*RUN, "--servers=1", script, "own", env={PARTS: f"json,{MODULE}"})
    assert weights(by_script) == weights(by_environment)


def test_job_without_the_list_ends_at_once_with_the_way_out(
    script: str, launch: Callable[..., Launch]
) -> None:
    job = launch(*RUN, script, "own")
    assert job.wait(60.0) not in (0, None)
    assert re.search(REFUSED, job.stderr), job.stderr
    assert f"slipstream run --parts {MODULE}" in job.stderr
    assert "Traceback" not in job.stderr
    assert job.remains.left() == []


def test_every_worker_ends_with_the_refusal_under_any_launcher(
    script: str, launch: Callable[..., Launch]
) -> None:
    """One of them has the list, the other does not."""
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    given = {"0": {PARTS: MODULE}, "1": {}}
    jobs = [
        launch(sys.executable, script, "own", env={**shared, "RANK": rank, **listed})
        for rank, listed in given.items()
    ]
    assert [job.wait(60.0) for job in jobs] == [1, 1], [job.stderr for job in jobs]
    assert re.search(f"rank 1: .*{REFUSED}", jobs[0].stderr), jobs[0].stderr


def test_servers_that_were_not_given_the_module_refuse_it(
    script: str, launch: Callable[..., Launch]
) -> None:
    """The workers' list is not the servers'."""
    job = launch(*RUN, "--servers=1", script, "own", MODULE)
    assert job.wait(60.0) not in (0, None)
    assert re.search(f"server 0 refused the plan: part {REFUSED}", job.stderr), job.stderr
    assert job.remains.left() == []


def test_module_that_servers_do_not_find_is_named(
    script: str, launch: Callable[..., Launch]
) -> None:
    """Workers find it by a path of their own."""
    lone = Path(script).parent / "lone" / "script.py"
    lone.parent.mkdir(exist_ok=True)
    lone.write_text(
        f"import runpy, sys\nsys.path.append({str(Path(script).parent)!r})\n"
        f"runpy.run_path({script!r}, run_name='__main__')\n"
    )
    job = launch(*RUN, "--servers=1", f"--parts={MODULE}", str(lone), "own")
    assert job.wait(60.0) not in (0, None)
    said = f"server 0 refused the plan: the module {MODULE} cannot be imported"
    assert said in job.stderr, job.stderr
    assert job.remains.left() == []


def test_example_of_the_documents_votes(tmp_path: Path, launch: Callable[..., Launch]) -> None:
    blocks = re.findall(r"```python\n# (signs|train)\.py\n(.*?)```", DOCUMENT.read_text(), re.S)
    assert [name for name, _ in blocks] == ["signs", "train"]
    for name, code in blocks:
        (tmp_path / f"{name}.py").write_text(code)
    with (tmp_path / "train.py").open("a") as script:
        script.write("        assert model.weight.grad.abs().unique().tolist() == [1.0]\n")
        script.write("    print('error', (model.weight - 1).abs().max().item())\n")
    job = launch(*RUN, "--parts", "signs", str(tmp_path / "train.py"))
    assert job.wait() == 0, job.stderr
    errors = [float(each) for each in re.findall(r"error (\S+)", job.stdout)]
    assert len(errors) == 2
    assert max(errors) < 0.6  # of up to 1.35 in the beginning
