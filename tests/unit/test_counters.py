"""What the core has too much of may only fall; and what counts as what, on small sources."""

from __future__ import annotations

import json
import re
from inspect import getdoc
from pathlib import Path
from textwrap import dedent

import pytest

from counters import shape, wiring
from counters.limits import COUNTERS, MEASURED, load, lower, trouble
from counters.source import NOT_CORE, ROOT, Source, core

CORE = core()


def source(text: str = "", **files: str) -> Source:
    """Files of a small core; the first text is of a module named ``here``."""
    files = {"here": text} | files
    return Source({f"{name}.py": dedent(t) for name, t in files.items()})


def places(found: list[str]) -> list[str]:
    """Names of the places, without what was found there."""
    return [re.split(r"[: ]", each)[0] for each in found]


# ---- the core itself


@pytest.mark.parametrize("name", COUNTERS)
def test_counter_is_at_its_limit(name: str) -> None:
    count = COUNTERS[name]
    message = trouble(name, count(CORE), load()[name], getdoc(count) or "")
    assert not message, message


def test_limits_are_of_counters_that_there_are() -> None:
    assert set(load()) == {*COUNTERS, *MEASURED}


def test_classes_that_counters_name_are_in_the_core() -> None:
    names = {each.node.name for module in CORE.modules for each in module.classes}
    assert names >= wiring.DECIDES | wiring.OF_MEMBERSHIP | shape.MAY_BE_LONG


def test_core_has_no_folder_that_only_uses_it() -> None:
    folders = {module.path.parts[0] for module in CORE.modules}
    assert "runtime" in folders
    assert "job.py" in folders
    assert not folders & NOT_CORE
    assert {path.name for path in ROOT.iterdir()} & NOT_CORE


def test_counts_do_not_depend_on_where_a_file_lies() -> None:
    texts = {str(module.path): module.text for module in CORE.modules if "torch" in module.room}
    here, moved = Source(texts), Source({f"moved/to/{path}": t for path, t in texts.items()})
    for name, count in COUNTERS.items():
        if count is not wiring.imports_in_circles:
            assert len(count(moved)) == len(count(here)), name


# ---- limits


def test_trouble_names_places_of_a_count_that_has_risen() -> None:
    message = trouble("empty", ["a.A.f", "b.B.g"], 1, "Methods that do nothing.")
    assert message.startswith("empty: 2 places, 1 allowed: a.A.f; b.B.g\n")
    assert "Methods that do nothing." in message


def test_trouble_gives_the_command_for_a_count_that_has_fallen() -> None:
    assert "python -m counters --write" in trouble("empty", ["a.A.f"], 2)
    assert not trouble("empty", ["a.A.f"], 1)
    assert not trouble("empty", [], 0)


def test_lower_writes_falls_and_new_counters_but_no_rise(tmp_path: Path) -> None:
    file = tmp_path / "limits.json"
    file.write_text(json.dumps({"fell": 3, "rose": 1, "measured": 8}))
    assert lower({"fell": 2, "rose": 2, "new": 5}, file) == {"rose": 2}
    assert load(file) == {"fell": 2, "rose": 1, "measured": 8, "new": 5}


# ---- sizes and names


def test_long_files_are_those_of_more_than_450_lines() -> None:
    found = shape.long_files(source(short="x = 1\n" * 450, long="x = 1\n" * 451))
    assert found == ["long.py (451 lines)"]


def test_long_files_of_membership_and_of_shared_memory_do_not_count() -> None:
    long = "x = 1\n" * 500
    files = source(roster=f"class Roster: ...\n{long}", other=f"class Rosters: ...\n{long}")
    assert places(shape.long_files(files)) == ["other.py"]


def test_long_functions_are_counted_without_their_docstrings() -> None:
    text = '''
    def short():
        """One.

        Two.
        """
    {short}

    def long():
        """One."""
    {long}
    '''
    lines = {"short": "    x = 1\n" * 49, "long": "    x = 1\n" * 50}
    assert shape.long_functions(source(dedent(text).format(**lines))) == ["here.long (51 lines)"]


def test_names_of_several_classes_are_found_across_files_and_nested() -> None:
    files = source("class A: ...\nclass B: ...", other="class C:\n    class A: ...")
    assert shape.names_of_several_classes(files) == ["A (2 classes)"]


# ---- docstrings


@pytest.mark.parametrize(
    "opening",
    [
        "What is sent.",
        "Who holds a chunk.",
        "Whose answers have not come.",
        "Where results go.",
        "Where workers are in lockstep, those that have begun a later round.",
        "Where each node sends results, also after workers are lost.",
        "When a gradient is sent.",
        "Which entries to send.",
        "Why a tensor cannot be sent.",
        "How urgent a tensor is.",
    ],
)
def test_docstring_that_opens_with_a_clause_has_no_sentence(opening: str) -> None:
    assert not shape.has_sentence(opening)


@pytest.mark.parametrize(
    "opening",
    [
        "Send what is not ready.",
        "Whether any tensor is sent.",
        "How many rounds have closed.",
        "Where servers update, they deal batches.",
        "Where rounds need all, a stopped worker is an error.",
        "Whatever is sent is kept.",
    ],
)
def test_docstring_with_a_main_clause_has_a_sentence(opening: str) -> None:
    assert shape.has_sentence(opening)


def test_docstrings_of_modules_classes_and_methods_count_by_their_first_sentence() -> None:
    text = '''
    """Where results
    go. They are counted."""

    class A:
        """What is kept."""

        def f(self):
            """Keep it. What else?"""

            def g():
                """How it is kept."""
    '''
    found = shape.docstrings_without_a_sentence(source(text))
    assert found == [
        "here: Where results go.",
        "here.A: What is kept.",
        "here.A.f.g: How it is kept.",
    ]


def test_undescribed_constructors_name_their_arguments() -> None:
    text = '''
    class Few:
        def __init__(self, a, b, c): ...

    class Described:
        """It is.

        Args:
            a: The first.
            b: The second,
                and more.

            *c: The third.
        """

        def __init__(self, a, b, *c, **d):
            """Make one.

            Args:
                d: The last.
            """

    class Mentioned:
        """Takes a, b and c.

        Args:
            a: The first.

        Attributes:
            b: The second.
        """

        def __init__(self, a, b, *, c, d): ...
    '''
    found = shape.undescribed_constructors(source(text))
    assert found == ["here.Mentioned.__init__ (b, c, d)"]


# ---- methods that do little


def test_forwarding_methods_give_nothing_but_their_own_arguments() -> None:
    text = '''
    class A:
        @property
        def a(self):
            return self._b.a

        @a.setter
        def a(self, value):
            self._b.a = value

        def call(self, x, *rest, key):
            """Forward."""
            return self._b.c.call(x, *rest, key=key)

        async def awaited(self):
            await self._b.awaited()

        def own(self):
            return self._b

        def own_call(self):
            return self._b(1)

        def adds(self):
            return self._b.call(1)

        def computes(self, x):
            return self._b.call(x + 1)

        def more(self):
            self._b.call()
            self._b.call()

    def function(self):
        return self.a.b
    '''
    found = shape.forwarding_methods(source(text))
    assert found == ["here.A.a", "here.A.a", "here.A.call", "here.A.awaited"]


def test_empty_methods_are_no_declarations() -> None:
    text = '''
    class A:
        def documented(self):
            """Do nothing."""

        def passes(self):
            pass

        def returns(self) -> None:
            return None

        def dots(self): ...

        def answers(self) -> int | None:
            return None

        def works(self):
            self.x = 1

        @abstractmethod
        def abstract(self): ...

        @typing.overload
        def overloaded(self): ...

    class P(Protocol):
        def declared(self):
            """Do something."""

        def default(self):
            """Do nothing."""
            return

    class G(Protocol[T]):
        def declared(self): ...

    def function(): ...
    '''
    found = shape.empty_methods(source(text))
    assert found == [
        "here.A.documented",
        "here.A.passes",
        "here.A.returns",
        "here.A.dots",
        "here.P.default",
    ]


# ---- overwritten attributes

HOLDER = """
def nothing(): ...

class Loop:
    end: Any = lambda: None
    kept: Any = None

    def __init__(self, given):
        self.step: Any = lambda: None
        self.hook = nothing
        self.left, self.right = None, 1
        self.given = given

    def clear(self, other):
        self.step = other.step = None
"""


@pytest.mark.parametrize("target", ["step", "hook", "left", "end"])
def test_attribute_without_its_value_is_overwritten_by_another_object(target: str) -> None:
    user = f"class User:\n    def __init__(self, loop):\n        self.loop.{target} = self.f\n"
    found = wiring.overwritten_attributes(source(HOLDER, user=user))
    assert found == [f"user.User.__init__: self.loop.{target}"]


def test_attribute_is_overwritten_by_a_function_and_among_others() -> None:
    user = "def f(a, b):\n    a.x, b.step = 1, 2\n    a.step: int = 3\n    a.step += 1\n"
    found = wiring.overwritten_attributes(source(HOLDER, user=user))
    assert found == ["user.f: b.step", "user.f: a.step", "user.f: a.step"]


@pytest.mark.parametrize("target", ["loop.given", "loop.right", "loop.kept", "self.step", "p.grad"])
def test_attribute_with_a_value_or_of_the_object_itself_is_not_overwritten(target: str) -> None:
    user = f"class User:\n    def f(self, loop, p):\n        {target} = 1\n"
    assert wiring.overwritten_attributes(source(HOLDER, user=user)) == []


@pytest.mark.parametrize("name", sorted(wiring.OF_MEMBERSHIP))
def test_attributes_of_membership_are_not_overwritten(name: str) -> None:
    begins = f"class {name}:\n    def __init__(self):\n        self.on_lost = None\n"
    user = "def f(it):\n    it.on_lost = 1\n"
    assert wiring.overwritten_attributes(source(begins, user=user)) == []
    sets = f"class {name}:\n    def __init__(self, loop):\n        loop.step = self.f\n"
    assert wiring.overwritten_attributes(source(HOLDER, sets=sets)) == []


# ---- what is asked of a plan

PLAN = """
class Plan:
    @property
    def lockstep(self) -> bool:
        return self.agreed

    @property
    def agreed(self) -> bool: ...

    @property
    def rotation(self) -> Rotate | None: ...

    @property
    def below(self) -> float | None: ...

    @property
    def chunks(self) -> tuple[int, ...]: ...

    def method(self) -> bool: ...

class Other:
    @property
    def other(self) -> bool: ...
"""


def test_predicates_are_properties_of_plans_that_tell_whether() -> None:
    assert wiring.predicates(source(PLAN)) == {"lockstep", "agreed", "rotation"}


def test_readers_of_predicates_are_counted_by_read() -> None:
    user = """
    class Channel:
        def __init__(self, plan):
            self.rotation = plan.rotation

        def f(self):
            return self._plan.lockstep and self.rotation and self._plan.below

    known = PLAN.agreed
    """
    found = wiring.readers_of_predicates(source(PLAN, user=user))
    assert sorted(found) == [
        "here.Plan.lockstep: self.agreed",
        "user.Channel.__init__: plan.rotation",
        "user.Channel.f: self._plan.lockstep",
        "user: PLAN.agreed",
    ]


def test_core_has_the_predicates_that_choose_a_training() -> None:
    known = {"holder_applies", "delivers_every_result", "local_steps", "lockstep"}
    assert known <= wiring.predicates(CORE)


def test_readers_of_members_ask_a_cluster() -> None:
    text = """
    def f(self, cluster, agreement):
        cluster.members = 1
        return self.plan.cluster.members or cluster.members or agreement.members
    """
    found = wiring.readers_of_members(source(text))
    assert found == ["here.f: self.plan.cluster.members", "here.f: cluster.members"]


# ---- imports


def test_imports_in_circles_are_counted_by_name_between_rooms() -> None:
    files = {
        "a/one": "from slipstream.b.two import X, Y\nfrom slipstream.a.other import Z",
        "a/other": "",
        "b/two": "def f():\n    from slipstream.c import three",
        "c/three": "import slipstream.a.one",
        "d": "from slipstream.a.one import X",
    }
    assert sorted(wiring.imports_in_circles(source(**files))) == [
        "a → b: one imports b.two.X",
        "a → b: one imports b.two.Y",
        "b → c: two imports c.three",
        "c → a: three imports a.one.",
    ]


def test_imports_in_circles_know_packages_and_files_beside_them() -> None:
    files = {
        "a/__init__": "from slipstream import d",
        "d": "from slipstream.a import X",
    }
    assert len(wiring.imports_in_circles(source(**files))) == 2


def test_imports_for_type_checkers_are_in_no_circle() -> None:
    files = {
        "a/one": "from slipstream.b.two import X",
        "b/two": "if TYPE_CHECKING:\n    from slipstream.a.one import Y",
    }
    assert wiring.imports_in_circles(source(**files)) == []
