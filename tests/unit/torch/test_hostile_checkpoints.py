"""A checkpoint is loaded whole, or an error of ours says why not and nothing has changed."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import slipstream
from hostile_checkpoints import COUNTED, FILES, Make, setting, write
from slipstream.errors import CheckpointError
from slipstream.torch.checkpoints.checkpoint import Checkpoint

KEPT = Path(__file__).parents[2] / "checkpoints"
ALONE = "backup_workers(first=1, averaged=0.9)"
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.01),
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.01, momentum=0.9),
}


class Training:
    """A job alone, some steps in."""

    def __init__(self, job: slipstream.Job, kind: str, strategy: str, steps: int) -> None:
        torch.manual_seed(steps)
        self.job = job
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))
        groups = [
            {"params": list(model[0].parameters())},
            {"params": [*model[1].parameters(), *model[3].parameters()], "lr": 0.02},
        ]
        self.model, self.optimizer = job.distribute(model, OPTIMIZERS[kind](groups), strategy)
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(8, 4)).pow(2).sum().backward()
        self.optimizer.step()

    def everything(self) -> Any:
        """Whatever loading may change, by value."""
        averages = self.job._training.mode.averages()
        kind, words, *rest = np.random.get_state(legacy=True)  # noqa: NPY002
        return {
            "model": bits(dict(self.model.state_dict())),
            "state": [bits(self.optimizer.state.get(p)) for p in self.model.parameters()],
            "others": len(self.optimizer.state),
            "groups": [
                {k: repr(v) for k, v in group.items() if k != "params"}
                | {"params": [id(p) for p in group["params"]]}
                for group in self.optimizer.param_groups
            ],
            "averages": bits(averages),
            "step": self.job.step,
            "random": [
                torch.get_rng_state().numpy().tobytes(),
                random.getstate(),
                (kind, np.asarray(words).tobytes(), rest),
            ],
        }


def bits(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        content = value.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        return value.dtype, value.shape, content
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return repr(value)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of each optimizer."""
    folder = tmp_path_factory.mktemp("good")
    for kind in OPTIMIZERS:
        with slipstream.init() as job:
            Training(job, kind, ALONE, steps=4)
            job.save(folder / kind)
    return folder


CASES = [
    *(("adam", name) for name in FILES | COUNTED),
    *(("sgd", name) for name in FILES if name.startswith(("momentum", "lr", "param", "a group"))),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_a_hostile_checkpoint_is_refused_and_changes_nothing(
    good: Path, kind: str, name: str, tmp_path: Path
) -> None:
    path = tmp_path / "hostile"
    (FILES | COUNTED)[name](good / kind, path)
    with slipstream.init() as job:
        training = Training(job, kind, ALONE, steps=0)
        before = training.everything()
        with pytest.raises(CheckpointError) as caught:
            job.load(path)
        assert str(path) in str(caught.value)
        assert training.everything() == before
        training.step()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_good_one_is_loaded(good: Path, kind: str) -> None:
    with slipstream.init() as job:
        training = Training(job, kind, ALONE, steps=0)
        before = training.everything()
        job.load(good / kind)
        after = training.everything()
        assert {k for k in after if after[k] != before[k]} == {
            "model", "state", "others", "averages", "step", "random",
        }  # fmt: skip
        assert job.step == 4
        training.step()


FINE: dict[str, Make] = {
    "lr a tensor": setting("lr", torch.tensor(0.5)),
    "lr a whole number": setting("lr", 1),
    "a schedule's settings": setting("initial_lr", 0.5),
    "a switch that nobody has set": setting("foreach", None),
    "no settings": lambda good, path: no_settings(good, path),
}


def no_settings(good: Path, path: Path) -> None:
    """As servers of shared memory write them."""
    checkpoint = Checkpoint.read(good)
    told = dict(checkpoint.facts["optimizer"]["$dict"])
    told["groups"] = {"$list": [{"$dict": []}, {"$dict": []}]}
    checkpoint.facts["optimizer"] = {"$dict": [[key, value] for key, value in told.items()]}
    write(path, checkpoint.facts, checkpoint.tensors)


@pytest.mark.parametrize("name", FINE)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_what_is_merely_unusual_is_loaded(good: Path, kind: str, name: str, tmp_path: Path) -> None:
    FINE[name](good / kind, tmp_path / "file")
    with slipstream.init() as job:
        training = Training(job, kind, ALONE, steps=0)
        job.load(tmp_path / "file")
        assert job.step == 4
        training.step()


# ---- chance


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scratch")


@pytest.fixture(scope="module")
def training() -> Iterator[Training]:
    with slipstream.init() as job:
        yield Training(job, "adam", "push_pull", steps=3)


@pytest.fixture(scope="module")
def whole(training: Training, scratch: Path) -> bytes:
    training.job.save(scratch / "whole")
    return (scratch / "whole").read_bytes()


EDITS = st.lists(
    st.tuples(
        st.sampled_from(["flip", "set", "cut", "insert", "delete"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(0, 255),
    ),
    min_size=1,
    max_size=3,
)


def edited(whole: bytes, edits: list[tuple[str, float, int]]) -> bytes:
    content = bytearray(whole)
    for kind, where, value in edits:
        at = int(where * len(content))
        if kind == "cut":
            del content[at:]
        elif kind == "insert":
            content.insert(at, value)
        elif not content:
            continue
        elif kind == "delete":
            del content[at]
        else:
            content[at] = value if kind == "set" else content[at] ^ (1 << value % 8)
    return bytes(content)


@given(EDITS)
@settings(max_examples=100)
def test_changed_bytes_are_refused_or_mean_nothing(
    training: Training, whole: bytes, scratch: Path, edits: list[tuple[str, float, int]]
) -> None:
    (scratch / "good").write_bytes(whole)
    training.job.load(scratch / "good")
    before = training.everything()
    (scratch / "edited").write_bytes(edited(whole, edits))
    with contextlib.suppress(CheckpointError):
        training.job.load(scratch / "edited")
    assert training.everything() == before


ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["$dict", "$list", "$tensor", "optimizer/state/0.weight/exp_avg"]),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.sampled_from(["$dict", "$list", "$tuple", "$tensor", "a"]), st.none()),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Everything within a value, by what it is in and where."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


@given(st.data())
@settings(max_examples=100)
def test_changed_facts_are_refused_or_can_be_trained_on(
    training: Training, whole: bytes, scratch: Path, data: st.DataObject
) -> None:
    (scratch / "good").write_bytes(whole)
    training.job.load(scratch / "good")
    before = training.everything()
    groups = [dict(group) for group in training.optimizer.param_groups]
    checkpoint = Checkpoint.read(scratch / "good")
    generators = checkpoint.facts["random"]
    if data.draw(st.booleans()):
        del checkpoint.facts["random"]  # most of the facts, and all numbers
    inside, key = data.draw(st.sampled_from([*places(checkpoint.facts)]))
    inside[key] = data.draw(ODD)
    checkpoint.facts.setdefault("random", generators)
    write(scratch / "edited", checkpoint.facts, checkpoint.tensors)
    try:
        training.job.load(scratch / "edited")
    except CheckpointError:
        assert training.everything() == before
    else:
        training.step()
        for group, original in zip(training.optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(original)


# ---- what earlier versions wrote


class Net(nn.Module):
    def __init__(self, complex_too: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)
        if complex_too:
            self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex128))


def alone_before() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(complex_too=True)
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1]},
        {"params": [p for p in model.parameters() if p.dim() <= 1], "lr": 0.02},
    ]
    return model, torch.optim.AdamW(groups, lr=0.01, amsgrad=True)


def averaged_before() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def gadei_before() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Net(complex_too=False)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


@pytest.mark.parametrize(
    ("file", "make", "step", "lrs"),
    [
        ("alone", alone_before, 4, [0.009045084971874739, 0.018090169943749478]),
        ("averaged", averaged_before, 7, [0.009045084971874739]),
        ("gadei", gadei_before, 8, [0.01]),
    ],
)
def test_checkpoints_of_earlier_versions_are_loaded(
    file: str, make: Any, step: int, lrs: list[float], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    shutil.copy(KEPT / f"{file}.safetensors", path)
    tensors = Checkpoint.read(path).tensors
    with slipstream.init() as job:
        model, optimizer = job.distribute(*make(), ALONE)
        job.load(path)
        assert job.step == step
        assert [group["lr"] for group in optimizer.param_groups] == lrs
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, tensors[f"model/{name}"]), name
        for name, parameter in model.named_parameters():
            for key, value in optimizer.state[parameter].items():
                assert torch.equal(value, tensors[f"optimizer/state/{name}/{key}"]), (name, key)
            assert len(optimizer.state[parameter]) >= 3
        if file == "averaged":
            average = job._training.mode.averages()[0]["0.weight"]
            assert torch.equal(average, tensors["averaged/0.weight"])


def test_facts_that_could_not_be_read_are_not_written(tmp_path: Path) -> None:
    deep: Any = {}
    for _ in range(300):
        deep = {"a": deep}
    facts = {**Checkpoint.read(KEPT / "gadei.safetensors").facts, "optimizer": deep}
    assert json.dumps(facts)
    with pytest.raises(CheckpointError, match="nested deeper than 200 levels"):
        Checkpoint({}, facts).write(tmp_path / "file")
    assert not (tmp_path / "file").exists()


def test_graph_capture_is_refused_on_the_cpu(
    training: Training, whole: bytes, scratch: Path
) -> None:
    (scratch / "good").write_bytes(whole)
    checkpoint = Checkpoint.read(scratch / "good")
    switches = [inside for inside, _ in places(checkpoint.facts) if "capturable" in inside]
    assert switches
    for inside in switches:
        assert isinstance(inside, list)
        inside[1] = True
    write(scratch / "edited", checkpoint.facts, checkpoint.tensors)
    with pytest.raises(CheckpointError, match="parameters on the CPU cannot"):
        training.job.load(scratch / "edited")
