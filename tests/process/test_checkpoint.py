"""A run that stops at a checkpoint and goes on elsewhere ends where it would have ended."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import distance
from fork_server import ForkServer
from safetensors.torch import load_file, save_file

import hostile_checkpoints

pytestmark = pytest.mark.process

WORKER = Path(__file__).with_name("checkpoint_worker.py")
HALF, END = 8, 16
BY_WORKERS = "push_pull(chunk_bytes=4096)"
BY_SERVERS = "push_pull(chunk_bytes=4096, update='server')"
ALLREDUCE = "allreduce"


@dataclass
class Part:
    """One job: from the beginning or a checkpoint, to a step."""

    name: str
    strategy: str = BY_WORKERS
    optimizer: str = "sgd"
    model: str = "plain"
    servers: int | None = None
    load: str | None = None
    until: int = END
    save: dict[int, str] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)  # files that must be refused
    cannot_write: str | None = None


class Parts:
    """Runs parts and remembers what became of them."""

    def __init__(self, fork_server: ForkServer, folder: Path) -> None:
        self.folder = folder
        self._nursery = fork_server
        self._told: dict[str, list[dict[str, Any]]] = {}

    def path(self, name: str) -> str:
        return str(self.folder / name)

    def run(self, workers: int, *parts: Part) -> None:
        plan = self.folder / "plan.json"
        plan.write_text(json.dumps([asdict(part) for part in parts]))
        run = self._nursery.run(WORKER, str(plan), ranks=workers, limit_s=150)
        assert set(run.codes.values()) == {0}, run.told()
        assert run.remains.left() == []
        for part in parts:
            files = [run.folder / f"{part.name}.{rank}.json" for rank in range(workers)]
            self._told[part.name] = [json.loads(file.read_text()) for file in files]

    def told(self, name: str) -> list[dict[str, Any]]:
        """What each rank wrote down."""
        ranks = self._told[name]
        errors = [told["error"] for told in ranks if "error" in told]
        assert not errors, "\n".join(errors)
        return ranks

    def digests(self, name: str) -> dict[str, str]:
        first, *others = (told["digests"] for told in self.told(name))
        assert all(other == first for other in others)
        return dict(first)


MODES = {"workers": BY_WORKERS, "servers": BY_SERVERS, "allreduce": ALLREDUCE}
SAME = [
    ("sgd", "workers"),
    ("adam", "workers"),
    ("sgd", "servers"),
    ("adam", "servers"),
    ("adamw", "allreduce"),
]
# Who wrote the checkpoint, and who goes on: strategy, workers, servers.
ELSEWHERE = [
    ("sgd", "workers of 2", BY_SERVERS, 3, 2),
    ("adam", "workers of 2", ALLREDUCE, 3, None),
    ("adam", "servers of 2", BY_WORKERS, 3, 2),
    ("adam", "servers of 2", BY_WORKERS, 1, None),
    ("sgd", "alone", BY_WORKERS, 2, 1),
    ("adam", "alone", BY_SERVERS, 2, 1),
]


def named(kind: str, writer: str) -> str:
    return f"{kind} by {writer}"


def continued(kind: str, writer: str, strategy: str, workers: int) -> str:
    return f"{named(kind, writer)}, then {strategy} of {workers}"


@pytest.fixture(scope="module")
def parts(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Parts:
    parts = Parts(fork_server, tmp_path_factory.mktemp("checkpoints"))

    def writer(kind: str, who: str, mode: str, model: str = "plain") -> Part:
        name = named(kind, who)
        return Part(name, mode, kind, model, save={HALF: parts.path(name)})

    def goes_on(workers: int) -> list[Part]:
        return [
            Part(
                continued(kind, who, strategy, n), strategy, kind, servers=servers,
                load=parts.path(named(kind, who)),
            )
            for kind, who, strategy, n, servers in ELSEWHERE
            if n == workers
        ]  # fmt: skip

    parts.run(1, writer("sgd", "alone", BY_WORKERS), writer("adam", "alone", BY_WORKERS))
    rich = [writer(kind, f"rich {mode}", MODES[mode], "rich") for kind, mode in SAME]
    again = [
        Part(f"{part.name}, again", part.strategy, part.optimizer, "rich", load=part.save[HALF])
        for part in rich
    ]
    crossed = Part(
        "crossed", BY_WORKERS, "adam", "rich", load=parts.path(named("adam", "rich servers"))
    )
    parts.run(
        2, *rich, *again, crossed,
        writer("sgd", "workers of 2", BY_WORKERS), writer("adam", "workers of 2", BY_WORKERS),
        writer("adam", "servers of 2", BY_SERVERS),
        *goes_on(2),
    )  # fmt: skip
    parts.run(3, *goes_on(3))
    parts.run(1, *goes_on(1))
    return parts


@pytest.mark.parametrize(("kind", "mode"), SAME)
def test_same_job_goes_on_bit_for_bit(parts: Parts, kind: str, mode: str) -> None:
    """Dropout and the like too: the ranks' random generators are where they were."""
    name = named(kind, f"rich {mode}")
    whole, again = parts.digests(name), parts.digests(f"{name}, again")
    assert sorted(map(int, again)) == [*range(HALF + 1, END + 1)]
    assert again == {step: whole[step] for step in again}
    assert parts.told(name)[0]["lr"] == parts.told(f"{name}, again")[0]["lr"]


def test_servers_write_what_workers_can_go_on_from(parts: Parts) -> None:
    whole, crossed = (
        parts.told(name)[0]["state"] for name in (named("adam", "rich workers"), "crossed")
    )
    for name, values in whole.items():
        close = 0.05 if name.startswith("brain") else 1e-5  # bf16
        assert distance(torch.tensor(crossed[name]), torch.tensor(values)) <= close, name


@pytest.mark.parametrize(("kind", "writer", "strategy", "workers"), [one[:4] for one in ELSEWHERE])
def test_goes_on_elsewhere(
    parts: Parts, kind: str, writer: str, strategy: str, workers: int
) -> None:
    """With another number of workers or servers, or updates elsewhere: as if nothing had been."""
    whole = parts.told(named(kind, "alone"))[0]["state"]
    for told in parts.told(continued(kind, writer, strategy, workers)):
        for name, values in whole.items():
            assert distance(torch.tensor(told["state"][name]), torch.tensor(values)) <= 1e-5, name


def test_writer_is_not_disturbed(parts: Parts) -> None:
    """Saving is nothing a run notices."""
    alone = parts.told(named("adam", "alone"))[0]["state"]
    for writer in ("workers of 2", "servers of 2"):
        state = parts.told(named("adam", writer))[0]["state"]
        for name, values in alone.items():
            assert distance(torch.tensor(state[name]), torch.tensor(values)) <= 1e-5, name


# Right but for one thing, which only a look at what they say can tell.
HOSTILE = {
    "step -5": "is damaged or no checkpoint",
    "lr nan": "'lr' of parameter group 0 is nan, which is not finite",
    "parameters in a group": "would replace the parameters of this job",
    "momentum flat": "'momentum_buffer' of '0.bias' is (1,)",
    "state of what is not there": "it has optimizer state of 'more'",
    "of torch.save": "is a file of torch.save, and job.load reads files of job.save",
    "facts deep": "nested deeper than",
    "generator of numpy out of place": "random generators",
    "a pipe": "it is a pipe, not a regular file",
}


@pytest.fixture(scope="module")
def refused(parts: Parts) -> dict[str, list[str]]:
    """Files that cannot be loaded: by name, what each rank said about it."""
    good = Path(parts.path(named("sgd", "alone")))
    content = good.read_bytes()
    bad = {
        "missing": None,
        "empty": b"",
        "cut off": content[: len(content) // 2],
        "head damaged": b"\xff" * 16 + content[16:],
        "a bit flipped": content[:-100] + bytes([content[-100] ^ 1]) + content[-99:],
        "other optimizer": Path(parts.path(named("adam", "alone"))).read_bytes(),
    }
    for name, damaged in bad.items():
        if damaged is not None:
            Path(parts.path(name)).write_bytes(damaged)
    for name in HOSTILE:
        hostile_checkpoints.FILES[name](good, Path(parts.path(name)))
    save_file({"weight": torch.zeros(2)}, parts.path("no checkpoint"))
    save_file(load_file(good), parts.path("nothing but tensors"))
    rich = named("sgd", "rich workers")
    files = [*bad, *HOSTILE, "no checkpoint", "nothing but tensors", rich]
    kept = parts.path("kept")
    parts.run(
        2,
        Part(
            "refuses", until=3, save={1: kept}, bad=[parts.path(file) for file in files],
            cannot_write=kept,
        ),
        Part("undisturbed", until=3),
        # Where servers have the weights and the optimizer's state.
        Part("servers refuse", BY_SERVERS, until=3, bad=[parts.path(name) for name in HOSTILE]),
        Part("servers undisturbed", BY_SERVERS, until=3),
    )  # fmt: skip
    by_rank = [told["errors"] for told in parts.told("refuses")]
    return {name: list(said) for name, *said in zip([*files, "full"], *by_rank, strict=True)}


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("missing", "no checkpoint at"),
        ("empty", "damaged"),
        ("cut off", "damaged"),
        ("head damaged", "damaged"),
        ("a bit flipped", "damaged"),
        ("other optimizer", "Adam"),
        ("no checkpoint", "not a slipstream checkpoint"),
        ("nothing but tensors", "not a slipstream checkpoint"),
        *HOSTILE.items(),
        (named("sgd", "rich workers"), "only"),
        ("full", "cannot write"),
    ],
)
def test_refused_with_the_same_words_everywhere(
    refused: dict[str, list[str]], file: str, says: str
) -> None:
    first, second = refused[file]
    assert first == second
    assert first.startswith("CheckpointError: ")
    assert says in first


def test_a_job_trains_on_after_a_refusal(parts: Parts, refused: dict[str, list[str]]) -> None:
    assert parts.digests("refuses") == parts.digests("undisturbed")
    assert parts.digests("servers refuse") == parts.digests("servers undisturbed")


def test_where_servers_update_the_same_is_refused(
    parts: Parts, refused: dict[str, list[str]]
) -> None:
    for told in parts.told("servers refuse"):
        assert told["errors"] == [refused[name][0] for name in HOSTILE]


def test_failed_write_leaves_the_old_file(parts: Parts, refused: dict[str, list[str]]) -> None:
    assert refused["full"]
    assert parts.told("refuses")[0]["kept"]
    assert [file.name for file in parts.folder.iterdir() if "draft" in file.name] == []
