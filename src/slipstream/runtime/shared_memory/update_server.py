"""The server of shared weights: a process that takes gradients from rings and updates in place.

It takes gradients of the learners in turn, one slot at a time, and never waits for a particular
one. It writes checkpoints: a copy is made between two updates, and written by a separate thread.
Its other state (the optimizer's, the ages of gradients) is in its own memory; if it dies,
the launcher starts another, which continues from the last checkpoint. It ends when its socket
closes.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from slipstream._native import Rings
from slipstream.errors import CheckpointError
from slipstream.planning.segment import FROZEN
from slipstream.runtime.files.checkpoint_format import (
    OptimizerState,
    Piece,
    check_names,
    misfit,
    optimizer_in,
)
from slipstream.runtime.files.whole_files import sweep_drafts
from slipstream.runtime.shared_memory import checkpoints as shared_checkpoint
from slipstream.runtime.shared_memory import messages
from slipstream.runtime.shared_memory.checkpoints import Snapshot
from slipstream.runtime.shared_memory.optimizer import STATE, SharedOptimizer, fits
from slipstream.transports.local_socket import Hangup, LocalSocket
from slipstream.transports.shared_memory import SharedMemory

TICK_S = 0.1  # longest wait of a slot whose learner died before it could signal
LISTEN_EVERY = 64  # updates
LOCK_S = 0.2


class UpdateServer:
    """Takes gradients from rings, and applies them to the weights with an optimizer.

    Attributes:
        accepted: Names of tensors in a checkpoint that were restored although not finite.
    """

    def __init__(self, start: messages.Start, memory: SharedMemory) -> None:
        self._start, self._plan = start, start.plan
        self.accepted: list[str] = []
        self.rings = Rings(memory.memory)
        self._weights = memory.view(self.rings.weights_at, start.plan.weights_nbytes)
        self._slots = [
            [
                memory.view(self.rings.slot_at(learner, slot), start.plan.slot_nbytes)
                for slot in range(self.rings.slots)
            ]
            for learner in range(self.rings.learners)
        ]
        self._optimizer = SharedOptimizer(start.plan, start.optimizer, start.settings)
        self.ages: Counter[int] = Counter()
        self.refused = 0
        self._last = self.rings.learners - 1

    def serve_one(self, limit_s: float) -> bool:
        """Apply one gradient, if one arrives in time."""
        if self._start.direct:
            self.rings.rest(limit_s)
            return False
        ready = self.rings.next(self._last, limit_s)
        if ready is None:
            return False
        learner, slot = ready
        with self._writing() as alone:
            if not alone:
                return True  # a learner holds the lock for long; the slot stays
            self._apply(self._slots[learner][slot])
        self._last = learner
        self.rings.release(learner)
        return True

    @contextmanager
    def _writing(self) -> Iterator[bool]:
        """Within, no other process uses the weights; yields False if the lock was not free soon."""
        if not self._start.consistent:
            yield True
            return
        alone = self.rings.begin_writing(self.rings.learners, LOCK_S)
        try:
            yield alone
        finally:
            if alone:
                self.rings.end_writing()

    @contextmanager
    def _surely_writing(self) -> Iterator[None]:
        """The same, but waits: readers are fast, and the launcher releases locks of dead ones."""
        while True:
            with self._writing() as alone:
                if alone:
                    yield
                    return

    def _apply(self, slot: memoryview) -> None:
        at = self._plan.version_at
        seen = int.from_bytes(slot[at : at + 8], sys.byteorder)
        try:
            self._optimizer.apply(self._weights, slot)
        except ValueError:
            self.refused += 1
            self._wipe(slot)
            return
        self.ages[max(0, self.rings.advance() - 1 - seen)] += 1

    def account(self, checkpoints: int) -> messages.Account:
        """This server's figures."""
        return messages.Account(dict(self.ages), self.refused, checkpoints)

    # ---- checkpoints

    def snapshot(self) -> Snapshot | None:
        """A consistent copy; None if learners that update directly keep the weights locked."""
        with self._writing() as alone:
            if not alone:
                return None
            weights, version = bytes(self._weights), self.rings.version
            taken = [self.rings.taken(learner) for learner in range(self.rings.learners)]
        pieces = {}
        for tensor, at in zip(self._plan.tensors, self._plan.weights_at, strict=True):
            data = memoryview(weights)[at : at + tensor.nbytes]
            pieces[f"model/{tensor.name}"] = Piece(tensor.dtype, tensor.shape, data)
        state = []
        for name, entries in self._optimizer.pieces().items():
            paths = {entry: f"{STATE}/{name}/{entry}" for entry in entries}
            pieces |= {paths[entry]: piece for entry, piece in entries.items()}
            state.append([name, {"$dict": [[e, {"$tensor": path}] for e, path in paths.items()]}])
        optimizer = [
            ["kind", self._start.optimizer],
            ["state", {"$dict": state}],
            ["groups", {"$list": [{"$dict": []} for _ in self._start.settings]}],
        ]
        facts = {
            "step": version,
            "strategy": "gadei",
            "workers": self.rings.learners,
            "optimizer": {"$dict": optimizer},
            "taken": taken,
            "job": self._start.job,
        }
        return Snapshot(pieces, facts)

    @property
    def untrained(self) -> set[str]:
        """Names in a checkpoint of tensors that no update changes."""
        frozen = (tensor.name for tensor in self._plan.tensors if tensor.group == FROZEN)
        return {f"model/{name}" for name in frozen}

    def taken_by(self, snapshot: Snapshot) -> list[int]:
        """By learner: how many of its gradients in this job a snapshot contains."""
        if snapshot.facts.get("job") != self._start.job:
            return [0] * self.rings.learners
        taken = list(snapshot.facts.get("taken", ()))
        if len(taken) != self.rings.learners:
            raise CheckpointError(
                f"it counts the gradients of {len(taken)} learners; there are {self.rings.learners}"
            )
        return taken

    def restore(self, snapshot: Snapshot) -> list[int]:
        """Load a snapshot's weights and optimizer state; discard gradients pushed since.

        Returns:
            By learner: the number of the first gradient that is not discarded.
        """
        state = self._fitting_state(snapshot)  # check everything before anything changes
        self._optimizer.load(state)
        with self._surely_writing():
            for tensor, at in zip(self._plan.tensors, self._plan.weights_at, strict=True):
                piece = snapshot.pieces[f"model/{tensor.name}"]
                self._weights[at : at + tensor.nbytes] = piece.data
            self.rings.version = snapshot.version
        self.accepted = shared_checkpoint.nonfinite_in(snapshot.pieces)
        return [self._drop_pushed(learner) for learner in range(self.rings.learners)]

    def _fitting_state(self, snapshot: Snapshot) -> dict[str, dict[str, Piece]]:
        """The optimizer state of a snapshot, after checking the snapshot against this job."""
        here = {f"model/{tensor.name}" for tensor in self._plan.tensors}
        there = {name for name in snapshot.pieces if name.startswith("model/")}
        for name in sorted(here ^ there):
            side = "the checkpoint" if name in there else "the model"
            raise CheckpointError(f"only {side} has {name.removeprefix('model/')!r}")
        for tensor in self._plan.tensors:
            fits(snapshot.pieces[f"model/{tensor.name}"], tensor, repr(tensor.name))
        saved = optimizer_of(snapshot)
        if saved.kind != self._start.optimizer:
            raise CheckpointError(
                f"it holds the state of {saved.kind}; this job trains with {self._start.optimizer}"
            )
        state = {
            name: {entry: piece for entry, piece in entries.items() if isinstance(piece, Piece)}
            for name, entries in saved.state.items()
        }
        self._optimizer.check(state)
        return state

    def _drop_pushed(self, learner: int) -> int:
        """Discard a learner's gradients; its slots are then as clean as after an update."""
        pushed = self.rings.pushed(learner)
        for number in range(self.rings.taken(learner), pushed):
            self._wipe(self._slots[learner][number % self.rings.slots])
        self.rings.discard(learner, pushed)
        return pushed

    def _wipe(self, slot: memoryview) -> None:
        for gradient in self._plan.gradients:
            if gradient.width:
                tensor = self._plan.tensors[gradient.tensor]
                slot[gradient.at : gradient.at + tensor.nbytes] = bytes(tensor.nbytes)


def optimizer_of(snapshot: Snapshot) -> OptimizerState:
    """The optimizer's state in a snapshot; raises CheckpointError."""
    try:
        check_names(snapshot.pieces)
        return optimizer_in(snapshot.facts, snapshot.pieces)
    except ValueError as error:
        raise CheckpointError(str(error)) from error


Report = Callable[[str], None]  # called with the error, or ""


class Checkpoints:
    """Copied between two updates, and written one by one by a thread, while updates continue.

    If a checkpoint cannot be written, this is reported and training continues; the last one must be
    written.

    Args:
        every_s: seconds between checkpoints in the directory.
        send: sends a note to the launcher.
    """

    def __init__(
        self,
        server: UpdateServer,
        directory: Path,
        every_s: float,
        send: Callable[[messages.Note], None],
    ) -> None:
        self._server, self._directory, self._every_s = server, directory, every_s
        self._send = send
        self._due = time.monotonic() + every_s
        self._version = -1
        self._drafts: queue.SimpleQueue[tuple[Snapshot, Path | None, Report] | None] = (
            queue.SimpleQueue()
        )
        self._writing = 0
        self.written = 0
        self._trouble = ""  # the last checkpoint's error
        self._writer = threading.Thread(target=self._write_all, daemon=True)
        self._writer.start()

    def tick(self) -> None:
        """Begin a checkpoint if it is due, the last one is done, and the weights have changed."""
        now = time.monotonic()
        if now < self._due or self._writing or self._server.rings.version == self._version:
            return
        if self.begin(None, self._report):
            self._due = now + self._every_s

    def begin(self, path: Path | None, report: Report) -> bool:
        """Begin one, in the directory or at a path; False if no copy is possible now."""
        snapshot = self._server.snapshot()
        if snapshot is None:
            return False
        if path is None:
            self._version = snapshot.version
        self._writing += 1
        self._drafts.put((snapshot, path, report))
        return True

    def _report(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            self._send(messages.Note(self._with_last_kept(trouble)))
        self._trouble = trouble

    def _with_last_kept(self, trouble: str) -> str:
        """The error, with the newest checkpoint on disk; an earlier one may have been deleted."""
        try:
            found, _ = shared_checkpoint.newest_in(self._directory)
        except CheckpointError as error:
            return f"{trouble}; {error}"
        if found is None:
            return f"{trouble}; there is no checkpoint in {self._directory}"
        return f"{trouble}; the last checkpoint in {self._directory} has {found.version} updates"

    def _write_all(self) -> None:
        while (draft := self._drafts.get()) is not None:
            snapshot, path, report = draft
            trouble = ""
            try:
                if path is None:
                    shared_checkpoint.keep(self._directory, snapshot, self._server.accepted)
                else:
                    snapshot.write(path)
                self.written += 1
            except CheckpointError as error:
                trouble = str(error)
            with contextlib.suppress(Hangup):
                report(trouble)
            self._writing -= 1

    def finish(self) -> str:
        """Write the last checkpoint to disk before this returns; returns the error, or ""."""
        outcome: list[str] = []
        while not self.begin(None, outcome.append):
            time.sleep(TICK_S)
        self._drafts.put(None)
        while self._writer.is_alive():
            self._server.rings.beat_once()
            self._writer.join(TICK_S)
        trouble = outcome[0] if outcome else "the thread that writes checkpoints has died"
        return self._with_last_kept(trouble) if trouble else ""


def serve(
    control: LocalSocket[messages.ToServer], start: messages.Start, memory: SharedMemory
) -> None:
    """Apply gradients until all learners have finished, or SIGTERM arrives."""
    server = UpdateServer(start, memory)
    directory = Path(start.checkpoints)
    sweep_drafts(directory)
    found, notes = None, list[str]()
    if not start.as_they_are:
        found, notes = shared_checkpoint.newest_in(directory)
    taken, let_go = list[int](), list[int]()
    if found is not None:
        try:
            taken, let_go = server.taken_by(found), server.restore(found)
        except CheckpointError as error:
            raise CheckpointError(
                f"the newest checkpoint in {directory} is of something else: {error}"
            ) from error
    control.send(messages.Ready(found is not None, server.rings.version, notes, taken, let_go))
    kept = Checkpoints(server, directory, start.every_s, control.send)
    asked_to_go = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_go.set())
    since = 0
    while not asked_to_go.is_set():
        served = server.serve_one(TICK_S)
        kept.tick()
        since += 1
        if served and since < LISTEN_EVERY:
            continue
        since = 0
        while control.has_input():
            body, _ = control.receive()
            if isinstance(body, messages.Finish):
                while server.serve_one(0.0):
                    pass
                trouble = kept.finish()
                control.send(messages.Finished(server.account(kept.written), trouble))
                return
            answer(body, server, kept, control)
    if trouble := kept.finish():
        raise CheckpointError(trouble)


def answer(
    body: messages.ToServer,
    server: UpdateServer,
    kept: Checkpoints,
    control: LocalSocket[messages.ToServer],
) -> None:
    """Handle a message, and send the answer."""

    def keep(path: Path | None, number: int) -> None:
        while not kept.begin(path, lambda trouble: control.send(messages.Kept(trouble, number))):
            time.sleep(TICK_S)

    match body:
        case messages.Ask():
            control.send(messages.AccountReply(body.number, server.account(kept.written)))
        case messages.Keep():
            keep(None if body.path is None else Path(body.path), body.number)
        case messages.Restore():
            try:
                restore_from(Path(body.path), server, takes_nonfinite=body.takes_nonfinite)
            except CheckpointError as error:
                control.send(messages.Kept(str(error), body.number))
            else:
                keep(None, body.number)


def restore_from(path: Path, server: UpdateServer, *, takes_nonfinite: bool = False) -> None:
    """Restore all of it; on an error, change nothing and raise."""
    snapshot = Snapshot.read(path)
    if not takes_nonfinite:
        shared_checkpoint.refuse_nonfinite(path, snapshot.pieces, untrained=server.untrained)
    try:
        server.restore(snapshot)
    except CheckpointError as error:
        raise misfit(path, error) from error


def main() -> None:
    """Serve the launcher that started this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=int(os.environ["SLIPSTREAM_CONTROL_FD"]))
    control: LocalSocket[messages.ToServer] = LocalSocket(end, messages.ToServer)  # type: ignore[arg-type]
    try:
        start, descriptor = control.receive()
        if not isinstance(start, messages.Start) or descriptor is None:
            sys.exit("the launcher has not sent the memory first")
        serve(control, start, SharedMemory(descriptor))
    except Hangup:
        sys.exit("the launcher is gone")
    except CheckpointError as error:
        sys.exit(f"slipstream: {error}")


if __name__ == "__main__":
    main()
