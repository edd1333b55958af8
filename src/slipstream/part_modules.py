"""Modules with parts of the user's own: only those whose names the user gave are imported."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from importlib import import_module
from typing import Any

from slipstream.errors import ConfigError
from slipstream.parts import Part
from slipstream.printable import printable, shown

MOST_MODULES = 64
MOST_CHARACTERS = 200  # of a module's name, and of a class's


def module_names(given: Iterable[str]) -> tuple[str, ...]:
    """Return the names of modules that may be imported, checked and each of them once.

    Raises:
        ConfigError: One is no module's full name, or there are too many.

    >>> module_names(["mypackage.parts", "mypackage.parts"])
    ('mypackage.parts',)
    """
    if isinstance(given, str):
        raise ConfigError(f"parts={shown(given)}: give a list of modules, as [{shown(given)}]")
    names = tuple(dict.fromkeys(given))
    for name in names:
        if not isinstance(name, str) or len(name) > MOST_CHARACTERS or not is_dotted(name):
            raise ConfigError(
                f"{shown(name)} is no module's full name: give one to --parts, SLIPSTREAM_PARTS or "
                "slipstream.init(parts=[…]) as `import` takes it, such as mypackage.parts"
            )
        if name == "__main__":
            raise ConfigError(
                "parts in the script itself (__main__) cannot be imported by servers: move them "
                "into a module beside the script, and give that module's name"
            )
    if len(names) > MOST_MODULES:
        raise ConfigError(f"{len(names)} modules of parts: give at most {MOST_MODULES}")
    return names


def is_dotted(name: str) -> bool:
    """Whether these are identifiers with dots between them."""
    return all(part.isidentifier() for part in name.split("."))


def is_own(kind: type) -> bool:
    """Whether a part's class is the user's own, not one of slipstream's."""
    return not kind.__module__.startswith("slipstream.")


def import_path(kind: type) -> str:
    """The name of a class in JSON: its module, a colon, and its name there."""
    return f"{kind.__module__}:{kind.__qualname__}"


def is_import_path(name: object) -> bool:
    """Whether this names a part of the user's own; slipstream's have plain names."""
    return isinstance(name, str) and ":" in name


def own_part(path: str, modules: Collection[str]) -> type[Part]:
    """Import the class of a part.

    Args:
        path: ``module:Class``.
        modules: The names of modules that may be imported; no other is.

    Raises:
        ConfigError: The module is not one of these, cannot be imported, or has no such part.
    """
    module, _, name = path.partition(":")
    if len(module) > MOST_CHARACTERS or len(name) > MOST_CHARACTERS:
        raise ConfigError(
            f"a part's name of {len(path)} characters: its module and its class may have "
            f"{MOST_CHARACTERS} each"
        )
    if not is_dotted(module) or not name.isidentifier():
        raise ConfigError(
            f"part {shown(path)}: write module:Class, such as mypackage.parts:Signed; the class "
            "must be at the top of its module"
        )
    if module == "__main__":
        raise ConfigError(
            f"part {name} is in the script itself, which servers cannot import: move it into a "
            "module beside the script, and name that module to `slipstream run --parts`"
        )
    if module not in modules:
        raise ConfigError(
            f"part {path}: the module {module} may not be imported (allowed: "
            f"{', '.join(modules) or 'none'}). Start with `slipstream run --parts {module}`; with "
            f"other launchers, slipstream.init(parts=[{module!r}]); SLIPSTREAM_PARTS={module} for "
            f"servers that run elsewhere. to_json and from_json take parts=[{module!r}]"
        )
    found = imported(module).get(name)
    if not isinstance(found, type) or not issubclass(found, Part) or import_path(found) != path:
        raise ConfigError(
            f"part {path}: the module {module} defines no class {name} that is a part: derive it "
            "from slipstream.parts.Part, and give the module that defines it"
        )
    return found


def imported(module: str) -> dict[str, Any]:
    """Import a module, and return what it has by name.

    Raises:
        ConfigError: There is no such module, or it fails.
    """
    try:
        return vars(import_module(module))
    except (Exception, SystemExit) as error:
        # Under a job, sys.exit raises an exception of its own, derived from SystemExit.
        kind = "SystemExit" if isinstance(error, SystemExit) else type(error).__name__
        reason = printable(f"{kind}: {error}")[:500]
        raise ConfigError(
            f"the module {module} cannot be imported ({reason}): put it beside the script, or "
            "install it on every host, and make sure that `import` of it alone works"
        ) from error
