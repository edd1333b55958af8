"""Errors cross processes: schedulers and frameworks pickle them, and show what comes out."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Classes are known once their modules are imported.
import slipstream.apps.bench.process_group
import slipstream.runtime.files.directory_lock
import slipstream.runtime.members.rendezvous  # noqa: F401
from slipstream.errors import PeerFailed, SlipstreamError, WaitLimit

BY_ANNOTATION = {
    "str": "rank 1",
    "int": 3,
    "float": 2.5,
    "bool": True,
    "Path": Path("/a/file"),
    "Sequence[str]": ["rank 1", "rank 2"],
}


def all_kinds(kind: type[SlipstreamError] = SlipstreamError) -> Iterator[type[SlipstreamError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from all_kinds(each)


KINDS = sorted(
    {kind for kind in all_kinds() if not kind.__module__.startswith("slipstream.apps.service")},
    key=lambda kind: kind.__qualname__,
)


def example(kind: type[SlipstreamError]) -> SlipstreamError:
    """An error of this class, with a value other than the default for every argument."""
    arguments = inspect.signature(kind.__init__).parameters
    given = {
        name: BY_ANNOTATION[str(parameter.annotation)]
        for name, parameter in arguments.items()
        if parameter.annotation is not inspect.Parameter.empty
    }
    takes_text = len(arguments) > 1
    return kind("a message") if takes_text and not given else kind(**given)


def test_the_classes_are_found() -> None:
    assert {"PeerLost", "LeftBehind", "StoreClosed"} <= {kind.__name__ for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__qualname__)
@pytest.mark.parametrize(
    "again",
    [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_message_and_fields_stay(
    kind: type[SlipstreamError], again: Callable[[SlipstreamError], SlipstreamError]
) -> None:
    error = example(kind)
    error.add_note("a note")
    found = again(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    assert found.args == error.args
    assert vars(found) == vars(error)
    assert repr(found) == repr(error)


def test_fields_are_those_that_were_given() -> None:
    error = pickle.loads(pickle.dumps(WaitLimit("the others", 30.0, ["rank 2"], "rank 9")))
    assert (error.what, error.limit_s, error.missing) == ("the others", 30.0, ("rank 2",))
    assert "missing: rank 2; last message refused here, from rank 9" in str(error)
    failed = pickle.loads(pickle.dumps(PeerFailed("rank 1", "oops", reported=True, where="a.py")))
    assert (failed.peer, failed.reported, failed.where) == ("rank 1", True, "a.py")
    assert str(failed) == "rank 1 failed: oops\n  on rank 1, at a.py"
