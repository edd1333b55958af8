"""What cannot work ends in one clear line, a code that is not zero, and nothing left running."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from fork_server import ForkServer, Run
from launches import SLIPSTREAM

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("bad_input_worker.py")
AT_A_TIME = 5
SECRET = "a secret of sufficient length"
SERVER = "push_pull(update='server')"
SERVER_AFTER = "push_pull(update='server', overlap=False)"


@dataclass
class Mistake:
    """What is wrong, and what the one line must say about it."""

    wrong: str
    says: tuple[str, ...]
    strategy: str = "push_pull"
    ranks: tuple[dict[str, str], ...] = ({}, {})
    run: Run = field(init=False)

    def __str__(self) -> str:
        what = self.wrong if self.wrong != "nothing" else self.says[0]
        return f"{what}, {self.strategy}"


def differing(wrong: str, *says: str) -> Mistake:
    return Mistake(wrong, ("rank 1", *says))


MISTAKES = [
    Mistake("nothing", ("no strategy 'pushpull'", "did you mean 'push_pull'"), "pushpull"),
    Mistake("nothing", ("does not take overlapp",), "push_pull(overlapp=True)"),
    Mistake("nothing", ("cannot read strategy",), "push_pull(overlap="),
    Mistake("nothing", ("'worker' or 'server'",), "push_pull(update='nobody')"),
    Mistake("strategies", ("rank 1", "all_to_all", "push_pull")),
    Mistake("servers", ("9 servers", "1 chunk")),
    differing("names", "'other.weight'", "'second.weight'"),
    differing("shape", "'second.weight'", "(5, 8)", "(4, 8)"),
    differing("dtype", "'second.weight'", "float64", "float32"),
    differing("frozen differs", "'second.weight'", "frozen"),
    differing("extra", "'third.weight'"),
    differing("optimizers", "Adam", "SGD"),
    Mistake("foreign", ("not in the model", "(3, 7)")),
    Mistake("foreign on one", ("rank 1", "not in the model", "(3, 7)")),
    Mistake("nothing to train", ("no parameter that requires a gradient",)),
    Mistake("lbfgs", ("servers", "LBFGS", "push_pull()"), SERVER),
    Mistake("weights changed", ("weights", "undo other", "parametrize"), "async_sgd"),
    Mistake("weights changed", ("weights", "call job.wait()"), SERVER),
    Mistake("weights changed, then waited", ("weights", "call job.wait()"), SERVER),
    Mistake("weights differ", ("not alike on all ranks", "before job.distribute"), SERVER),
    Mistake("state", ("state does not fit", "momentum_buffer", "(3, 3)"), SERVER),
    Mistake("state on one", ("load_state_dict", "every rank", "rank 0"), SERVER),
    Mistake("state too late", ("load_state_dict", "before the first step"), "async_sgd"),
    *(
        mistake
        for strategy in ("push_pull", "allreduce", "all_to_all")
        for mistake in (
            Mistake("more passes", ("different numbers of backward passes",), strategy),
            Mistake("leaves early", ("rank 1", "same number of steps"), strategy),
            Mistake("stays longer", ("rank 1", "same number of steps"), strategy),
            Mistake("last pass", ("rank 1", "same number of steps"), strategy),
            Mistake("by hand, leaves early", ("rank 1", "same number of steps"), strategy),
            Mistake("by hand, stays longer", ("rank 1", "same number of steps"), strategy),
        )
    ),
    *(
        Mistake("converted", ("rank 1", "float64", "float32", "before"), strategy)
        for strategy in ("push_pull", SERVER, "allreduce", "all_to_all", "poseidon", "ako")
    ),
    *(
        Mistake("unheld", ("'second.weight'", "no optimizer", "requires_grad_(False)"), strategy)
        for strategy in (
            "ako",
            SERVER,
            SERVER_AFTER,
            "backup_workers(first=2)",
            "async_sgd",
            "parameter_flow(staleness=1)",
        )
    ),
    *(
        Mistake("by hand", ("optimizer.step()", "on its own", "allreduce()"), strategy)
        for strategy in ("ako", SERVER_AFTER, "diloco(every=2)")
    ),
    Mistake("distribute twice", ("the same optimizer twice",)),
    Mistake("save too early", ("after job.distribute",)),
    Mistake(
        "nothing",
        ("not signed with this job's secret", "rank 1"),
        ranks=({"SLIPSTREAM_SECRET": SECRET}, {"SLIPSTREAM_SECRET": SECRET[::-1]}),
    ),
    Mistake(
        "nothing",
        ("across hosts a job secret is needed", "SLIPSTREAM_SECRET"),
        ranks=({"MASTER_ADDR": "192.0.2.1", "XDG_CONFIG_HOME": "/dev/null/config"},) * 2,
    ),
    Mistake("nothing", ("shorter than 16",), ranks=({"SLIPSTREAM_SECRET": "short"},) * 2),
    Mistake("nothing", ("RANK=7", "WORLD_SIZE=2"), ranks=({"RANK": "7", "WORLD_SIZE": "2"},)),
    Mistake("nothing", ("RANK='one'",), ranks=({"RANK": "one"},)),
    Mistake("nothing", ("WORLD_SIZE=2", "MASTER_ADDR"), ranks=({"MASTER_ADDR": ""},) * 2),
]


@pytest.fixture(scope="module")
def mistakes(fork_server: ForkServer) -> list[Mistake]:
    for first in range(0, len(MISTAKES), AT_A_TIME):
        together = MISTAKES[first : first + AT_A_TIME]
        for mistake in together:
            arguments = (mistake.wrong, mistake.strategy)
            # On one host, so that what keeps all of them from joining is said once.
            ranks = [{"LOCAL_RANK": str(i)} | env for i, env in enumerate(mistake.ranks)]
            mistake.run = fork_server.start(WORKER, *arguments, ranks=ranks)
        for mistake in together:
            mistake.run.wait()
    return MISTAKES


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=[str(one) for one in MISTAKES])
def test_one_clear_message(mistakes: list[Mistake], number: int) -> None:
    mistake = mistakes[number]
    assert_one_clear_message(mistake.run, mistake.says)


def assert_one_clear_message(run: Run, says: tuple[str, ...]) -> None:
    lines = run.own_lines()
    assert len(lines) == 1, run.told()
    for fragment in says:
        assert fragment in lines[0], run.told()
    assert "Traceback" not in run.told()
    assert 0 not in run.wait()
    assert run.remains.left() == []


def test_port_taken(fork_server: ForkServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        only = {"MASTER_PORT": port, "WORLD_SIZE": "2"}
        run = fork_server.run(WORKER, "nothing", "push_pull", ranks=[only])
    assert_one_clear_message(run, (f"127.0.0.1:{port}", "in use", "choose a free MASTER_PORT"))


def test_prometheus_port_taken(fork_server: ForkServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        env = {"SLIPSTREAM_PROMETHEUS": port}
        run = fork_server.run(WORKER, "nothing", "push_pull", ranks=2, env=env)
    assert_one_clear_message(run, ("Prometheus", port, "in use"))


def test_unknown_strategy_on_the_command_line(launch) -> None:  # type: ignore[no-untyped-def]
    job = launch(SLIPSTREAM, "run", "--workers=2", "--strategy=pull_push", str(WORKER), "nothing")
    assert job.wait() == 2
    assert len(job.stderr.splitlines()) == 1
    assert "no strategy 'pull_push'" in job.own_lines[0]
    assert job.remains.left() == []
