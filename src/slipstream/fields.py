"""The check that every field of a strategy has a value of the right type."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import msgspec
from msgspec import inspect

from slipstream.parts import Part

PLAIN = {
    inspect.StrType: (str, "text"),
    inspect.IntType: (int, "a whole number"),
    inspect.FloatType: (int | float, "a number"),
    inspect.BoolType: (bool, "True or False"),
    inspect.NoneType: (type(None), "None"),
}


def misplaced(value: msgspec.Struct) -> str:
    """Return what is wrong with the first field whose value has the wrong type; empty if none has.

    A field for parts accepts any part that is not slipstream's own: the simulator can run it.
    """
    return next(_in_struct(value, type_info(type(value)), ""), "")


type_info = cache(inspect.type_info)  # computing it takes milliseconds


def _in_struct(value: Any, kind: Any, place: str) -> Iterator[str]:
    for field in kind.fields:
        below = f"{place}.{field.name}" if place else field.name
        yield from _in_value(getattr(value, field.name), field.type, below)


def _in_value(value: Any, kind: inspect.Type, place: str) -> Iterator[str]:
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    for each in kinds:
        if isinstance(each, inspect.StructType) and type(value) is each.cls:
            yield from _in_struct(value, each, place)
            return
        if isinstance(each, inspect.VarTupleType) and isinstance(value, tuple):
            for index, item in enumerate(value):
                yield from _in_value(item, each.item_type, f"{place}[{index}]")
            return
    if not any(_is(value, each) for each in kinds) and not _is_foreign(value, kinds):
        yield f"{place} takes {_names(kinds)}, not {_described(value)}{_advice(value, kinds)}"


def _is(value: Any, kind: inspect.Type) -> bool:
    if isinstance(kind, inspect.LiteralType | inspect.DataclassType):
        return True  # the part itself checks its choices
    known, _ = PLAIN.get(type(kind), (None, ""))
    # To Python, True is a number.
    return (
        known is not None
        and isinstance(value, known)
        and (isinstance(value, bool) == isinstance(kind, inspect.BoolType))
    )


def _is_foreign(value: Any, kinds: tuple[inspect.Type, ...]) -> bool:
    takes_parts = any(isinstance(kind, inspect.StructType) for kind in kinds)
    return (
        takes_parts
        and isinstance(value, Part)
        and not type(value).__module__.startswith("slipstream.")
    )


def _names(kinds: tuple[inspect.Type, ...]) -> str:
    *names, last = map(_name, kinds)
    return f"{', '.join(names)} or {last}" if names else last


def _name(kind: inspect.Type) -> str:
    if isinstance(kind, inspect.StructType):
        return kind.cls.__name__
    if isinstance(kind, inspect.VarTupleType):
        return "a tuple"
    return PLAIN.get(type(kind), (None, "one of its values"))[1]


def _described(value: Any) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Part | list) else repr(value)


def _advice(value: Any, kinds: tuple[inspect.Type, ...]) -> str:
    """Return advice on the likely mistake: a class for its instance, a list for a tuple, a part for
    its container."""
    takers = [kind for kind in kinds if isinstance(kind, inspect.StructType)]
    if isinstance(value, type) and any(kind.cls is value for kind in takers):
        return f": write {value.__name__}()"
    if any(isinstance(kind, inspect.VarTupleType) for kind in kinds):
        return ": write a tuple, as (part,)"
    for taker in takers:
        for place, field in enumerate(taker.fields):
            if _holds(value, field.type):
                keyword = f"{field.name}=" if place else ""
                return f": write {taker.cls.__name__}({keyword}{_short(value)})"
    return ""


def _holds(value: Any, kind: inspect.Type) -> bool:
    """Return whether a field of this type takes this value, other than as one of a few literals."""
    kinds = kind.types if isinstance(kind, inspect.UnionType) else (kind,)
    chosen = any(isinstance(each, inspect.LiteralType) for each in kinds)
    return not chosen and not list(_in_value(value, kind, ""))


def _short(value: Any) -> str:
    return f"{type(value).__name__}(…)" if isinstance(value, Part) else repr(value)
