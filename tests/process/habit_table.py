"""What comes of every habit of a training loop in every system: exact, documented, or refused.

There is no fourth kind. ``check`` runs one cell of the table as a job of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ForkServer
from habit_systems import MODES, System, system_of
from habits_worker import HABITS, WORKERS, alone
from launches import SLIPSTREAM, Launch

WORKER = Path(__file__).with_name("habits_worker.py")
GUIDE = Path(__file__).parents[2] / "docs" / "running.md"
LIMIT_S = 120.0

# A column is a training mode, see ``habit_systems``. "=" is exact: the weights, and what the loop
# saw, are what the system promises. Other words are explained below.
TABLE = """
                       mean    compact server   first    apart    ahead   local   ako     gadei
replaced_before        =       =       =        =        =        =       =       =       first
replaced_after         =       =       =        unequal  unequal  clocks  =       unsent  shared
cloned                 =       =       wait     unequal  unequal  =       =       =       shared
vector                 =       =       wait     unequal  unequal  clocks  =       unsent  shared
vector_listed_late     =       =       =        unequal  unequal  clocks  =       unsent  shared
vector_after_wait      =       =       =        unequal  unequal  =       =       unsent  shared
sam                    =       =       elements elements elements method  other   method  kind
sam_with_closure       =       =       elements elements elements closure =       closure kind
clamped_late           =       =       =        unequal  unequal  clocks  counted unsent  at_once
written_on_one         differ  differ  rank_0   unequal  unequal  differ  =       unsent  at_once
loaded_on_one          differ  differ  rank_0   unequal  unequal  differ  =       unsent  at_once
swapped_by_hand        =       =       =        =        =        =       =       swapped at_once
swapped_with_gradients =       =       =        unequal  unequal  =       =       swapped at_once
swapped_in_block       =       =       =        =        =        =       =       =       =
averaged_by_hand       =       =       =        =        =        =       =       =       =
hooks                  =       =       =        =        =        updates =       =       =
hooks_of_scaled        =       =       =        =        =        =       =       =       =
replaced_step          =       =       step     step     step     =       =       =       step
own_step               =       =       step     step     step     =       =       =       step
scheduled              =       =       =        =        =        arrived =       =       =
second_phase           =       =       other    other    other    other   other   other   other
steps_in_backward      differ  differ  other    other    other    other   other   other   other
new_head               outside outside outside  outside  outside  outside outside outside outside
criterion              outside outside outside  outside  outside  outside outside outside outside
autograd_grad          =       =       =        =        =        =       =       =       =
wrapped                =       =       elements elements elements arrived =       any     kind
wrapping               =       =       wait     unequal  unequal  clocks  =       unsent  at_once
lookahead              =       =       elements elements elements arrived =       any     kind
stateless              groups  groups  groups   groups   groups   groups  groups  groups  groups
attributes             =       =       elements elements elements =       =       =       kind
changing_method        =       =       elements elements elements method  =       method  kind
schedule_free          =       =       elements elements elements method  =       method  kind
cleared                =       =       =        begun    begun    =       =       =       begun
new_state              =       =       =        begun    begun    =       =       =       begun
state_by_hand          =       =       by_hand  by_hand  by_hand  =       =       =       by_hand
channels_last          =       =       =        =        =        =       =       =       first
channels_last_late     =       =       wait     unequal  unequal  =       =       =       shared
read_nan               nan     nan     nan      nan      nan      nan     nan     nan     nan
nan_loaded             broken  broken  broken   broken   broken   broken  broken  broken  broken
"""
# Systems that differ from the first one of their mode.
EXCEPTIONS = {("scheduled", "bounded_staleness"): "arrived"}


@dataclass(frozen=True)
class Refused:
    """The job ends with this error; "{name}" is what the loop has brought along.

    Attributes:
        says: What the error says, of which one is the name of a parameter or of a call.
    """

    error: str
    says: tuple[str, ...]


@dataclass(frozen=True)
class Documented:
    """A difference that the guide names.

    Attributes:
        sentence: Of ``docs/running.md``.
        warns: Of a warning at run time; empty if the guide alone names the difference.
        always: Whether the warning comes in every run, not only where the order of events asks for
            it.
        alike: Whether all workers end with the same weights, also with the warning.
        exact: Whether these are the exact ones.
        exact_unless_warned: The same, if there was no reason to warn.
    """

    sentence: str
    warns: str = ""
    always: bool = True
    alike: bool = True
    exact: bool = False
    exact_unless_warned: bool = False


KINDS: dict[str, Refused | Documented | None] = {
    "=": None,
    # ---- refused
    "unequal": Refused(
        "RuntimeFault", ("weights were changed outside of the optimizer", "or job.load before")
    ),
    "wait": Refused("RuntimeFault", ("weights were changed after a step", "call job.wait()")),
    "shared": Refused("RuntimeFault", ("'wide.weight' was replaced after the first step",)),
    "elements": Refused("ConfigError", ("{name} is not one known to be elementwise",)),
    "kind": Refused("ConfigError", ("not {name}: use one of these",)),
    "method": Refused("RuntimeFault", ("{call}() has changed weights", "push_pull()")),
    "closure": Refused("RuntimeFault", ("{name}.step() runs the loop's closure", "push_pull()")),
    "other": Refused("RuntimeFault", ("SGD has made a step on '{parameter}'", "job.distribute")),
    "step": Refused("ConfigError", ("SGD.step was replaced", "register_step_pre_hook")),
    "groups": Refused("ConfigError", ("Stateless has no param_groups",)),
    "begun": Refused("ConfigError", ("optimizer.load_state_dict comes before the first step",)),
    "by_hand": Refused("RuntimeFault", ("optimizer's state was changed by hand",)),
    "broken": Refused("CheckpointError", ("wide.weight", "not finite", "nonfinite='pass'")),
    # ---- documented
    "first": Documented(
        "becomes everybody's before the first step, if no other learner trains yet (else a warning "
        "names it",
        warns="has put other weights into 'wide.weight' before its first step",
        always=False,
        exact=True,
    ),
    "at_once": Documented("Weights that the loop changes in place are the shared ones."),
    "unsent": Documented(
        "Weights that the loop writes itself reach no peer",
        warns="the loop has written weights outside of optimizer.step() (in step",
    ),
    "swapped": Documented(
        "peers' updates that arrive meanwhile are lost: a warning names the first parameter",
        warns="the loop has written weights outside of optimizer.step() (in step",
        always=False,
        exact_unless_warned=True,
    ),
    "any": Documented("a worker sends what its optimizer changed in the weights"),
    "counted": Documented("Weights that the loop changes itself count like steps"),
    "clocks": Documented(
        "weights that the loop changes itself differ between workers that have applied different "
        "updates by then",
        warns="rank 1 has ended with other weights than rank 0",
        always=False,
        alike=False,
    ),
    "arrived": Documented(
        "An update of servers has the gradients that had arrived by then, so a learning rate that "
        "changes, or an optimizer that looks at weights, counts them otherwise than one process"
    ),
    "updates": Documented(
        "So does a step pre-hook of your optimizer that changes the gradients of some steps only"
    ),
    "rank_0": Documented(
        "If ranks make different changes, rank 0's count, and a warning names the first parameter",
        warns="'wide.weight' is the first that differs",
    ),
    "differ": Documented(
        "If they differ, rank 0 warns once", warns="other weights than rank 0", alike=False
    ),
    "outside": Documented(
        "was not distributed is named once",
        warns="SGD trains parameters that job.distribute was not given",
        alike=False,
    ),
    "nan": Documented(
        "One warning per job names the rank, the tensor and the step of the first such gradient",
        warns="' is not finite at step 0",
        alike=False,
    ),
}  # fmt: skip
# What the loop has brought along, or has trained otherwise.
NAMES = {
    "sam": {"name": "Sam", "call": "Sam.first_step"},
    "sam_with_closure": {"name": "Sam"},
    "wrapped": {"name": "Around"},
    "lookahead": {"name": "Lookahead"},
    "attributes": {"name": "Switched"},
    "changing_method": {"name": "Switched", "call": "Switched.evaluate"},
    "schedule_free": {"name": "ScheduleFree", "call": "ScheduleFree.eval"},
    "steps_in_backward": {"parameter": "head.bias"},
}


def kind_of(habit: str, system: str) -> str:
    """The word of a cell."""
    return EXCEPTIONS.get((habit, system)) or WORDS[habit, mode_of(system)]


def mode_of(system: str) -> str:
    (mode,) = (mode for mode, systems in MODES.items() if system in systems)
    return mode


def words() -> dict[tuple[str, str], str]:
    modes, *rows = (line.split() for line in TABLE.strip().splitlines())
    assert modes == list(MODES)
    assert [habit for habit, *_ in rows] == list(HABITS)
    return {
        (habit, mode): word for habit, *row in rows for mode, word in zip(modes, row, strict=True)
    }


WORDS = words()


def cells(*modes: str) -> list[Any]:
    """Parameters of a test, system by system: for every commit, or ``long``."""
    return [
        pytest.param(system, habit, marks=[pytest.mark.long] if number else [])
        for mode in modes
        for number, system in enumerate(MODES[mode])
        for habit in HABITS
    ]


@dataclass(frozen=True)
class Ended:
    """A job that has ended.

    Attributes:
        told: What each rank had in the end, or its error; None of one that was killed.
        codes: Exit codes; that of the launcher, if it has started the ranks.
        text: What it wrote.
    """

    told: list[dict[str, Any] | None]
    codes: list[int]
    text: str

    @property
    def warnings(self) -> list[str]:
        return [line for line in self.text.splitlines() if "Warning: " in line]


def run_forked(fork_server: ForkServer, system: str, habit: str) -> Ended:
    """Run a cell on forked ranks."""
    run = fork_server.run(WORKER, habit, system, ".", ranks=WORKERS, limit_s=LIMIT_S)
    return Ended(read(run.folder), [run.codes[rank] for rank in range(WORKERS)], run.told())


def run_learners(launch: Callable[..., Launch], folder: Path, system: str, habit: str) -> Ended:
    """Run a cell on learners, which share memory with their launcher."""
    command = SLIPSTREAM, "run", f"--workers={WORKERS}", "--strategy", system_of(system).strategy
    run = launch(*command, str(WORKER), habit, system, str(folder))
    code = run.wait(LIMIT_S)
    return Ended(read(folder), [code], run.stdout + run.stderr)


def read(folder: Path) -> list[dict[str, Any] | None]:
    files = [folder / f"told.{rank}.json" for rank in range(WORKERS)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files]


def check(ended: Ended, system: str, habit: str) -> None:
    """Fail if a job has not ended as the table says."""
    kind = KINDS[kind_of(habit, system)]
    if isinstance(kind, Refused):
        check_refused(ended, kind, habit)
        return
    assert set(ended.codes) == {0}, ended.text
    told = [each for each in ended.told if each is not None]
    assert len(told) == WORKERS
    alike, exact = (True, True) if kind is None else check_warnings(ended, kind)
    if alike:
        assert told[0]["weights"] == told[1]["weights"]
    wanted = alone(habit, system_of(system))
    assert [each["seen"] for each in told] == [wanted["seen"]] * WORKERS
    if exact:
        check_exact(told, wanted, system_of(system))
    if kind is None:
        assert ended.warnings == [], ended.text


def check_warnings(ended: Ended, kind: Documented) -> tuple[bool, bool]:
    """Return whether workers' weights are the same ones then, and the exact ones."""
    found = [line for line in ended.warnings if kind.warns and kind.warns in line]
    assert found or not (kind.warns and kind.always), ended.text
    others = [line for line in ended.warnings if line not in found]
    # Replicas that differ are named besides.
    assert all(found and "other weights than rank 0" in line for line in others), ended.text
    return kind.alike or not (found or kind.always), kind.exact or (
        kind.exact_unless_warned and not found
    )


def check_refused(ended: Ended, kind: Refused, habit: str) -> None:
    errors = [each["error"] for each in ended.told if each is not None and "error" in each]
    says = [
        part.format(**{"parameter": "wide.weight"} | NAMES.get(habit, {})) for part in kind.says
    ]
    assert all(code > 0 for code in ended.codes), ended.text
    assert any(error.startswith(kind.error) for error in errors), ended.text
    assert all(part in error for error in errors for part in says), (says, errors)
    assert "Traceback" not in ended.text, ended.text


def check_exact(told: list[dict[str, Any]], wanted: dict[str, Any], system: System) -> None:
    reference = torch.tensor(wanted["weights"])
    most = system.tolerance
    if system.is_compressed:
        most *= float((reference - torch.tensor(wanted["begun"])).norm())
    for each in told:
        assert float((torch.tensor(each["weights"]) - reference).norm()) <= most
        for one, other in zip(each["in_step"], wanted["in_step"], strict=True):
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=most)


def guide() -> str:
    """The guide's text on one line, without what makes it bold."""
    return " ".join(GUIDE.read_text().replace("**", "").split())
