"""Imports point one way: systems → strategy → plan, compat → routes → axes → parts, types, errors;
nothing points back up."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream

SOURCE = Path(slipstream.__file__).parent

GROUND = {"types", "errors", "units", "printable", "parts", "_native"}
AXES = {"topologies", "consistency", "codecs", "schedules", "updates", "planning"}
PLANS = GROUND | AXES | {"routes", "plan", "compat", "rules"}
DECISIONS = PLANS | {"strategy"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "parts": set(),
    "units": {"errors", "printable"},
    "printable": set(),
    "input_files": {"units"},
    # The axes are pure, and do not know each other.
    **dict.fromkeys(AXES, GROUND),
    "routes": GROUND | {"codecs", "topologies", "planning"},
    "plan": GROUND | AXES | {"routes"},
    "compat": {"errors", "parts", "rules"},
    "rules": {"parts"},
    "fields": {"parts"},
    "strategy": PLANS | {"fields"},
    "systems": GROUND | AXES | {"routes", "strategy", "input_files"},
    "transports": GROUND,
    "runtime": DECISIONS | {"transports", "input_files"},
    "torch": DECISIONS | {"transports", "runtime"},
    "testing": DECISIONS | {"transports", "runtime"},
    "lab": {"errors", "units", "printable"},
    "bench": GROUND
    | {"input_files", "lab", "systems", "runtime", "transports", "initialization", ""},
    "probing": GROUND | {"planning", "transports", "runtime"},
    "sessions": DECISIONS | {"systems", "transports", "runtime", "torch"},
    "job_figures": {"errors", "plan", "runtime", "sessions"},
    "job_metrics": {"errors", "runtime", "sessions", "job_figures"},
    "uncaught_exit": set(),
    "job_end": {"job_figures", "runtime", "sessions", "torch", "uncaught_exit"},
    "job": DECISIONS
    | {"systems", "runtime", "sessions", "torch", "job_figures", "job_metrics", "job_end"},
    "initialization": {"errors", "job", "runtime", "sessions", "torch", "transports"},
    "cli": GROUND
    | {"input_files", "systems", "strategy", "routes", "planning", "runtime", "torch", "lab"}
    | {"bench", "probing", "service", ""},  # the last is the public face, as users see it
    "__main__": {"cli"},
    # A user of the public face, as scripts are; the API knows how processes are started.
    "service": GROUND | {"runtime", "initialization", ""},
    # Users of the public face, each for one framework; launchers know how processes are started.
    "integrations": {"errors", "compat", "strategy", "systems", "runtime", "initialization", ""},
    "__init__": DECISIONS
    | {"initialization", "job", "runtime", "systems", "testing", "torch"}
    | {"integrations"},  # when a user names one
}
EXCEPTIONS = {
    # A server that updates weights needs torch, and imports it when it learns that it must.
    ("runtime/servers/server.py", "torch"),
    ("bench/contestants/ablation.py", "codecs"),  # it takes a part out of a system
    ("integrations/accelerate.py", "torch"),  # copies of a model are plain
    ("integrations/ray/workers.py", "job_end"),  # its process outlives the script
    ("integrations/jax.py", "torch"),  # it shares all gradients before the first one leaves
    # For type checkers only: a plan holds its strategy, and rules are about one.
    ("plan.py", "strategy"),
    ("compat.py", "strategy"),
}
# Beside slipstream.torch and its measurements, torch is the business of these alone.
TORCH_OUTSIDE = {
    "job.py",
    "job_figures.py",
    "job_metrics.py",
    "cli/digits.py",
    "service/net.py",
    "service/learn.py",
    "service/task.py",
    "runtime/members/rendezvous.py",  # its TCPStore
    "runtime/members/store.py",
    "transports/collective.py",
    "integrations/accelerate.py",
    "integrations/jax.py",
}
# The stub is what ``slipstream`` takes its public names from.
MODULES = sorted([*SOURCE.rglob("*.py"), SOURCE / "__init__.pyi"])


def place(module: Path) -> str:
    return module.relative_to(SOURCE).as_posix()


def part(module: Path) -> str:
    """``runtime`` for runtime/servers/server.py, ``types`` for types.py."""
    return module.relative_to(SOURCE).parts[0].partition(".")[0]


def imported(module: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(module)} imports relative to itself"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_part_is_in_the_table() -> None:
    assert {part(module) for module in MODULES} <= set(MAY_IMPORT)


@pytest.mark.parametrize("module", MODULES, ids=place)
def test_imports_point_one_way(module: Path) -> None:
    allowed = MAY_IMPORT[part(module)] | {part(module)}
    for name in imported(module):
        top, _, rest = name.partition(".")
        target = rest.partition(".")[0]
        if top == "slipstream" and (place(module), target) not in EXCEPTIONS:
            assert target in allowed, f"{place(module)} imports slipstream.{rest}"


@pytest.mark.parametrize("module", MODULES, ids=place)
def test_torch_stays_where_it_belongs(module: Path) -> None:
    if part(module) in ("torch", "bench", "sessions") or place(module) in TORCH_OUTSIDE:
        return
    assert not [name for name in imported(module) if name.split(".")[0] == "torch"]


PURE = sorted(AXES | {"routes", "plan", "compat", "rules", "strategy", "parts", "types"})


@pytest.mark.parametrize("pure", PURE)
def test_axes_and_plans_do_no_input_or_output_and_look_at_no_clock(pure: str) -> None:
    forbidden = {"time", "threading", "socket", "os", "zmq", "random", "subprocess", "asyncio"}
    modules = [module for module in MODULES if part(module) == pure]
    assert modules
    for module in modules:
        assert not {name.split(".")[0] for name in imported(module)} & forbidden, place(module)


@pytest.mark.parametrize(
    "module",
    [
        "slipstream",
        "slipstream.cli",
        "slipstream.systems",
        "slipstream.runtime.servers.server",
        "slipstream.runtime.exchange.rounds",
        "slipstream.testing",
    ],
)
def test_servers_and_command_lines_start_without_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_are_there_and_come_when_they_are_used() -> None:
    code = (
        "import sys, slipstream\n"
        "slipstream.push_pull(), slipstream.allreduce(), slipstream.ConfigError\n"
        "assert 'torch' not in sys.modules\n"
        "for name in slipstream.__all__: getattr(slipstream, name)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = slipstream.nonsense
    modules = {n for n, home in slipstream._HOMES.items() if home in slipstream._PACKAGES}
    assert set(slipstream._HOMES) - modules == set(slipstream.__all__)
    assert {"Strategy", "push_pull", "compat", "systems", "testing"} <= set(dir(slipstream))
