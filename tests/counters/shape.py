"""Counters of sizes, names, docstrings and methods that do little. Each returns its places."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable

from counters.source import (
    Definition,
    Function,
    Module,
    Source,
    bases,
    decorators,
    is_self,
    parameters,
    statements,
)

MOST_LINES_OF_A_FILE = 450
MOST_LINES_OF_A_FUNCTION = 50
FEWEST_DESCRIBED = 4  # a constructor with fewer arguments may describe them in a sentence
# Files that define these may be longer: membership, and the control plane of shared memory, are
# each one machine whose states belong together.
MAY_BE_LONG = frozenset(
    {"Coordination", "ExitBarrier", "Gathering", "Heartbeat", "Roster", "SharedMemoryCoordinator"}
)
OPENING = re.compile(r"(What|Who|Whom|Whose|Where|When|Which|Why|How(?! (many|much)))\b")
MAIN_CLAUSE = re.compile(
    r"(?<!that )(?<!who )(?<!which )"
    r"\b(it|they|is|are|was|were|has|have|does|do|may|must|can|cannot|will)\b"
)
SUBORDINATE = re.compile(r"(also|and|or|as|if|after|before|when|where|so)\b")


def long_files(source: Source) -> list[str]:
    """Files of more than 450 lines."""
    return [
        f"{module.path.name} ({module.lines} lines)"
        for module in source.modules
        if module.lines > MOST_LINES_OF_A_FILE
        and not MAY_BE_LONG & {each.node.name for each in module.classes}
    ]


def long_functions(source: Source) -> list[str]:
    """Functions of more than 50 lines, without their docstrings."""
    return [
        f"{each} ({lines} lines)"
        for module in source.modules
        for each in module.functions
        if (lines := _lines_without_docstring(each.node)) > MOST_LINES_OF_A_FUNCTION
    ]


def _lines_without_docstring(node: ast.AST) -> int:
    assert isinstance(node, Function)
    lines = _lines(node)
    return lines if ast.get_docstring(node) is None else lines - _lines(node.body[0])


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def names_of_several_classes(source: Source) -> list[str]:
    """Names that more than one class has."""
    names = Counter(each.node.name for module in source.modules for each in module.classes)
    return [f"{name} ({times} classes)" for name, times in sorted(names.items()) if times > 1]


# ---- docstrings


def docstrings_without_a_sentence(source: Source) -> list[str]:
    """Docstrings that open with a clause such as "What is sent" or "Where results go".

    Those that open with "Where" or "When" may go on with a main clause after a comma.
    """
    return [
        f"{place}: {opening}"
        for module in source.modules
        for place, text in _docstrings(module)
        if not has_sentence(opening := _first_sentence(text))
    ]


def _docstrings(module: Module) -> list[tuple[str, str]]:
    documented = [(str(each), each.node) for each in module.definitions]
    texts = [(module.name or "slipstream", ast.get_docstring(module.tree))]
    texts += [(place, ast.get_docstring(node)) for place, node in documented]
    return [(place, text) for place, text in texts if text]


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0]


def has_sentence(opening: str) -> bool:
    """Return False for a clause that only names what it describes."""
    word = OPENING.match(opening)
    if word is None:
        return True
    if word[0] not in ("Where", "When"):
        return False
    clauses = [part.strip() for part in opening.split(",")[1:]]
    return any(MAIN_CLAUSE.search(c) and not SUBORDINATE.match(c) for c in clauses)


def undescribed_constructors(source: Source) -> list[str]:
    """Constructors of four arguments or more of which some are in no list of ``Args``."""
    found = []
    for module in source.modules:
        for each in module.functions:
            if each.node.name != "__init__" or each.owner is None:
                continue
            assert isinstance(each.node, Function)
            arguments = parameters(each.node)[1:]
            described = _described(each.owner) | _described(each.node)
            missing = [name for name in arguments if name not in described]
            if missing and len(arguments) >= FEWEST_DESCRIBED:
                found.append(f"{each} ({', '.join(missing)})")
    return found


def _described(node: Function | ast.ClassDef) -> set[str]:
    """Return the names that the docstring's ``Args`` explain."""
    text = ast.get_docstring(node) or ""
    arguments = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)+)", text, re.MULTILINE)
    return set(re.findall(r"^ +\*{0,2}(\w+):", arguments[1], re.MULTILINE)) if arguments else set()


# ---- methods that do little


def forwarding_methods(source: Source) -> list[str]:
    """Methods and properties that only forward to something of one of the object's attributes.

    Their only statement reads, calls or sets ``self.a.b`` with nothing but their own arguments.
    """
    return _methods(source, _forwards)


def _forwards(each: Definition) -> bool:
    assert isinstance(each.node, Function)
    body, own = statements(each.node), set(parameters(each.node))
    if len(body) != 1:
        return False
    only = body[0]
    if isinstance(only, ast.Assign):
        return _is_of_own_attribute(only.targets[0]) and _is_one_of(only.value, own)
    value = only.value if isinstance(only, ast.Return | ast.Expr) else None
    value = value.value if isinstance(value, ast.Await) else value
    if isinstance(value, ast.Call):
        given = [*value.args, *(each.value for each in value.keywords)]
        return _is_of_own_attribute(value.func) and all(_is_one_of(a, own) for a in given)
    return value is not None and _is_of_own_attribute(value)


def _is_of_own_attribute(node: ast.expr) -> bool:
    """Return whether this is ``self.a.b``, ``self.a.b.c`` and so on."""
    depth = 0
    while isinstance(node, ast.Attribute):
        node, depth = node.value, depth + 1
    return depth >= 2 and is_self(node)


def _is_one_of(node: ast.expr, names: set[str]) -> bool:
    node = node.value if isinstance(node, ast.Starred) else node
    return isinstance(node, ast.Name) and node.id in names


def empty_methods(source: Source) -> list[str]:
    """Methods that do nothing, other than abstract ones and declarations in protocols."""
    return _methods(source, _is_empty)


def _is_empty(each: Definition) -> bool:
    assert isinstance(each.node, Function)
    assert each.owner is not None
    if decorators(each.node) & {"abstractmethod", "overload"}:
        return False
    body = statements(each.node)
    does_nothing = all(_does_nothing(statement, each.node) for statement in body)
    # A method of a protocol with a ``return`` or ``pass`` is what implementations inherit.
    declares = not any(isinstance(each, ast.Return | ast.Pass) for each in body)
    return does_nothing and not (declares and "Protocol" in bases(each.owner))


def _does_nothing(statement: ast.stmt, of: Function) -> bool:
    if isinstance(statement, ast.Return):
        returns_none = of.returns is None or ast.unparse(of.returns) == "None"
        answer = statement.value is not None and not _is_none(statement.value)
        return returns_none and not answer
    is_constant = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_constant or isinstance(statement, ast.Pass)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _methods(source: Source, condition: Callable[[Definition], bool]) -> list[str]:
    return [
        str(each)
        for module in source.modules
        for each in module.functions
        if each.owner is not None and condition(each)
    ]
