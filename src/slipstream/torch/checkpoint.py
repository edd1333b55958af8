"""Checkpoints: one safetensors file with tensors by name and everything else as JSON beside them.

Written whole or not at all, and independent of how many workers and servers wrote it.
"""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save
from torch import nn

from slipstream.errors import CheckpointError
from slipstream.runtime import shared_checkpoint
from slipstream.runtime.whole_files import write_whole
from slipstream.torch.inventory import whole_state

FORMAT = shared_checkpoint.FORMAT


@dataclass(slots=True)
class Checkpoint:
    """What a file holds: named tensors, and JSON that may refer to them."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Whole or not at all."""
        pairs = [name for name, t in self.tensors.items() if t.dtype == torch.complex128]
        plain = {**self.tensors, **{n: torch.view_as_real(self.tensors[n]) for n in pairs}}
        shared_checkpoint.refuse_to_lose(path, pieces_of(plain), lambda: pieces_at(path))
        facts = json.dumps(self.facts)
        about = {"slipstream": facts, "pairs": json.dumps(pairs), "crc": str(crc(facts, plain))}
        write_whole(path, [save(plain, about)])

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = file.metadata() or {}
                facts = json.loads(about["slipstream"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                if about["crc"] != str(crc(about["slipstream"], tensors)):
                    raise ValueError("its content does not match its checksum")
                for name in json.loads(about.get("pairs", "[]")):
                    tensors[name] = torch.view_as_complex(tensors[name])
        except FileNotFoundError:
            raise CheckpointError(f"no checkpoint at {path}") from None
        except KeyError:
            raise CheckpointError(
                f"{path} is a safetensors file but not a slipstream checkpoint"
            ) from None
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} is damaged or no checkpoint: {error}") from error
        written = facts.get("format") if isinstance(facts, dict) else None
        if written != FORMAT:
            raise CheckpointError(f"{path} has format {written}, this slipstream reads {FORMAT}")
        return cls(tensors, facts)


def crc(facts: str, tensors: Mapping[str, torch.Tensor]) -> int:
    """As servers without torch reckon it."""
    return shared_checkpoint.crc(facts, pieces_of(tensors))


def pieces_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, shared_checkpoint.Piece]:
    return {name: piece_of(tensor) for name, tensor in tensors.items()}


def pieces_at(path: Path) -> dict[str, shared_checkpoint.Piece]:
    """None where nothing can be read that could be lost."""
    try:
        return pieces_of(Checkpoint.read(path).tensors)
    except CheckpointError:
        return {}


def piece_of(tensor: torch.Tensor) -> shared_checkpoint.Piece:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return shared_checkpoint.Piece(dtype, tuple(tensor.shape), memoryview(flat))


def pack(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Plain data as JSON; tensors go aside under a name and leave a reference."""
    if isinstance(value, torch.Tensor):
        while name in tensors:  # {"a/b": …} beside {"a": {"b": …}}
            name += "'"
        tensors[name] = value.detach().cpu().contiguous().clone()
        return {"$tensor": name}
    if isinstance(value, Mapping):
        return {"$dict": [[key, pack(v, f"{name}/{key}", tensors)] for key, v in value.items()]}
    if isinstance(value, tuple | list):
        kind = "$tuple" if isinstance(value, tuple) else "$list"
        return {kind: [pack(v, f"{name}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"optimizer state {name} holds a {type(value).__name__}, which a checkpoint cannot keep"
    )


def unpack(value: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$dict" in value:
        return {key: unpack(v, tensors) for key, v in value["$dict"]}
    if "$tuple" in value:
        return tuple(unpack(v, tensors) for v in value["$tuple"])
    return [unpack(v, tensors) for v in value["$list"]]


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        f"model/{name}": tensor.cpu().contiguous().clone() for name, tensor in whole_state(model)
    }


def check_fits(model: nn.Module, checkpoint: Checkpoint, path: Path) -> None:
    """The checkpoint must hold exactly this model's tensors."""
    here = {f"model/{name}": tensor for name, tensor in whole_state(model)}
    there = {name: t for name, t in checkpoint.tensors.items() if name.startswith("model/")}
    for name in sorted(here.keys() ^ there.keys()):
        side = "the checkpoint" if name in there else "the model"
        raise CheckpointError(f"{path}: only {side} has {name.removeprefix('model/')!r}")
    for name, tensor in here.items():
        if tensor.shape != there[name].shape or tensor.dtype != there[name].dtype:
            raise CheckpointError(
                f"{path}: {name.removeprefix('model/')!r} is {tuple(there[name].shape)} "
                f"{there[name].dtype} there, {tuple(tensor.shape)} {tensor.dtype} in the model"
            )


def load_model(model: nn.Module, checkpoint: Checkpoint) -> None:
    with torch.no_grad():
        for name, tensor in whole_state(model):
            tensor.copy_(checkpoint.tensors[f"model/{name}"])


def random_state() -> dict[str, Any]:
    """The state of torch's, Python's and numpy's generators, as JSON."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "torch": base64.b64encode(torch.get_rng_state().numpy().tobytes()).decode(),
        "cuda": [
            base64.b64encode(state.numpy().tobytes()).decode()
            for state in (torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [])
        ],
        "python": [version, list(numbers), gauss],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gauss, cached],
    }


def restore_random_state(state: Mapping[str, Any]) -> None:
    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

    torch.set_rng_state(tensor(state["torch"]))
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([tensor(text) for text in state["cuda"]])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), position, has_gauss, cached))  # noqa: NPY002
