"""JSON of a strategy that has parts of the user's own: ``"part": "module:Class"`` names these."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, TypeVar, get_args, get_origin

import msgspec

from slipstream.codecs import AnyCodec, Codec, LayerCodec, SegmentCodec
from slipstream.consistency import AnyAdmission
from slipstream.consistency.admission import Admission
from slipstream.errors import ConfigError
from slipstream.outer_optimizers import OuterOptimizer
from slipstream.part_modules import import_path, is_import_path, is_own, own_part
from slipstream.parts import Part
from slipstream.printable import shown
from slipstream.schedules import AnySchedule, Schedule
from slipstream.topologies import AnyTopology, Topology
from slipstream.updates import AnyOuter

TAG = "part"
MOST_LEVELS = 32  # of fields within fields
S = TypeVar("S", bound=msgspec.Struct)

# What a part of the user's own must be, by what the field takes. Other fields take none.
INTERFACES: dict[Any, tuple[type, ...]] = {
    AnyCodec: (Codec, LayerCodec),
    SegmentCodec: (Codec,),
    AnyTopology: (Topology,),
    AnyAdmission: (Admission,),
    AnyOuter: (OuterOptimizer,),
    AnySchedule: (Schedule,),
}


def to_plain(value: Any) -> Any:
    """Return a value as JSON has it: structs as dicts, with the names of their parts."""
    if isinstance(value, tuple):
        return [to_plain(each) for each in value]
    if not isinstance(value, msgspec.Struct):
        return value
    config = value.__struct_config__
    named = {} if config.tag_field is None else {config.tag_field: config.tag}
    if isinstance(value, Part) and is_own(type(value)):
        named = {TAG: import_path(type(value))}
    fields = msgspec.structs.fields(value)
    return named | {field.encode_name: to_plain(getattr(value, field.name)) for field in fields}


def parts_in(value: Any) -> Iterator[Part]:
    """Every part within a value, from the outside to the inside."""
    if isinstance(value, Part):
        yield value
    if isinstance(value, msgspec.Struct):
        value = tuple(getattr(value, name) for name in value.__struct_fields__)
    for each in value if isinstance(value, tuple) else ():
        yield from parts_in(each)


def from_json(text: str | bytes, kind: type[S], modules: Collection[str]) -> S:
    """Read a struct in which parts of the user's own may stand.

    Args:
        text: JSON.
        kind: Of the struct.
        modules: The names of modules that may be imported for these parts.

    Raises:
        ConfigError: A part of the user's own cannot be had, or does not belong where it stands.
        msgspec.MsgspecError: Anything else does not fit.
    """
    plain = msgspec.json.decode(text)
    if not isinstance(plain, dict) or not has_own(plain):
        return msgspec.json.decode(text, type=kind)
    return PartReader(modules).struct(plain, kind, "")


def has_own(plain: Any) -> bool:
    """Whether a part of the user's own is named anywhere within."""
    pending = [plain]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, dict):
            if is_import_path(value.get(TAG)):
                return True
            pending += value.values()
    return False


class PartReader:
    """Reads values by the annotations of the fields that take them.

    msgspec itself reads all values without parts of the user's own: its unions of structs are
    closed. ``place`` names the field in errors.

    Args:
        modules: The names of modules that may be imported.
    """

    def __init__(self, modules: Collection[str]) -> None:
        self._modules = modules

    def struct(self, plain: dict[str, Any], kind: type[S], place: str) -> S:
        """Return a struct from its fields.

        Raises:
            ConfigError: A field is unknown or missing, or the struct refuses its values.
        """
        if place.count(".") >= MOST_LEVELS:
            raise ConfigError(f"{place}: parts within parts, deeper than {MOST_LEVELS} levels")
        name = f"{place} ({kind.__name__})" if place else kind.__name__
        tag = TAG if issubclass(kind, Part) else None
        try:
            fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        except Exception as error:  # any: annotations are the user's
            raise ConfigError(f"{name}: its annotations cannot be read: {error}") from error
        given = {key: value for key, value in plain.items() if key != tag}
        if unknown := given.keys() - fields.keys():
            raise ConfigError(f"{name} has no field {shown(min(unknown))}")
        for key, field in fields.items():
            if field.required and key not in given:
                raise ConfigError(f"{name} lacks its field {key!r}")
        below = f"{place}." if place else ""
        values = {
            fields[key].name: self._value(value, fields[key].type, f"{below}{key}")
            for key, value in given.items()
        }
        try:
            return kind(**values)
        except Exception as error:  # any: the part may be the user's
            raise ConfigError(f"{name}: {error}") from error

    def _value(self, plain: Any, kind: Any, place: str) -> Any:
        if isinstance(plain, dict) and is_import_path(plain.get(TAG)):
            return self._own(plain, kind, place)
        if has_own(plain):
            for each in choices(kind):
                if isinstance(plain, list) and get_origin(each) is tuple:
                    return self._tuple(plain, get_args(each), place)
                if isinstance(plain, dict) and tag_of(each) == plain.get(TAG):
                    return self.struct(plain, each, place)
        try:
            return msgspec.convert(plain, kind)
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"{place}: {error}") from error

    def _tuple(self, plain: list[Any], kinds: tuple[Any, ...], place: str) -> tuple[Any, ...]:
        if len(kinds) == 2 and kinds[1] is ...:
            kinds = (kinds[0],) * len(plain)
        if len(kinds) != len(plain):
            raise ConfigError(f"{place}: {len(plain)} values where {len(kinds)} are taken")
        return tuple(
            self._value(each, kind, f"{place}[{index}]")
            for index, (each, kind) in enumerate(zip(plain, kinds, strict=True))
        )

    def _own(self, plain: dict[str, Any], kind: Any, place: str) -> Part:
        """Return a part of the user's own.

        Raises:
            ConfigError: It cannot be had, or is not of the kind that the field takes.
        """
        found = own_part(plain[TAG], self._modules)
        part = self.struct(plain, found, place)
        if found not in choices(kind) and not isinstance(part, INTERFACES.get(kind, ())):
            raise ConfigError(f"{place} takes {taken_by(kind)}, and {plain[TAG]} is none")
        try:
            hash(part)
        except TypeError as error:
            raise ConfigError(f"{place}: {plain[TAG]} has an {error}; use tuples") from error
        return part


def choices(kind: Any) -> tuple[Any, ...]:
    """The types in a union; of any other type, itself."""
    return (kind,) if isinstance(kind, type) or get_origin(kind) is tuple else get_args(kind)


def tag_of(kind: Any) -> Any:
    """The name that a struct has in JSON; an object equal to no name if it is no such struct."""
    is_part = isinstance(kind, type) and issubclass(kind, Part)
    return kind.__struct_config__.tag if is_part and not is_own(kind) else object()


def taken_by(kind: Any) -> str:
    """Return the interfaces and parts that a field takes, for errors."""
    names = [getattr(each, "__name__", str(each)) for each in choices(kind)]
    interfaces = [f"a {each.__name__} of your own" for each in INTERFACES.get(kind, ())]
    own = " or ".join(interfaces) or "no part of your own"
    return f"{own} ({', '.join(names)})"
