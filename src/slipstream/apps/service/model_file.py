"""``model.safetensors``: a whole classifier in one file, without pickle.

A safetensors file: 8 bytes with the header's length, the header in JSON, the tensors. Its
metadata has ``slipstream.text`` (labels, temperatures, settings) and ``slipstream.sha256``, over
that text and all tensors with their names, types and shapes. A damaged file is never used.

Words and features are tensors of hashes, not a part of the JSON: safetensors limits headers to
100 MB, and 10⁶ features as JSON take seconds to read.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from safetensors.numpy import save

from slipstream.apps.service.errors import Damaged
from slipstream.apps.service.features import FIRST_WORD
from slipstream.apps.service.settings import TextSetting
from slipstream.apps.service.temperatures import Temperature, Temperatures
from slipstream.apps.service.words import TOKENIZER
from slipstream.runtime.files.whole_files import open_regular, write_whole

FORMAT = 1
MOST_NBYTES = 4 << 30
DTYPES: dict[str, npt.DTypeLike] = {"F32": np.float32, "U64": np.uint64}
# What a header that is not ours makes of the code that reads it.
NO_MODEL = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError)
TEXT, SHA256 = "slipstream.text", "slipstream.sha256"

Array = npt.NDArray[Any]


class ModelHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a model file says beside its tensors; temperatures of the deep and the wide part."""

    labels: Annotated[list[str], msgspec.Meta(min_length=1)]
    temperatures: tuple[Temperature, Temperature]
    mean_temperature: Temperature = 1.0
    setting: TextSetting
    format: int = FORMAT
    tokenizer: str = TOKENIZER

    @property
    def all_temperatures(self) -> Temperatures:
        """Those of both parts and of their mean."""
        return Temperatures(*self.temperatures, self.mean_temperature)


def write_model(path: Path, head: ModelHead, tensors: Mapping[str, Array]) -> None:
    """Write a model file: it appears complete, or not at all."""
    own = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    text = msgspec.json.encode(head).decode()
    write_whole(path, [save(own, {TEXT: text, SHA256: _digest(text, own)})])


def read_model(path: Path) -> tuple[ModelHead, dict[str, Array]]:
    """The head and the tensors of a model file; raises Damaged if it cannot be used."""
    try:
        with open_regular(path) as file:
            if os.fstat(file.fileno()).st_size > MOST_NBYTES:
                raise Damaged(f"the model file has more than {MOST_NBYTES:,} bytes")
            return _parse(file.read())
    except OSError as error:
        raise Damaged(f"the model file cannot be read: {error.strerror}") from error
    except Damaged:
        raise
    except (msgspec.MsgspecError, *NO_MODEL) as error:
        raise Damaged("the model file is damaged, or is no model file") from error


def _parse(data: bytes) -> tuple[ModelHead, dict[str, Array]]:
    start = 8 + int.from_bytes(data[:8], "little")
    header = msgspec.json.decode(data[8:start], type=dict[str, dict[str, Any]])
    metadata = header.pop("__metadata__")
    text = metadata[TEXT]
    found = msgspec.json.decode(text, type=dict[str, Any])
    if found.get("format") != FORMAT:
        raise Damaged(
            f"the model file has format {found.get('format')}; "
            f"this version of slipstream reads {FORMAT}"
        )
    head = msgspec.json.decode(text, type=ModelHead)
    if "feature_words" not in found["setting"]:  # of before the parts had different numbers
        setting = replace(head.setting, feature_words=head.setting.text_words)
        head = replace(head, setting=setting)
    body = np.frombuffer(memoryview(data)[start:], np.uint8)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensors[name] = body[begin:end].view(DTYPES[entry["dtype"]]).reshape(entry["shape"])
    if metadata[SHA256] != _digest(text, tensors):
        raise Damaged("the model file is damaged: its checksum is not that of its content")
    if head.tokenizer != TOKENIZER or not _fit(head, tensors):
        raise Damaged("the model file's tensors do not fit its settings")
    return head, tensors


def _fit(head: ModelHead, tensors: Mapping[str, Array]) -> bool:
    """Whether names, types and shapes are those of such a model."""
    words, features = len(tensors["words"]), len(tensors["features"])
    setting, classes = head.setting, len(head.labels)
    shapes: dict[str, tuple[int, ...]] = {
        "words": (words,),
        "features": (features,),
        "idf": (features,),
        "shares": (classes,),
        "embedding": (words + FIRST_WORD, setting.dimensions),
        "classifier": (setting.maps * len(setting.windows), classes),
        "classifier.bias": (classes,),
        "wide": (features + 1, classes),
    }
    for window in setting.windows:
        shapes[f"window{window}"] = (window * setting.dimensions, setting.maps)
        shapes[f"window{window}.bias"] = (setting.maps,)
    hashes = {name for name, tensor in tensors.items() if tensor.dtype == np.uint64}
    return hashes == {"words", "features"} and shapes == {
        name: tensor.shape for name, tensor in tensors.items()
    }


def _digest(text: str, tensors: Mapping[str, Array]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, array in sorted(tensors.items()):
        digest.update(f"\n{name} {array.dtype} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8))
    return digest.hexdigest()
