"""Parts of a user's own in JSON: named by module and class, and imported only if listed."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import make_plan, vector

from slipstream.codecs import AnyCodec, Dense
from slipstream.consistency import Consistency
from slipstream.errors import ConfigError, IncompatibleRoute, SlipstreamError
from slipstream.initialization import with_arguments
from slipstream.methods import Rounds
from slipstream.part_modules import MOST_CHARACTERS, MOST_MODULES, module_names
from slipstream.parts import Part
from slipstream.routes import ByTensor, Collective, Everywhere, Large, Prefer, Route, Rule
from slipstream.runtime.launch.processes import PARTS, PARTS_PATH
from slipstream.runtime.servers.configuration import Configuration
from slipstream.runtime.servers.server import allowed_parts
from slipstream.strategy import Strategy
from slipstream.systems import parse
from slipstream.testing import simulate
from slipstream.topologies import Mesh, Sharded
from slipstream.torch.channels.buckets import wire_dtype
from slipstream.types import Cluster
from slipstream.updates import LocalSteps, Update

SOURCE = '''
    """Parts of a user's own."""

    import functools
    from typing import Annotated, ClassVar

    import msgspec

    from slipstream.codecs import AnyCodec, Dense
    from slipstream.consistency.admission import Admission
    from slipstream.errors import ConfigError
    from slipstream.outer_optimizers import SGD
    from slipstream.parts import Part
    from slipstream.schedules import WaitFree
    from slipstream.topologies import Mesh

    made = []


    class Curve(Part, frozen=True):
        power: float = 2.0


    class Other(Part, frozen=True):
        power: float = 2.0


    class Signed(Dense, frozen=True):
        size: Annotated[float, msgspec.Meta(gt=0)] = 1.0
        steps: tuple[int, ...] = ()
        curve: Curve | None = None
        inside: AnyCodec = Dense()

        def __post_init__(self):
            super().__post_init__()
            made.append("Signed")
            if self.size == 13:
                raise ConfigError("size=13: choose another")
            if self.size == 14:
                1 / 0


    class Ring(Mesh, frozen=True):
        pass


    class Everyone(Admission, frozen=True):
        pass


    class Eager(WaitFree, frozen=True):
        pass


    class Slow(SGD, frozen=True):
        pass


    class Needs(Signed, frozen=True, kw_only=True):
        count: int


    class Listed(Signed, frozen=True):
        values: list[int] = []


    class Outside(Signed, frozen=True):
        class Inside(Signed, frozen=True):
            pass


    class Odd(Signed, frozen=True):
        strange: "NoSuchName" = 3


    class Quiet(Signed, frozen=True):
        def __repr__(self):
            return "Quiet()"


    class NoPart(msgspec.Struct, frozen=True):
        pass


    def make():
        made.append("make")


    Again = Signed
'''
MODULE = "own_parts_of_test"
ALLOWED = (MODULE,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of modules, where imports are found."""
    folder = tmp_path_factory.mktemp("modules")
    (folder / f"{MODULE}.py").write_text(textwrap.dedent(SOURCE))
    (folder / "fails_on_import.py").write_text("raise OSError('no\\x1b[2J disk')\n")
    (folder / "ends_on_import.py").write_text("import sys\nsys.exit(3)\n")
    (folder / "unlisted.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').touch()")
    sys.path.append(str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def own(folder: Path) -> ModuleType:
    assert folder
    return import_module(MODULE)


def up(codec: Any) -> Strategy:
    return Strategy("mine", Rounds(Everywhere(Route(Sharded(), up=codec))))


def of_every_kind(own: ModuleType) -> dict[str, Strategy]:
    """By kind, a strategy with a part of one's own."""
    signed: Any = own.Signed(size=0.5, steps=(1, 2), curve=own.Curve(3.0), inside=own.Signed())
    by_tensor = ByTensor(
        (Rule(Large(), Prefer((Route(Mesh(), up=signed), Route(Mesh())))),), Route(Mesh())
    )
    routes = Everywhere(Route(Mesh()))
    return {
        "codec": up(signed),
        "codec down": Strategy("mine", Rounds(Everywhere(Route(Sharded(), down=signed)))),
        "codec of a rule": Strategy("mine", Rounds(by_tensor)),
        "required field": up(own.Needs(count=3)),
        "topology": Strategy("mine", Rounds(Everywhere(Route(own.Ring())))),
        "admission": Strategy("mine", Rounds(routes, Consistency(own.Everyone()))),
        "schedule": Strategy("mine", Rounds(routes, schedule=own.Eager())),
        "outer optimizer": Strategy(
            "mine", Rounds(routes, update=Update(LocalSteps(), own.Slow(0.25)))
        ),
    }


KINDS = ["codec", "codec down", "codec of a rule", "required field", "topology", "admission"]
KINDS += ["schedule", "outer optimizer"]


@pytest.mark.parametrize("kind", KINDS)
def test_own_part_comes_back_from_json(kind: str, own: ModuleType) -> None:
    strategy = of_every_kind(own)[kind]
    text = strategy.to_json(parts=ALLOWED)
    assert f'"part":"{MODULE}:' in text
    again = Strategy.from_json(text, parts=ALLOWED)
    assert again == strategy
    assert hash(again) == hash(strategy)
    assert again.config_fingerprint() == strategy.config_fingerprint()
    assert parse(text, parts=["something.other", *ALLOWED]) == strategy


@pytest.mark.parametrize("kind", KINDS)
def test_own_part_without_its_module_is_refused_with_the_way_out(
    kind: str, own: ModuleType
) -> None:
    strategy = of_every_kind(own)[kind]
    said = rf"{MODULE}:.* may not be imported .*--parts {MODULE}"
    with pytest.raises(ConfigError, match=said):
        strategy.to_json()
    with pytest.raises(ConfigError, match=said):
        Strategy.from_json(strategy.to_json(parts=ALLOWED), parts=[f"{MODULE}.more", "own_parts"])


def named(**part: Any) -> str:
    """The JSON of a strategy whose codec is this."""
    plain = json.loads(up(Dense()).to_json())
    plain["method"]["routes"]["route"]["up"] = part
    return json.dumps(plain)


REFUSED = {
    "no such class": ("Absent", {}, "defines no class Absent"),
    "a function": ("make", {}, "defines no class make"),
    "a module within": ("functools", {}, "defines no class functools"),
    "a struct that is no part": ("NoPart", {}, "defines no class NoPart"),
    "slipstream's own by another way": ("Dense", {}, "defines no class Dense"),
    "a second name": ("Again", {}, "defines no class Again"),
    "an attribute": ("Outside.Inside", {}, "write module:Class"),
    "an attribute's attribute": ("make.__globals__", {}, "write module:Class"),
    "an empty name": ("", {}, "write module:Class"),
    "two colons": ("Signed:size", {}, "write module:Class"),
    "a long name": ("S" * 10_000, {}, "10018 characters"),
    "a topology": ("Ring", {}, "takes a Codec of your own .* and .*:Ring is none"),
    "an outer optimizer": ("Slow", {}, "takes a Codec of your own"),
    "a part of no kind": ("Curve", {}, "takes a Codec of your own"),
    "unknown field": ("Signed", {"speed": 3}, "no field 'speed'"),
    "missing field": ("Needs", {}, "lacks its field 'count'"),
    "value of another type": ("Signed", {"size": "large"}, "up.size: Expected `float`"),
    "value out of range": ("Signed", {"size": -1.0}, "up.size: Expected `float` > 0"),
    "value that the part refuses": ("Signed", {"size": 13.0}, "size=13: choose another"),
    "value on which the part fails": ("Signed", {"size": 14.0}, "Signed.*: .*division by zero"),
    "item of another type": ("Signed", {"steps": [1, "x"]}, "up.steps: Expected `int`"),
    "list where there is none": ("Signed", {"size": [{"part": "a:B"}]}, "up.size: Expected"),
    "values that change": ("Listed", {"values": [1]}, "unhashable type: 'list'; use tuples"),
    "unreadable annotations": ("Odd", {}, "annotations cannot be read.*NoSuchName"),
    "nested: other module": ("Signed", {"inside": {"part": "unlisted:X"}}, "module unlisted may"),
    "nested: other class": (
        "Signed",
        {"curve": {"part": f"{MODULE}:Other"}},
        r"up.curve takes no part of your own \(Curve, NoneType\), and .*:Other is none",
    ),
    "nested: bad field": (
        "Signed",
        {"curve": {"part": f"{MODULE}:Curve", "power": []}},
        "up.curve.power: Expected `float`",
    ),
    "nested: slipstream's with a bad field": (
        "Signed",
        {"inside": {"part": "Dense", "wire": 3}},
        "up.inside: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_own_part_that_does_not_fit_is_refused(case: str, own: ModuleType) -> None:
    name, fields, said = REFUSED[case]
    own.made.clear()
    with pytest.raises(ConfigError, match=said) as refusal:
        Strategy.from_json(named(part=f"{MODULE}:{name}", **fields), parts=ALLOWED)
    assert "make" not in own.made
    assert len(str(refusal.value)) < 1000


def test_own_codec_where_a_topology_stands_is_refused(own: ModuleType) -> None:
    assert own
    plain = json.loads(up(Dense()).to_json())
    plain["method"]["routes"]["route"]["topology"] = {"part": f"{MODULE}:Signed"}
    said = "topology takes a Topology of your own"
    with pytest.raises(ConfigError, match=said):
        Strategy.from_json(json.dumps(plain), parts=ALLOWED)


def test_own_part_where_none_is_possible_is_refused(own: ModuleType) -> None:
    policy: Any = own.Curve()
    with pytest.raises(ConfigError, match=r"routes takes no part of your own \(Everywhere, "):
        Strategy("mine", Rounds(policy)).to_json(parts=ALLOWED)


@pytest.mark.parametrize(
    "name",
    [
        "unlisted:Part",
        "unlisted.more:Part",
        f"{MODULE}.unlisted:Part",
        f"unlisted\0{MODULE}:Part",
        f" {MODULE}:Signed",
        "./unlisted:Part",
        "os:system",
        "..unlisted:Part",
        ":Part",
        "unlisted:",
        "m" * 10_000 + ":Part",
        "__main__:Part",
    ],
)
def test_modules_that_are_not_listed_are_never_imported(name: str, folder: Path) -> None:
    before = set(sys.modules)
    with pytest.raises(ConfigError) as refusal:
        Strategy.from_json(named(part=name), parts=ALLOWED)
    assert set(sys.modules) == before
    assert not (folder / "unlisted.py.ran").exists()
    assert len(str(refusal.value)) < 1000
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("module", "said"),
    [
        ("no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("no_such_package.parts", "No module named 'no_such_package'"),
        ("fails_on_import", r"OSError: no\\x1b\[2J disk"),
        ("ends_on_import", "SystemExit: 3"),
    ],
)
def test_module_that_cannot_be_imported_is_one_message(
    module: str, said: str, folder: Path
) -> None:
    assert folder
    with pytest.raises(ConfigError, match=f"{module} cannot be imported .*{said}"):
        Strategy.from_json(named(part=f"{module}:Signed"), parts=[module])


class InTheScript(Dense, frozen=True):
    """It stands for one of the script: its module is the one that runs."""


def test_part_of_the_script_itself_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(InTheScript, "__module__", "__main__")
    mine: Any = InTheScript()
    without_servers = Strategy("mine", Rounds(Everywhere(Route(Mesh(), up=mine))))
    assert simulate(without_servers, [vector("w", 9)], workers=2).trace
    with pytest.raises(ConfigError, match=r"InTheScript is in the script itself.*module beside"):
        up(mine).to_json(parts=ALLOWED)


def test_part_within_a_function_is_refused(own: ModuleType) -> None:
    class Local(own.Signed, frozen=True):  # type: ignore[misc,name-defined]
        """It has no name that can be looked up."""

    with pytest.raises(ConfigError, match="at the top of its module"):
        up(Local()).to_json(parts=[__name__])


def test_fingerprint_has_module_and_fields_whatever_the_repr(own: ModuleType) -> None:
    first, second = (up(own.Quiet(size=size)) for size in (1.0, 2.0))
    assert repr(first) == repr(second)
    assert first.config_fingerprint() != second.config_fingerprint()
    assert any(f"{MODULE}:Quiet" in line for line in first.config_fingerprint())


@pytest.mark.parametrize(
    ("given_names", "said"),
    [
        (["my-parts"], "no module's full name"),
        (["parts/signs.py"], "no module's full name"),
        ([".relative"], "no module's full name"),
        ([""], "no module's full name"),
        (["a:B"], "no module's full name"),
        (["m" * (MOST_CHARACTERS + 1)], "no module's full name"),
        ([3], "no module's full name"),
        (["__main__"], "parts in the script itself"),
        ("signs", "give a list of modules"),
        ([f"m{number}" for number in range(MOST_MODULES + 1)], "give at most 64"),
    ],
)
def test_what_is_no_list_of_modules_is_refused(given_names: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        module_names(given_names)
    with pytest.raises(ConfigError, match=said):
        up(Dense()).to_json(parts=given_names)


def configuration(strategy: str) -> bytes:
    """A configuration with this strategy."""
    sent = Configuration.of(make_plan([vector("w", 9)]), {}, {}, 5.0, None)
    return msgspec.structs.replace(sent, strategy=msgspec.Raw(strategy.encode())).encode()


def test_server_makes_the_plan_of_own_parts(own: ModuleType) -> None:
    plan = up(own.Signed(size=0.5)).plan([vector("w", 9)], make_plan([vector("w", 9)]).cluster)
    sent = Configuration.of(plan, {}, {}, 5.0, None, ALLOWED).encode()
    received = Configuration.decode(sent)
    assert received.plan(ALLOWED) == plan
    with pytest.raises(ConfigError, match=f"{MODULE} may not be imported"):
        received.plan()


def test_simulated_servers_have_the_parts_of_the_strategy(own: ModuleType) -> None:
    specs = [vector("w", 9)]
    mine, like = (simulate(up(c), specs, workers=2, servers=1) for c in (own.Signed(), Dense()))
    assert mine.trace
    assert mine.trace == like.trace


def test_server_looks_for_listed_modules_after_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", ["/own", "/installed"])
    places = os.pathsep.join(["/script", "/installed", "", "/more"])
    assert allowed_parts({PARTS_PATH: places}) == ()
    assert sys.path == ["/own", "/installed"]
    assert allowed_parts({PARTS: "a.b,c", PARTS_PATH: places}) == ("a.b", "c")
    assert sys.path == ["/own", "/installed", "/script", "/more"]
    with pytest.raises(ConfigError, match="no module's full name"):
        allowed_parts({PARTS: "a/b.py"})


def test_list_of_modules_in_the_environment_and_in_init() -> None:
    variables = {PARTS: "a.b,c"}
    assert with_arguments(variables, *[None] * 6).parts == ("a.b", "c")
    assert with_arguments(variables, *[None] * 5, parts=["d"]).parts == ("d",)
    assert with_arguments(variables, *[None] * 5, parts=[]).parts == ()
    with pytest.raises(ConfigError, match="'a-b' is no module's full name"):
        with_arguments({PARTS: "a-b"}, *[None] * 6)


def test_run_refuses_what_is_no_module(slipstream: Any, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.touch()
    code, _, said = slipstream("run", "--parts", "signs.py:Signed", script)
    assert code != 0
    assert "'signs.py:Signed' is no module's full name" in said


def test_run_takes_the_json_of_a_strategy_with_own_parts(
    slipstream: Any,
    folder: Path,
    tmp_path: Path,
    own: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The launcher finds modules beside the script."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # which the launcher extends
    script = tmp_path / "script.py"
    script.touch()
    (tmp_path / "beside.py").write_text((folder / f"{MODULE}.py").read_text())
    text = up(own.Signed()).to_json(parts=ALLOWED).replace(MODULE, "beside")
    code, _, said = slipstream("run", "--strategy", text, script)
    assert (code != 0, "--parts beside" in said) == (True, True)
    code, _, said = slipstream("run", "--parts", "beside", "--strategy", text, script)
    assert code == 0, said


def test_collectives_do_not_take_a_codec_derived_from_dense(own: ModuleType) -> None:
    routes: Any = Everywhere(Route(Mesh(), up=own.Signed(), over=Collective()))
    plan = Strategy("mine", Rounds(routes)).plan([vector("w", 9)], Cluster(2))
    with pytest.raises(IncompatibleRoute, match="collectives carry dense values only"):
        wire_dtype(plan, plan.chunks[0])


FIELDS = ["part", "route", "up", "down", "topology", "size", "steps", "inside", "curve"]
NAMES = st.sampled_from(
    [
        *("Dense", "Sharded", "Route", "Everywhere", "os:system", "unlisted:X", "a:b.c", ":", "::"),
        *(f"{MODULE}:{name}" for name in ("Signed", "Ring", "Curve", "made", "NoPart", "Odd", "x")),
    ]
)
LEAVES = NAMES | st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
PLAIN = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=5)
    ),
    max_leaves=12,
)


@given(data=st.data())
def test_hostile_configuration_imports_nothing_and_is_refused_or_a_plan(
    data: st.DataObject,
) -> None:
    plain = json.loads(up(Dense()).to_json())
    place = plain
    for key in ("method", "routes", "route", "up"):
        if data.draw(st.booleans()):
            place[key] = data.draw(PLAIN)
            break
        place = place[key]
    else:
        place.update(data.draw(st.dictionaries(st.sampled_from(FIELDS), PLAIN, max_size=4)))
    content = configuration(json.dumps(plain))
    before = set(sys.modules)
    with contextlib.suppress(SlipstreamError):
        plan = Configuration.decode(content).plan(ALLOWED)
        assert all(isinstance(route, Route) for route in plan.routes)
    assert set(sys.modules) <= before | {MODULE, "functools"}


def test_deep_json_of_own_parts_is_refused(own: ModuleType) -> None:
    nested = own.Signed()
    for _ in range(28):
        nested = own.Signed(inside=nested)
    assert Strategy.from_json(up(nested).to_json(parts=ALLOWED), parts=ALLOWED) == up(nested)
    for depth, said in ((30, "deeper than 32 levels"), (400, "deeper than"), (9000, "no strategy")):
        part = f'{{"part":"{MODULE}:Signed","inside":' * depth + '{"part":"Dense"}' + "}" * depth
        text = named(part="HERE").replace('{"part": "HERE"}', part)
        with pytest.raises(ConfigError, match=said):
            Strategy.from_json(text, parts=ALLOWED)


def test_kinds_of_interfaces_are_types_of_fields() -> None:
    """A key that no field has would let no own part in."""
    from slipstream.strategy_json import INTERFACES, choices

    taken = set()
    pending: list[Any] = [Strategy]
    seen: set[Any] = set()
    while pending:
        kind = pending.pop()
        for field in msgspec.structs.fields(kind):
            taken.add(field.type)
            inner = [field.type, *getattr(field.type, "__args__", ())]
            for each in (one for outer in inner for one in choices(outer)):
                if isinstance(each, type) and issubclass(each, Part) and each not in seen:
                    seen.add(each)
                    pending.append(each)
    assert set(INTERFACES) <= taken
    assert AnyCodec in taken
