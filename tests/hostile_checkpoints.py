"""Checkpoints that are damaged or made to do harm, from a good one; all but their faults is right.

``FILES`` has one for each fault. Most are written anew with a checksum that matches, so nothing but
what they say can tell.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from slipstream.runtime.files.checkpoint_format import unpack
from slipstream.torch.checkpoints.checkpoint import Checkpoint, crc, pack

Make = Callable[[Path, Path], None]  # from a good file, at a path


# ---- ways to make one


def content(change: Callable[[bytes], bytes]) -> Make:
    """Other bytes."""

    def make(good: Path, path: Path) -> None:
        path.write_bytes(change(good.read_bytes()))

    return make


def changed(change: Callable[[dict[str, Any], dict[str, torch.Tensor]], object]) -> Make:
    """Other facts or tensors."""

    def make(good: Path, path: Path) -> None:
        checkpoint = Checkpoint.read(good)
        change(checkpoint.facts, checkpoint.tensors)
        write(path, checkpoint.facts, checkpoint.tensors)

    return make


def fact(key: str, value: Any) -> Make:
    return changed(lambda facts, _: facts.update({key: value}))


def without(key: str) -> Make:
    return changed(lambda facts, _: facts.pop(key))


def optimizer(change: Callable[[dict[str, Any]], object]) -> Make:
    """Another state of the optimizer, packed as it should be."""

    def make(good: Path, path: Path) -> None:
        checkpoint = Checkpoint.read(good)
        saved = unpack(checkpoint.facts["optimizer"], checkpoint.tensors)
        change(saved)
        checkpoint.facts["optimizer"] = pack(saved, "optimizer", checkpoint.tensors)
        write(path, checkpoint.facts, checkpoint.tensors)

    return make


def setting(key: str, value: Any) -> Make:
    return optimizer(lambda saved: saved["groups"][0].update({key: value}))


def first_state(saved: dict[str, Any]) -> dict[str, Any]:
    return saved["state"][min(saved["state"])]


def entry(change: Callable[[torch.Tensor], Any], key: str = "") -> Make:
    """Another value of what the optimizer keeps of one parameter."""

    def replace(saved: dict[str, Any]) -> None:
        state = first_state(saved)
        name = key or next(k for k, v in state.items() if v.dim() > 0)
        state[name] = change(state[name])

    return optimizer(replace)


def generator(change: Callable[[dict[str, Any]], object]) -> Make:
    return changed(lambda facts, _: change(facts["random"][0]))


def weight(change: Callable[[dict[str, torch.Tensor], str], object]) -> Make:
    """Other tensors of the model."""
    return changed(
        lambda _, tensors: change(tensors, min(n for n in tensors if n.startswith("model/")))
    )


def text(facts: str) -> Make:
    """Facts that are no facts."""

    def make(good: Path, path: Path) -> None:
        write_text(path, facts, Checkpoint.read(good).tensors)

    return make


def write(path: Path, facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    write_text(path, json.dumps(facts), tensors)


def write_text(
    path: Path, facts: str, tensors: dict[str, torch.Tensor], pairs: str | None = None
) -> None:
    twofold = [name for name, t in tensors.items() if t.dtype == torch.complex128]
    plain = {
        name: (torch.view_as_real(t) if name in twofold else t).clone()
        for name, t in tensors.items()
    }
    about = {"slipstream": facts, "pairs": pairs or json.dumps(twofold)}
    save_file(plain, path, {**about, "crc": str(crc(facts, plain))})


def pairs(value: str) -> Make:
    def make(good: Path, path: Path) -> None:
        checkpoint = Checkpoint.read(good)
        write_text(path, json.dumps(checkpoint.facts), checkpoint.tensors, value)

    return make


def header(change: Callable[[dict[str, Any]], object]) -> Make:
    """Another header before the same tensors."""

    def rewritten(whole: bytes) -> bytes:
        end = 8 + int.from_bytes(whole[:8], "little")
        told = json.loads(whole[8:end])
        change(told)
        made = json.dumps(told).encode()
        return len(made).to_bytes(8, "little") + made + whole[end:]

    return content(rewritten)


def of_header(key: str, value: Any) -> Make:
    """Something else in what the header says of one tensor."""

    def replace(told: dict[str, Any]) -> None:
        name = min(n for n in told if n.startswith("model/"))
        told[name][key] = value

    return header(replace)


def instead(make: Callable[[Path], object]) -> Make:
    """No file at all."""
    return lambda _, path: make(path) and None


def deep(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


def nested(levels: int) -> Any:
    value: Any = {"$list": []}
    for _ in range(levels):
        value = {"$list": [value]}
    return value


def drop_a_word(state: dict[str, Any]) -> None:
    state["python"][1].pop()


def drop_momentum(state: dict[str, Any]) -> None:
    for key in [key for key, value in state.items() if value.dim()]:
        del state[key]
    state["more"] = None


def refer_twice(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """Two parameters would share their momentum."""
    said = json.dumps(facts["optimizer"])
    names = sorted(n for n in tensors if n.startswith("optimizer/") and tensors[n].dim() > 0)
    facts["optimizer"] = json.loads(said.replace(json.dumps(names[1]), json.dumps(names[0])))
    del tensors[names[1]]


NAN, INFINITE = float("nan"), float("inf")
WRONG: list[Any] = [None, -5, 2.5, "4", [], {}, True, 10**40]

FILES: dict[str, Make] = {
    # ---- bytes
    "empty": content(lambda _: b""),
    "seven bytes": content(lambda whole: whole[:7]),
    "only the length": content(lambda whole: whole[:8]),
    "cut in the header": content(lambda whole: whole[:100]),
    "cut after the header": content(
        lambda whole: whole[: 8 + int.from_bytes(whole[:8], "little")]
    ),
    "cut in the tensors": content(lambda whole: whole[:-3]),
    "longer": content(lambda whole: whole + b"\0" * 8),
    "a bit flipped": content(lambda whole: whole[:-1] + bytes([whole[-1] ^ 1])),
    "header of no bytes": content(lambda whole: bytes(8) + whole[8:]),
    "header beyond the file": content(
        lambda whole: (len(whole)).to_bytes(8, "little") + whole[8:]
    ),
    "header of 2**63 bytes": content(lambda whole: (2**63).to_bytes(8, "little") + whole[8:]),
    "header of 2**64 - 1 bytes": content(lambda whole: b"\xff" * 8 + whole[8:]),
    "header no JSON": content(lambda whole: whole[:8] + b"}" + whole[9:]),
    "header no UTF-8": content(lambda whole: whole[:10] + b"\xff" + whole[11:]),
    "header a list": content(lambda _: (2).to_bytes(8, "little") + b"[]"),
    "header deep": content(
        lambda _: (200_000).to_bytes(8, "little") + deep(100_000).encode()
    ),
    "of torch.save": lambda _, path: torch.save({"weight": torch.ones(2)}, path),
    "no metadata": header(lambda told: told.pop("__metadata__")),
    "metadata a number": header(lambda told: told.update(__metadata__=3)),
    "metadata of numbers": header(lambda told: told["__metadata__"].update(slipstream=3)),
    "no checksum": header(lambda told: told["__metadata__"].pop("crc")),
    "wrong checksum": header(lambda told: told["__metadata__"].update(crc="1")),
    # ---- what the header says of tensors
    "entry a number": header(lambda told: told.update({min(told): 3})),
    "dtype unknown": of_header("dtype", "F31"),
    "dtype a number": of_header("dtype", 32),
    "dtype another": of_header("dtype", "I32"),
    "shape negative": of_header("shape", [-1]),
    "shape huge": of_header("shape", [2**62, 2**62]),
    "shape a text": of_header("shape", "six"),
    "shape of floats": of_header("shape", [6.0]),
    "places backwards": of_header("data_offsets", [24, 0]),
    "places negative": of_header("data_offsets", [-24, 0]),
    "places of another": of_header("data_offsets", [100, 124]),
    "places three": of_header("data_offsets", [0, 24, 24]),
    "pairs no list": pairs("3"),
    "pairs unknown": pairs('["nothing"]'),
    "pairs of singles": pairs('["model/0.bias"]'),
    # ---- facts
    "facts no JSON": text("{"),
    "facts a list": text("[]"),
    "facts null": text("null"),
    "facts deep": text('{"format": 1, "optimizer": ' + deep(100_000) + "}"),
    "facts deep objects": text(deep(50_000, '{"a":', "") + "1" + "}" * 50_000),
    "format of tomorrow": fact("format", 2),
    **{f"no {key}": without(key) for key in ("format", "step", "optimizer", "random", "workers")},
    **{f"step {value!r:.20}": fact("step", value) for value in WRONG},
    "step huge": fact("step", 10**15),
    "step NaN": fact("step", NAN),
    **{f"random {value!r:.20}": fact("random", value) for value in WRONG if value not in ([],)},
    **{f"workers {value!r:.20}": fact("workers", value) for value in [*WRONG, 0]},
    **{f"strategy {value!r:.20}": fact("strategy", value) for value in WRONG if value != "4"},
    **{f"optimizer {value!r:.20}": fact("optimizer", value) for value in WRONG},
    **{f"optimizer $dict {v!r:.20}": fact("optimizer", {"$dict": v}) for v in WRONG},
    "optimizer $dict of three": fact("optimizer", {"$dict": [["a", 1, 2]]}),
    "optimizer $dict by lists": fact("optimizer", {"$dict": [[[], 1]]}),
    "optimizer unknown kind": fact("optimizer", {"$set": []}),
    "optimizer a list": fact("optimizer", {"$list": []}),
    "optimizer deep": fact("optimizer", nested(90)),
    "optimizer refers to nothing": fact("optimizer", {"$dict": [["kind", {"$tensor": "no"}]]}),
    "optimizer refers to a number": fact("optimizer", {"$tensor": 3}),
    "optimizer refers to the model": fact("optimizer", {"$tensor": "model/0.bias"}),
    "optimizer refers twice": changed(refer_twice),
    "text without a meaning": fact("strategy", "\ud800"),
    # ---- the model
    "a weight missing": weight(lambda tensors, name: tensors.pop(name)),
    "a weight more": weight(lambda tensors, _: tensors.update({"model/more": torch.ones(1)})),
    "a weight flat": weight(lambda tensors, name: tensors.update({name: torch.ones(7)})),
    "a weight of doubles": weight(
        lambda tensors, name: tensors.update({name: tensors[name].double()})
    ),
    "an unknown tensor": weight(lambda tensors, _: tensors.update({"stray": torch.ones(1)})),
    "state of nobody": weight(
        lambda tensors, _: tensors.update({"optimizer/state/more/x": torch.ones(1)})
    ),
    "an average of nothing": weight(
        lambda tensors, _: tensors.update({"averaged/more": torch.ones(1)})
    ),
    "an average misshapen": weight(
        lambda tensors, _: tensors.update({"averaged/0.weight": torch.ones(1)})
    ),
    "a residual of nobody": weight(
        lambda tensors, _: tensors.update({"residual/x/0.weight": torch.ones(24)})
    ),
    "a residual of nothing": weight(
        lambda tensors, _: tensors.update({"residual/0/more": torch.ones(24)})
    ),
    "a residual misshapen": weight(
        lambda tensors, _: tensors.update({"residual/0/0.weight": torch.ones(1)})
    ),
    # ---- the optimizer
    "another optimizer": optimizer(lambda saved: saved.update(kind="LBFGS")),
    "kind a number": optimizer(lambda saved: saved.update(kind=3)),
    "kind missing": optimizer(lambda saved: saved.pop("kind")),
    "state missing": optimizer(lambda saved: saved.pop("state")),
    "state a list": optimizer(lambda saved: saved.update(state=[])),
    "state of numbers": optimizer(lambda saved: saved.update(state={"0.weight": 3})),
    "state by number": optimizer(lambda saved: saved["state"].update({1: {}})),
    "state of what is not there": optimizer(lambda saved: saved["state"].update(more={})),
    "groups missing": optimizer(lambda saved: saved.pop("groups")),
    "a group less": optimizer(lambda saved: saved["groups"].pop()),
    "a group more": optimizer(lambda saved: saved["groups"].append({})),
    "a group of numbers": optimizer(lambda saved: saved.update(groups=[1, 2])),
    "parameters in a group": setting("params", []),
    "a setting by number": optimizer(lambda saved: saved["groups"][0].update({1: 2})),
    **{f"lr {value!r}": setting("lr", value) for value in (NAN, INFINITE, -0.1, None, "0.1", [])},
    "lr a flag": setting("lr", True),
    "lr two numbers": setting("lr", torch.ones(2)),
    "lr a tensor of NaN": setting("lr", torch.tensor(NAN)),
    "decay NaN": setting("weight_decay", NAN),
    "decay negative": setting("weight_decay", -1.0),
    "decay a text": setting("weight_decay", "much"),
    "a switch that is a number": setting("maximize", 3),
    "an unset switch that is a number": setting("foreach", 0.5),
    # ---- its state by parameter
    "momentum flat": entry(lambda t: t.reshape(-1)[:1]),
    "momentum transposed": entry(lambda t: t.reshape(-1, 1).repeat(1, 2)),
    "momentum larger": entry(lambda t: torch.cat([t, t])),
    "momentum of whole numbers": entry(lambda t: t.to(torch.int64)),
    "momentum of doubles": entry(lambda t: t.double()),
    "momentum a number": entry(lambda t: 0.5),
    "momentum a text": entry(lambda t: "much"),
    "momentum a list": entry(lambda t: t.tolist()),
    "momentum under another name": optimizer(
        lambda saved: first_state(saved).update(more=torch.ones(1))
    ),
    "momentum missing": optimizer(lambda saved: drop_momentum(first_state(saved))),
    # ---- random generators
    "generator of torch short": generator(lambda state: state.update(torch="AAAA")),
    "generator of torch no base64": generator(lambda state: state.update(torch="*")),
    "generator of torch a number": generator(lambda state: state.update(torch=3)),
    "generator of Python short": generator(drop_a_word),
    "generator of Python missing": generator(lambda state: state.pop("python")),
    "generator of Python out of place": generator(
        lambda state: state["python"][1].__setitem__(-1, 700)
    ),
    "generator of Python NaN": generator(lambda state: state["python"].__setitem__(2, NAN)),
    "generator of numpy short": generator(lambda state: state["numpy"][1].pop()),
    "generator of numpy large": generator(lambda state: state["numpy"][1].__setitem__(0, 2**40)),
    "generator of numpy out of place": generator(lambda state: state["numpy"].__setitem__(2, 700)),
    "generator of numpy before place": generator(lambda state: state["numpy"].__setitem__(2, -1)),
    "generator of numpy another": generator(lambda state: state["numpy"].__setitem__(0, "PCG64")),
    # ---- no file
    "missing": instead(lambda path: None),
    "a pipe": instead(os.mkfifo),
    "a directory": instead(os.mkdir),
    "a device": instead(lambda path: path.symlink_to("/dev/zero")),
    "a symlink to nothing": instead(lambda path: path.symlink_to("nothing")),
    "a symlink to itself": instead(lambda path: path.symlink_to(path.name)),
}  # fmt: skip

# Only for optimizers that count steps.
COUNTED: dict[str, Make] = {
    f"counter {name}": entry(lambda _, value=value: value, "step")  # type: ignore[misc]
    for name, value in {
        "negative": torch.tensor(-5.0),
        "NaN": torch.tensor(NAN),
        "infinite": torch.tensor(INFINITE),
        "two": torch.ones(2),
        "a text": "5",
    }.items()
}
COUNTED["counter missing"] = optimizer(lambda saved: first_state(saved).pop("step"))
COUNTED["betas above 1"] = setting("betas", (1.5, 0.9))
COUNTED["betas of texts"] = setting("betas", ("a", "b"))
COUNTED["betas of one"] = setting("betas", (0.9,))
COUNTED["eps negative"] = setting("eps", -1.0)
