"""``phase.json``: what a training job does now, for people who wait for it.

Rank 0 writes it and says the same in the job's log. It is shown while the job runs; the trainer
removes what an earlier attempt left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, TypeVar

import msgspec
from msgspec.structs import replace

from slipstream.apps.service.progress import NOTE

READING: Final = "reading rows"
BUILDING: Final = "building features"
STARTING: Final = "starting learners"
TRAINING: Final = "training"
MEASURING: Final = "measuring"
FINAL: Final = "final pass"
FILE: Final = "phase.json"
EVERY_S: Final = 0.5  # between two percentages of a phase

T = TypeVar("T")


class Phase(msgspec.Struct, frozen=True):
    """What a job does, as the API gives it.

    Attributes:
        phase: None if the job is over.
        phase_percent: How much of the phase is done, if that is known.
        resumed_epoch: The epoch that a restarted job continues from.
        may_stop_early: Whether it may still turn out that it needs fewer epochs.
        stops_early: Why it makes fewer epochs, once that is decided.
    """

    phase: str | None
    phase_percent: int | None = None
    resumed_epoch: int | None = None
    may_stop_early: bool = False
    stops_early: str | None = None


def phase_of(state: str, folder: Path) -> Phase:
    """The phase of a job in a state of the queue, whose version has this directory."""
    if state == "waiting":
        return Phase("waiting")
    if state != "running":
        return Phase(None)
    try:
        return msgspec.json.decode((folder / FILE).read_bytes(), type=Phase)
    except (OSError, msgspec.DecodeError):  # none of its processes has come so far
        return Phase(READING, 0)


def write_phase(folder: Path, phase: Phase) -> None:
    """Write what a job does, for who looks into its directory."""
    # Not on disk for sure, which takes long: who restarts the job writes it anew.
    draft = folder / f"{FILE}.draft"
    draft.write_bytes(msgspec.json.encode(phase))
    draft.replace(folder / FILE)


class PhaseFile:
    """Writes the phase of a job that runs, and its log.

    Args:
        folder: The version's directory; None for a learner that is not rank 0, and says nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder, self._now, self._at = folder, Phase(None), 0.0
        self._known = Phase(None)  # what holds for all later phases

    def begin(self, phase: str, sentence: str, percent: int | None = 0) -> None:
        """Begin a phase; the log says ``sentence``."""
        self._write(replace(self._known, phase=phase, phase_percent=percent))
        self.note(sentence)

    def resume(self, epoch: int | None) -> None:
        """Tell from now on that the job continues from an epoch, or that it does not."""
        self._known = replace(self._known, resumed_epoch=epoch)

    def tell_stop(self, *, may: bool, why: str | None) -> None:
        """Tell from now on whether the job may stop early, or why it does."""
        self._known = replace(self._known, may_stop_early=may, stops_early=why)

    def advance(self, done: float) -> None:
        """Tell the share of the phase that is done; most calls only look at the clock."""
        if time.monotonic() - self._at < EVERY_S:
            return
        percent = min(int(100 * done), 100)
        self._write(replace(self._known, phase=self._now.phase, phase_percent=percent))

    def watch(self, items: Sequence[T], begin: float, end: float) -> Iterator[T]:
        """Go through items that take the phase from one share to another."""
        for number, item in enumerate(items):
            self.advance(begin + (end - begin) * number / len(items))
            yield item

    def note(self, text: str) -> None:
        """Write a line of the job's log."""
        if self._folder is not None:
            print(f"{NOTE}{text}", flush=True)

    def _write(self, phase: Phase) -> None:
        self._at = time.monotonic()
        if self._folder is None or phase == self._now:
            return
        self._now = phase
        write_phase(self._folder, phase)
