"""Examples in docstrings do what they say."""

import doctest
import sys
from importlib import import_module
from pathlib import Path

import pytest

import slipstream

SOURCE = Path(slipstream.__file__).parent


def name_of(module: Path) -> str:
    dotted = ".".join(module.relative_to(SOURCE).with_suffix("").parts)
    return f"slipstream.{dotted}".removesuffix(".__init__")


WITH_EXAMPLES = sorted(
    name_of(module) for module in SOURCE.rglob("*.py") if ">>> " in module.read_text()
)


def test_the_parts_of_strategies_have_examples() -> None:
    single = {"strategy", "routes", "updates"}
    codecs = {f"codecs.{name}" for name in ("dense", "filter", "select", "one_bit", "factors")}
    topologies = {f"topologies.{name}" for name in ("mesh", "sharded", "tree")}
    consistency = {f"consistency.{name}" for name in ("admission", "consistency", "gates")}
    parts = single | codecs | topologies | consistency | {"codecs.rows", "codecs.residual"}
    assert {f"slipstream.{part}" for part in parts} <= set(WITH_EXAMPLES)


COMPOSED = ("routes", "updates", "schedules", "strategy", "systems", "planning")


@pytest.mark.parametrize("name", slipstream.__all__)
def test_what_users_compose_has_an_example(name: str) -> None:
    home = slipstream._HOMES[name].removeprefix("slipstream.")
    if home.partition(".")[0] in COMPOSED:
        assert ">>> " in getattr(slipstream, name).__doc__


@pytest.fixture
def plain_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """No job around it, and what an example changes in the process is undone."""
    for variable in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


@pytest.mark.usefixtures("plain_process")
@pytest.mark.parametrize("name", WITH_EXAMPLES)
def test_examples_are_true(name: str) -> None:
    found = doctest.testmod(import_module(name))
    assert found.attempted, f"the examples of {name} are not where doctest looks"
    assert not found.failed
