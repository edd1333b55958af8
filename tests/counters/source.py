"""The source of slipstream's core as syntax trees; nothing of it is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src/slipstream"
# Folders at the top of the package that use the core, or are used beside it.
NOT_CORE = frozenset({"apps", "integrations"})

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Module:
    """One file; its path is below the package's folder, such as ``runtime/driver.py``."""

    path: Path
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, str(self.path))

    @property
    def name(self) -> str:
        """The dotted name below ``slipstream``; a package's is its folder's."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The folder of the file; a file beside the topmost folders is a room of its own."""
        return "/".join(self.path.parts[:-1]) or self.path.stem

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    @cached_property
    def definitions(self) -> tuple[Definition, ...]:
        """All functions, methods and classes, also those within others."""
        return tuple(_definitions(self, self.tree, ()))

    @property
    def classes(self) -> Iterator[Definition]:
        return (each for each in self.definitions if isinstance(each.node, ast.ClassDef))

    @property
    def functions(self) -> Iterator[Definition]:
        return (each for each in self.definitions if not isinstance(each.node, ast.ClassDef))


@dataclass(frozen=True)
class Definition:
    """A function, a method or a class.

    Attributes:
        outer: The classes and functions around it, the nearest last.
    """

    module: Module
    node: Function | ast.ClassDef
    outer: tuple[Function | ast.ClassDef, ...] = ()

    def __str__(self) -> str:
        """``rounds.RoundChannel.flush``, the same wherever the file lies."""
        names = [each.name for each in (*self.outer, self.node)]
        return ".".join([self.module.name.rpartition(".")[2], *names])

    @property
    def owner(self) -> ast.ClassDef | None:
        """The class whose method this is."""
        nearest = self.outer[-1] if self.outer else None
        return nearest if isinstance(nearest, ast.ClassDef) else None


def _definitions(
    module: Module, node: ast.AST, outer: tuple[Function | ast.ClassDef, ...]
) -> Iterator[Definition]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Function | ast.ClassDef):
            yield Definition(module, child, outer)
            yield from _definitions(module, child, (*outer, child))
        else:
            yield from _definitions(module, child, outer)


class Source:
    """The files that are counted.

    Args:
        files: Texts by their paths below the package's folder.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self.modules = tuple(Module(Path(path), files[path]) for path in sorted(files))

    @property
    def lines(self) -> int:
        return sum(module.lines for module in self.modules)


def core(root: Path = ROOT) -> Source:
    """Read the package's files, without the folders that are not core."""
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    return Source({str(p): (root / p).read_text() for p in paths if p.parts[0] not in NOT_CORE})


def statements(node: Function) -> list[ast.stmt]:
    """Return a function's body without its docstring."""
    return node.body[1:] if ast.get_docstring(node) is not None else node.body


def parameters(node: Function) -> list[str]:
    """Return the names of all of a function's parameters."""
    given = node.args
    single = [each for each in (given.vararg, given.kwarg) if each is not None]
    return [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs, *single)]


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """Return the last parts of the decorators' names."""
    called = (each.func if isinstance(each, ast.Call) else each for each in node.decorator_list)
    return {last_name(each) for each in called}


def bases(node: ast.ClassDef) -> set[str]:
    """Return the last parts of the base classes' names."""
    plain = (each.value if isinstance(each, ast.Subscript) else each for each in node.bases)
    return {last_name(each) for each in plain}


def last_name(node: ast.AST) -> str:
    """Return ``c`` for ``a.b.c``, and an empty text for what has no name."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def is_self(node: ast.AST) -> bool:
    """Return whether an expression is the object, or the class, whose method it is in."""
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def assignments(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    """Yield every single target within a node, with its value where that is known."""
    for each in ast.walk(node):
        if isinstance(each, ast.Assign):
            for target in each.targets:
                yield from _single(target, each.value)
        elif isinstance(each, ast.AnnAssign | ast.AugAssign):
            yield each.target, each.value


def _single(target: ast.expr, value: ast.expr | None) -> Iterator[tuple[ast.expr, ast.expr | None]]:
    if not isinstance(target, ast.Tuple | ast.List):
        yield target.value if isinstance(target, ast.Starred) else target, value
        return
    values: list[ast.expr | None] = [None] * len(target.elts)
    if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
        values = list(value.elts)
    for part, of in zip(target.elts, values, strict=True):
        yield from _single(part, of)
