"""Imports point one way: systems → strategy → plan, compat → methods → routes → axes → parts,
types, errors; nothing points back up."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream

SOURCE = Path(slipstream.__file__).parent

GROUND = {"types", "errors", "units", "printable", "parts", "_native"}
AXES = {
    *("topologies", "consistency", "codecs", "schedules", "updates", "outer_optimizers"),
    "planning",
}
PLANS = GROUND | AXES | {"routes", "methods", "plan", "compat", "rules"}
DECISIONS = PLANS | {"strategy"}
# Rooms of these packages have rows of their own; each may import those before it in its list.
TORCH = {
    f"torch/{room}"
    for room in [
        "tensors",
        "optimizers",
        "checkpoints",
        "capture",
        "channels",
        "modes",
        "distribute",
    ]
}
RUNTIME = {
    f"runtime/{room}"
    for room in [
        "process",
        "files",
        "figures",
        "members",
        "exchange",
        "gossip",
        "hosts",
        "shared_memory",
        "launch",
        "servers",
    ]
}
APPS = {f"apps/{room}" for room in ["bench", "cli", "lab", "probing", "service", "studies"]}
ROOMS = TORCH | RUNTIME | APPS
CHANNELS = {"runtime/process", "runtime/members", "runtime/exchange"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "parts": set(),
    "part_modules": {"errors", "parts", "printable"},
    "units": {"errors", "printable"},
    "printable": set(),
    "input_files": {"units"},
    # The axes are pure, and do not know each other.
    **dict.fromkeys(AXES, GROUND),
    "updates": GROUND | {"outer_optimizers"},  # an update names one of them
    "routes": GROUND | {"codecs", "topologies", "planning"},
    "methods": GROUND | AXES | {"routes"},
    "plan": GROUND | AXES | {"routes", "methods"},
    "compat": {"errors", "parts", "rules", "methods"},
    "rules": {"parts"},
    "fields": {"parts"},
    "strategy_json": PLANS | {"part_modules"},
    "strategy": PLANS | {"fields", "part_modules", "strategy_json"},
    "systems": GROUND | AXES | {"routes", "methods", "strategy", "input_files"},
    "transports": GROUND,
    # A process and its files, its membership, then what it exchanges.
    "runtime/process": GROUND | {"input_files", "part_modules"},
    "runtime/files": GROUND,
    "runtime/figures": GROUND | {"runtime/files"},
    "runtime/members": GROUND | {"planning", "transports", "runtime/process"},
    "runtime/exchange": DECISIONS | {"transports", "runtime/process", "runtime/members"},
    "runtime/gossip": DECISIONS | {"transports", "runtime/process", "runtime/members"},
    "runtime/hosts": DECISIONS | {"transports"} | CHANNELS,
    "runtime/shared_memory": DECISIONS | {"transports", "runtime/process", "runtime/files"},
    "runtime/launch": DECISIONS
    | {"transports", "runtime/process", "runtime/files", "runtime/shared_memory"},
    "runtime/servers": DECISIONS | {"transports", "runtime/files", "runtime/launch"} | CHANNELS,
    # From tensors to ``job.distribute``.
    "torch/tensors": DECISIONS | {"runtime/process", "runtime/figures", "runtime/exchange"},
    "torch/optimizers": DECISIONS | {"transports", "runtime/files", "torch/tensors"},
    "torch/checkpoints": DECISIONS
    | {"transports", "torch/tensors", "torch/optimizers"}
    | RUNTIME - {"runtime/gossip", "runtime/hosts", "runtime/launch"},
    "torch/capture": DECISIONS
    | {"transports", "torch/tensors", "torch/optimizers", "torch/checkpoints"}
    | {"runtime/files", "runtime/figures"}
    | CHANNELS,
    "torch/channels": DECISIONS
    | {"transports", "torch/tensors", "runtime/files", "runtime/gossip", "runtime/hosts"}
    | CHANNELS,
    "torch/modes": DECISIONS
    | {"transports"}
    | RUNTIME - {"runtime/launch"}
    | TORCH - {"torch/distribute"},
    "torch/distribute": DECISIONS | {"transports"} | RUNTIME | TORCH,
    "testing": DECISIONS | {"transports", "runtime/members", "runtime/exchange", "runtime/servers"},
    "sessions": DECISIONS | {"systems", "transports"} | RUNTIME | TORCH,
    "job_figures": {"errors", "plan", "methods", "sessions"} | RUNTIME | TORCH,
    "job_metrics": {"errors", "sessions", "job_figures"} | RUNTIME | TORCH,
    "uncaught_exit": set(),
    "job_end": {"job_figures", "sessions", "uncaught_exit"} | RUNTIME | TORCH,
    "job": DECISIONS
    | {"systems", "sessions"}
    | RUNTIME
    | TORCH
    | {"job_figures", "job_metrics", "job_end"},
    "initialization": {"errors", "job", "part_modules", "sessions", "transports"} | RUNTIME | TORCH,
    # Built on the public face, and on how processes are started and measured.
    "apps/lab": {"errors", "units", "printable"},
    "apps/bench": GROUND
    | RUNTIME
    | {"input_files", "systems", "transports", "initialization", "apps/lab", ""},
    "apps/probing": GROUND | {"planning", "transports"} | RUNTIME,
    "apps/studies": {"errors"},
    "apps/service": GROUND | {"initialization", ""} | RUNTIME,
    "apps/cli": GROUND
    | RUNTIME
    | {"input_files", "systems", "strategy", "routes", "methods", "planning", "torch/tensors", ""}
    | {"part_modules"}
    | APPS,
    "__main__": {"apps/cli"},
    # Users of the public face, each for one framework; launchers know how processes are started.
    "integrations": {"errors", "compat", "methods", "strategy", "systems", "initialization", ""}
    | RUNTIME,
    "__init__": DECISIONS
    | {"initialization", "job", "systems", "testing", "apps/studies"}
    | RUNTIME
    | TORCH
    | {"integrations"},  # when a user names one
}
EXCEPTIONS = {
    # A server that updates weights needs torch, and imports it when it learns that it must.
    ("runtime/servers/server.py", "torch/optimizers"),
    ("apps/bench/contestants/ablation.py", "codecs"),  # it takes a part out of a system
    ("integrations/accelerate.py", "torch/tensors"),  # copies of a model are plain
    ("integrations/ray/workers.py", "job_end"),  # its process outlives the script
    (
        "integrations/jax.py",
        "torch/distribute",
    ),  # it shares all gradients before the first one leaves
    # For type checkers only: a plan holds its strategy, and rules are about one.
    ("plan.py", "strategy"),
    ("compat.py", "strategy"),
}
# Beside slipstream.torch and its measurements, torch is the business of these alone.
TORCH_OUTSIDE = {
    "job.py",
    "job_figures.py",
    "job_metrics.py",
    "apps/cli/digits.py",
    "apps/service/net.py",
    "apps/service/learn.py",
    "apps/service/task.py",
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


def room_of(dotted: str) -> str:
    """``runtime/servers`` for runtime.servers.server, ``types`` for types."""
    names = dotted.split(".")
    two = "/".join(names[:2])
    return two if two in ROOMS else names[0]


def part(module: Path) -> str:
    """The room of a file."""
    return room_of(".".join(module.relative_to(SOURCE).with_suffix("").parts))


def imported(module: Path) -> Iterator[str]:
    """Dotted names of everything a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(module.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{place(module)} imports relative to itself"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_part_is_in_the_table() -> None:
    # A package of rooms has nothing of its own.
    assert {part(module) for module in MODULES} - {"runtime", "torch", "apps"} <= set(MAY_IMPORT)


@pytest.mark.parametrize("module", MODULES, ids=place)
def test_imports_point_one_way(module: Path) -> None:
    allowed = MAY_IMPORT.get(part(module), set()) | {part(module)}
    for name in imported(module):
        top, _, rest = name.partition(".")
        target = room_of(rest)
        if top == "slipstream" and (place(module), target) not in EXCEPTIONS:
            assert target in allowed, f"{place(module)} imports slipstream.{rest}"


@pytest.mark.parametrize("module", MODULES, ids=place)
def test_torch_stays_where_it_belongs(module: Path) -> None:
    if (
        part(module) in {"torch", "apps/bench", "apps/studies", "sessions"} | TORCH
        or place(module) in TORCH_OUTSIDE
    ):
        return
    assert not [name for name in imported(module) if name.split(".")[0] == "torch"]


PURE = sorted(AXES | {"routes", "methods", "plan", "compat", "rules", "strategy", "parts", "types"})


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
        "slipstream.apps.cli",
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
