"""Files that hold everything, or a message that says why not."""

import json
import os
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import slipstream
from slipstream.errors import CheckpointError
from slipstream.runtime.files import checkpoint_format, whole_files
from slipstream.runtime.files.checkpoint_format import FORMAT, Piece, unpack
from slipstream.torch.checkpoints.checkpoint import (
    Checkpoint,
    check_model,
    load_model,
    model_tensors,
    pack,
)
from slipstream.torch.tensors.random_state import Generators, random_state

FACTS = {"format": FORMAT, "step": 3, "strategy": "alone", "workers": 1, "random": []}


def there_and_back(value: Any, tmp_path: Path) -> Any:
    """Packed, written, read and unpacked."""
    written = Checkpoint()
    written.facts = {**FACTS, "optimizer": pack(value, "value", written.tensors)}
    written.write(tmp_path / "file")
    read = Checkpoint.read(tmp_path / "file")
    return unpack(read.facts["optimizer"], read.tensors)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return (
            type(a) is type(b)
            and len(a) == len(b)
            and all(same(x, y) for x, y in zip(a, b, strict=True))
        )
    return bool(a == b) and type(a) is type(b)


TENSORS = st.sampled_from(
    [
        torch.arange(6.0).reshape(2, 3),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(7.0),
        torch.empty(0, 3),
        torch.tensor([1, 2]),
        torch.tensor([1.5], dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j]),
    ]
)
KEYS = st.text("ab/$1", max_size=4) | st.integers(0, 11)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | TENSORS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=15,
)


@given(NESTED)
def test_nested_state_is_unpacked_as_it_was_packed(value: Any) -> None:
    tensors: dict[str, torch.Tensor] = {}
    packed = json.loads(json.dumps(pack(value, "state", tensors)))
    assert same(unpack(packed, tensors), value)


def test_keys_that_read_alike_do_not_meet() -> None:
    alike = {"a/b": 0, "a": {"b": 1, "b/c": 2}, "a/b/c": 3, 1: 4, "1": 5}
    value = {
        key: {k: torch.tensor(v) for k, v in entry.items()}
        if isinstance(entry, dict)
        else torch.tensor(entry)
        for key, entry in alike.items()
    }
    tensors: dict[str, torch.Tensor] = {}
    assert same(unpack(pack(value, "state", tensors), tensors), value)


def test_packed_tensors_are_copies() -> None:
    live = torch.zeros(2)
    tensors: dict[str, torch.Tensor] = {}
    pack({"a": live}, "state", tensors)
    live.fill_(9)
    assert tensors["state/a"].tolist() == [0, 0]


@pytest.mark.parametrize("optimizer", ["LBFGS", "Adam", "SGD", "Adagrad", "ASGD", "Adafactor"])
def test_the_state_of_any_optimizer_survives_a_file(optimizer: str, tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    kind = getattr(torch.optim, optimizer)
    extra = {"momentum": 0.9} if optimizer == "SGD" else {}
    trained = kind(model.parameters(), lr=0.1, **extra)
    for _ in range(3):

        def closure() -> torch.Tensor:
            trained.zero_grad()
            loss = model(torch.ones(4, 3)).pow(2).sum()
            loss.backward()
            return loss

        trained.step(closure)
    state = dict(enumerate(dict(entries) for entries in trained.state.values()))
    assert state
    assert same(there_and_back(state, tmp_path), state)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"bytes", lambda: 0, np.int64(3)])
def test_what_json_cannot_hold_is_named(value: object) -> None:
    with pytest.raises(CheckpointError, match=f"state/w holds a {type(value).__name__}"):
        pack({"w": value}, "state", {})


# ---- files


def plain(**tensors: torch.Tensor) -> Checkpoint:
    return Checkpoint(dict(tensors), {**FACTS, "optimizer": {}})


def test_a_file_holds_tensors_and_facts(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "down" / "file.safetensors"
    plain(a=torch.arange(3.0)).write(path)
    read = Checkpoint.read(path)
    assert read.facts == {**FACTS, "optimizer": {}}
    assert read.tensors["a"].tolist() == [0, 1, 2]
    assert os.listdir(path.parent) == ["file.safetensors"], "no draft is left"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"no checkpoint at {tmp_path / 'nothing'}"):
        Checkpoint.read(tmp_path / "nothing")


def damaged(path: Path, kind: str) -> None:
    plain(a=torch.arange(100.0)).write(path)
    whole = path.read_bytes()
    content = {
        "empty": b"",
        "text": b"this is no checkpoint at all, just some text",
        "cut in the header": whole[:20],
        "cut in the tensors": whole[:-5],
        "longer": whole + b"\0",
        "header of nonsense": whole[:8] + b"\xff" * 20 + whole[28:],
        "one bit flipped": whole[:-1] + bytes([whole[-1] ^ 1]),
        "header too long": b"\xff" * 7 + b"\x7f" + whole[8:],
    }[kind]
    path.write_bytes(content)


@pytest.mark.parametrize(
    "kind",
    [
        "empty",
        "text",
        "cut in the header",
        "cut in the tensors",
        "longer",
        "header of nonsense",
        "one bit flipped",
        "header too long",
    ],
)
def test_a_damaged_file_is_named(kind: str, tmp_path: Path) -> None:
    damaged(tmp_path / "file", kind)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'file'} is damaged or no checkpoint"):
        Checkpoint.read(tmp_path / "file")


class Executed:
    """What runs if somebody unpickles it."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("a checkpoint was unpickled",)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_of_torch_is_named_as_such(tmp_path: Path, zipped: bool, protocol: int) -> None:
    path = tmp_path / "weights.pt"
    torch.save(
        {"weight": torch.ones(2), "more": Executed()},
        path,
        pickle_protocol=protocol,
        _use_new_zipfile_serialization=zipped,
    )
    model = nn.Linear(2, 1)
    with slipstream.init() as job:
        job.distribute(model, torch.optim.SGD(model.parameters()))
        with pytest.raises(CheckpointError) as refused:
            job.load(path)
    assert str(refused.value) == (
        f"{path} is a file of torch.save, and job.load reads files of job.save: load it with "
        "torch.load and model.load_state_dict, before job.distribute"
    )


def test_another_zip_is_no_file_of_torch(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "file", "w") as file:
        file.writestr("weights", b"")
    with pytest.raises(CheckpointError, match="is damaged or no checkpoint"):
        Checkpoint.read(tmp_path / "file")


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"cannot read {tmp_path}: it is a directory"):
        Checkpoint.read(tmp_path)


@pytest.mark.parametrize("metadata", [None, {"made": "elsewhere"}])
def test_anothers_safetensors_file_is_told_from_ours(
    metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "file", metadata)
    with pytest.raises(CheckpointError, match="not a slipstream checkpoint"):
        Checkpoint.read(tmp_path / "file")


@pytest.mark.parametrize("facts", ["not json", "[]", "3", "null", '"text"'])
def test_facts_that_are_none_are_refused(facts: str, tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "file", {"slipstream": facts})
    with pytest.raises(CheckpointError, match=str(tmp_path / "file")):
        Checkpoint.read(tmp_path / "file")


def test_another_format_is_named(tmp_path: Path) -> None:
    Checkpoint({}, {"format": 99}).write(tmp_path / "file")
    with pytest.raises(CheckpointError, match=f"has format 99, this slipstream reads {FORMAT}"):
        Checkpoint.read(tmp_path / "file")


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_whole_and_no_draft(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    plain(a=torch.ones(2)).write(path)
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(whole_files.os, moment, full)
    with pytest.raises(CheckpointError, match=f"cannot write {path}: No space left on device"):
        plain(a=torch.zeros(2)).write(path)
    monkeypatch.undo()
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["file"]


def test_the_new_file_appears_only_when_it_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    plain(a=torch.ones(2)).write(path)
    before = path.read_bytes()
    seen: list[bytes] = []
    replace = os.replace

    def watched(source: Path, target: Path) -> None:
        seen.append(path.read_bytes())
        assert Checkpoint.read(Path(source)).tensors["a"].tolist() == [0, 0]
        replace(source, target)

    monkeypatch.setattr(whole_files.os, "replace", watched)
    plain(a=torch.zeros(2)).write(path)
    assert seen == [before]
    assert Checkpoint.read(path).tensors["a"].tolist() == [0, 0]


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "below", tmp_path / "folder"):
        with pytest.raises(CheckpointError, match=f"cannot write {path}: "):
            plain().write(path)
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


# ---- models


def test_a_model_comes_back_whole(tmp_path: Path) -> None:
    def model() -> nn.Module:
        net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
        net[2].weight = net[0].weight
        net[0].bias.requires_grad_(False)
        net.register_buffer("turned", torch.arange(6.0).reshape(2, 3).t())
        for kind in (torch.complex64, torch.complex128):
            wave = nn.Parameter(torch.randn(3, 2, dtype=kind).t())
            net.register_parameter(str(kind).removeprefix("torch."), wave)
        return net

    saved, loaded = model(), model()
    saved[1].num_batches_tracked.fill_(7)
    plain(**model_tensors(saved)).write(tmp_path / "file")
    read = Checkpoint.read(tmp_path / "file")
    check_model(loaded, read.tensors)
    load_model(loaded, read)
    for (name, a), (_, b) in zip(
        saved.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    assert loaded[2].weight is loaded[0].weight


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (nn.Linear(3, 2, bias=False), "only the model has 'bias'"),
        (nn.Bilinear(3, 3, 2), r"'weight' is \(2, 3, 3\).* there, \(2, 3\)"),
        (nn.Linear(3, 2).double(), r"torch.float64 there, .* torch.float32 in"),
        (nn.Sequential(nn.Linear(3, 2)), "only the checkpoint has '0.bias'"),
    ],
)
def test_another_model_is_told_by_its_first_difference(there: nn.Module, message: str) -> None:
    tensors = {**model_tensors(there), "optimizer/x": torch.zeros(1)}
    with pytest.raises(ValueError, match=message):
        check_model(nn.Linear(3, 2), tensors)


def test_random_numbers_go_on_where_they_were() -> None:
    def draw() -> tuple[float, float, float]:
        return random.gauss(0, 1), float(torch.randn(1)), float(np.random.normal())  # noqa: NPY002

    state = json.loads(json.dumps(random_state()))
    first = [draw() for _ in range(3)]
    Generators.of(state).restore()
    assert [draw() for _ in range(3)] == first


def checkpoint_of(**tensors: torch.Tensor) -> Checkpoint:
    optimizer = {"kind": "SGD", "state": {}, "groups": [{}]}
    facts = {"step": 0, "strategy": "push_pull", "workers": 1, "random": [], "optimizer": optimizer}
    named = {f"model/{name}": tensor for name, tensor in tensors.items()}
    return Checkpoint(named, {"format": FORMAT, **facts})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "complex64", "complex128"])
def test_a_finite_checkpoint_is_not_replaced_by_another(tmp_path: Path, dtype: str) -> None:
    weights = torch.ones(3, dtype=getattr(torch, dtype))
    mask = torch.full((2,), -torch.inf)  # meant so
    checkpoint_of(w=weights, mask=mask).write(tmp_path / "file")
    checkpoint_of(w=2 * weights, mask=mask).write(tmp_path / "file")
    weights[1] = torch.nan
    broken = checkpoint_of(w=weights, mask=mask)
    with pytest.raises(
        CheckpointError, match="w is not finite, and it is in the one that is there"
    ):
        broken.write(tmp_path / "file")
    assert Checkpoint.read(tmp_path / "file").tensors["model/w"].real.tolist() == [2, 2, 2]
    broken.write(tmp_path / "other")
    broken.write(tmp_path / "other")
    (tmp_path / "file").write_text("damaged")
    broken.write(tmp_path / "file")
    assert not Checkpoint.read(tmp_path / "file").tensors["model/w"].isfinite().all()


def test_a_buffer_may_become_infinite(tmp_path: Path) -> None:
    """As an observer's least value does when it begins anew."""
    checkpoint_of(least=torch.ones(1)).write(tmp_path / "file")
    anew = checkpoint_of(least=torch.full((1,), torch.inf))
    anew.buffers = {"model/least"}
    anew.write(tmp_path / "file")
    assert Checkpoint.read(tmp_path / "file").tensors["model/least"].isinf().all()


def test_an_empty_tensor_of_an_impossible_shape_is_refused(tmp_path: Path) -> None:
    checkpoint_of(w=torch.empty(1, 1, 0)).write(tmp_path / "file")
    good = (tmp_path / "file").read_bytes()
    begin = 8 + int.from_bytes(good[:8], "little")
    header = json.loads(good[8:begin])
    header["model/w"]["shape"] = shape = [10**14, 10**14, 0]
    pieces = {"model/w": Piece("float32", tuple(shape), b"")}
    about = header["__metadata__"]
    about["crc"] = str(checkpoint_format.crc(about["slipstream"], pieces))
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(len(text).to_bytes(8, "little") + text)
    with pytest.raises(CheckpointError, match="impossible shape"):
        Checkpoint.read(tmp_path / "file")
