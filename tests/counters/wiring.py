"""Counters of what ties parts of the core to each other. Each returns its places."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from counters.source import (
    Definition,
    Function,
    Module,
    Source,
    assignments,
    decorators,
    is_self,
    last_name,
)

# Whose properties decide how a training is built.
DECIDES = frozenset({"Plan", "Strategy", "Consistency", "Update"})
# They may set each other's hooks: rank 0's decisions about members reach all of them.
OF_MEMBERSHIP = frozenset({"Coordination", "ExitBarrier", "Gathering", "Heartbeat", "Roster"})


def overwritten_attributes(source: Source) -> list[str]:
    """Assignments to another object's attribute that its own constructor leaves to others.

    The constructor begins it as None, as a lambda or as a function, and a method or function
    elsewhere puts the real value there. Membership's own hooks do not count.
    """
    unfinished = _unfinished_attributes(source)
    found = []
    for module in source.modules:
        for each, target in _foreign_targets(module):
            here = _innermost_class(each)
            of = unfinished[target.attr] - {here}
            if of and here not in OF_MEMBERSHIP and not of <= OF_MEMBERSHIP:
                found.append(f"{each}: {ast.unparse(target)}")
    return found


def _unfinished_attributes(source: Source) -> dict[str, set[str]]:
    """Return the classes whose constructors begin an attribute without its value, by attribute."""
    found: dict[str, set[str]] = defaultdict(set)
    for module in source.modules:
        functions = {each.name for each in module.tree.body if isinstance(each, Function)}
        for each in module.functions:
            if each.node.name == "__init__" and each.owner is not None:
                for target, value in assignments(each.node):
                    own = isinstance(target, ast.Attribute) and is_self(target.value)
                    if own and value is not None and _is_unfinished(value, functions):
                        found[last_name(target)].add(each.owner.name)
        for each in module.classes:
            # Fields that begin as None are records, which their owners fill in; hooks are not.
            for statement in each.node.body:
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.value, ast.Lambda):
                    found[last_name(statement.target)].add(each.node.name)
    return found


def _is_unfinished(value: ast.expr, functions: set[str]) -> bool:
    is_none = isinstance(value, ast.Constant) and value.value is None
    is_function = isinstance(value, ast.Name) and value.id in functions
    return is_none or is_function or isinstance(value, ast.Lambda)


def _foreign_targets(module: Module) -> Iterator[tuple[Definition, ast.Attribute]]:
    """Yield attributes of other objects that functions assign, with the innermost function."""
    innermost = {id(node): each for each in module.functions for node in ast.walk(each.node)}
    for target, _ in assignments(module.tree):
        each = innermost.get(id(target))
        if each is not None and isinstance(target, ast.Attribute) and not is_self(target.value):
            yield each, target


def _innermost_class(each: Definition) -> str:
    classes = [outer.name for outer in each.outer if isinstance(outer, ast.ClassDef)]
    return classes[-1] if classes else ""


# ---- what is asked of a plan


def predicates(source: Source) -> set[str]:
    """Return the properties that tell whether a plan has something: a bool, or a part or None."""
    return {
        each.node.name
        for module in source.modules
        for each in module.functions
        if each.owner is not None
        and each.owner.name in DECIDES
        and "property" in decorators(each.node)
        and isinstance(each.node, Function)
        and _tells_whether(each.node.returns)
    }


def _tells_whether(annotation: ast.expr | None) -> bool:
    text = "" if annotation is None else ast.unparse(annotation)
    part, _, rest = text.partition(" | ")
    return text == "bool" or (part[:1].isupper() and rest == "None")


def readers_of_predicates(source: Source) -> list[str]:
    """Reads of a plan's predicates, each of which decides anew what kind of training it is."""
    names = predicates(source)
    return [
        f"{place}: {ast.unparse(node)}"
        for module in source.modules
        for place, owner, node in _reads(module)
        if node.attr in names and (not is_self(node.value) or owner in DECIDES)
    ]


def readers_of_members(source: Source) -> list[str]:
    """Reads of ``cluster.members``, by which code tells hosts from workers."""
    return [
        f"{place}: {ast.unparse(node)}"
        for module in source.modules
        for place, _, node in _reads(module)
        if node.attr == "members" and last_name(node.value) == "cluster"
    ]


def _reads(module: Module) -> Iterator[tuple[str, str, ast.Attribute]]:
    """Yield attributes that are read, with the innermost function and class."""
    innermost = {id(node): each for each in module.definitions for node in ast.walk(each.node)}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            each = innermost.get(id(node))
            owner = "" if each is None else _innermost_class(each)
            yield (module.name if each is None else str(each)), owner, node


# ---- imports


def imports_in_circles(source: Source) -> list[str]:
    """Names imported from another room that itself needs this room, directly or by others.

    A room is a folder. Imports within functions count; those for type checkers alone do not.
    """
    imports = [
        (module, other, name)
        for module in source.modules
        for other, name in _imports(module, {each.name: each for each in source.modules})
        if other.room != module.room
    ]
    needs: dict[str, set[str]] = defaultdict(set)
    for module, other, _ in imports:
        needs[module.room].add(other.room)
    return [
        f"{module.room} → {other.room}: {module.path.stem} imports {name}"
        for module, other, name in imports
        if module.room in _reached(other.room, needs)
    ]


def _imports(module: Module, modules: dict[str, Module]) -> Iterator[tuple[Module, str]]:
    ignored = {
        id(node)
        for each in ast.walk(module.tree)
        if isinstance(each, ast.If) and last_name(each.test) == "TYPE_CHECKING"
        for node in ast.walk(each)
    }
    for node in ast.walk(module.tree):
        if id(node) in ignored:
            continue
        for home, name in _imported(node):
            # ``from slipstream.runtime import driver`` names a module, not what is in one.
            other = modules.get(f"{home}.{name}") or modules.get(home)
            if home and other is not None:
                yield other, f"{home}.{name}"


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield modules of slipstream and the names taken from them."""
    if isinstance(node, ast.Import):
        pairs = [(alias.name, "") for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        pairs = [(node.module or "", alias.name) for alias in node.names]
    else:
        return
    for home, name in pairs:
        package, _, rest = home.partition(".")
        if package == "slipstream":
            # Modules beside the folders: ``from slipstream import native``.
            yield (rest, name) if rest else (name, "")


def _reached(room: str, needs: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [room]
    while waiting:
        for other in needs[waiting.pop()] - found:
            found.add(other)
            waiting.append(other)
    return found
