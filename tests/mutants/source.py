"""Finds what a break is of, without importing anything, and replaces its pattern."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from mutants.breaks import Break, BreakError


class Span(NamedTuple):
    start: int
    end: int


@dataclass(frozen=True)
class Edit:
    """A file with and without a break; its path is relative to the root of the tree."""

    path: Path
    intact: str
    broken: str

    @property
    def is_native(self) -> bool:
        return self.path.suffix != ".py"

    @property
    def module(self) -> str:
        """The name by which Python imports the file."""
        parts = self.path.with_suffix("").parts[1:]
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def room(self) -> str:
        """The folder by which scores are given: ``runtime/members``, ``native``."""
        folder = self.path.parent.parts
        return "/".join(folder[2:] if folder[0] == "src" else folder) or folder[-1]


def edit(root: Path, each: Break) -> Edit:
    """Apply a break to the source text.

    Raises:
        BreakError: If the object is not found, or the pattern is not there exactly once.
    """
    path, name = locate(root, each)
    text = (root / path).read_text()
    spans = [Span(0, len(text))] if not name else list(find(path, text, name))
    if not spans:
        raise BreakError(f"{each.name}: {path} has no {name}; correct 'of'")
    starts = {at for span in spans for at in occurrences(text, each.pattern, span)}
    if len(starts) != 1:
        raise BreakError(
            f"{each.name}: the pattern occurs {len(starts)} times in {each.of}, expected once; "
            "correct 'replace'"
        )
    (start,) = starts
    broken = text[:start] + each.replacement + text[start + len(each.pattern) :]
    return Edit(path, text, broken)


def locate(root: Path, each: Break) -> tuple[Path, str]:
    """Return the file of a qualified name, and the rest of the name."""
    if "/" in each.of:
        file, _, name = each.of.partition(":")
        if (root / file).is_file():
            return Path(file), name
    else:
        parts = each.of.split(".")
        for count in range(len(parts), 0, -1):
            module = Path("src", *parts[:count])
            for path in (module.with_suffix(".py"), module / "__init__.py"):
                if (root / path).is_file():
                    return path, ".".join(parts[count:])
    raise BreakError(f"{each.name}: there is no file of {each.of}; correct 'of'")


def occurrences(text: str, pattern: str, span: Span) -> Iterator[int]:
    at = text.find(pattern, span.start, span.end)
    while at >= 0:
        yield at
        at = text.find(pattern, at + 1, span.end)


def find(path: Path, text: str, name: str) -> Iterator[Span]:
    """Find definitions: several for a property with a setter, or for overloads."""
    if path.suffix != ".py":
        yield from find_cpp(text, name)
        return
    lines = [0]
    for line in text.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    for node in find_python(ast.parse(text), name.split(".")):
        first = min([node, *getattr(node, "decorator_list", [])], key=lambda n: n.lineno)
        end = lines[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        encoded = text.encode()
        yield Span(len(encoded[: lines[first.lineno - 1]].decode()), len(encoded[:end].decode()))


def find_python(scope: ast.AST, names: list[str]) -> Iterator[ast.stmt]:
    for node in statements(scope):
        if names[0] not in defined(node):
            continue
        if len(names) == 1:
            yield node
        else:
            yield from find_python(node, names[1:])


def statements(scope: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a scope, also those under ``if`` or ``try``."""
    for node in ast.iter_child_nodes(scope):
        if isinstance(node, ast.stmt):
            yield node
        if not defined(node):
            yield from statements(node)


def defined(node: ast.AST) -> list[str]:
    match node:
        case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
            return [name]
        case ast.AsyncFunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case ast.Assign(targets=targets):
            return [each.id for each in targets if isinstance(each, ast.Name)]
    return []


# What the compiler does not read as code: comments, strings, characters.
NO_CODE = re.compile(r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
# Between a definition's parameters and its body; a call has something else there.
BEFORE_BODY = re.compile(r"(\s|const|noexcept|override|final)*(->[\w\s:<>,&*]+)?(:[^;{}]*)?")


def find_cpp(text: str, name: str) -> Iterator[Span]:
    code = NO_CODE.sub(lambda match: " " * len(match[0]), text)
    for match in re.finditer(rf"(?<![\w:~.>]){re.escape(name)}\s*(?=\()", code):
        after = closing(code, match.end(), "()")
        opening = re.compile(r"[{};]").search(code, after)
        if opening and opening[0] == "{" and BEFORE_BODY.fullmatch(code[after : opening.start()]):
            yield Span(match.start(), closing(code, opening.start(), "{}"))


def closing(code: str, start: int, pair: str) -> int:
    """Return the position after the bracket that closes the one at ``start``."""
    depth = 0
    for at in range(start, len(code)):
        depth += (code[at] == pair[0]) - (code[at] == pair[1])
        if depth == 0:
            return at + 1
    return len(code)
