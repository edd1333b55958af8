"""The server of shared weights: a process that empties rings and updates weights in place.

It takes gradients of the learners in turn, one slot at a time, and never waits for one of them. It
keeps checkpoints: a copy is made between two updates, and written by a thread of its own. What it
knows besides the weights (an optimizer's memories, how old gradients were) is its own; if it dies,
the launcher starts another, which goes on from the last checkpoint. Standard input says when the
launcher is gone.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from slipstream._native import Rings
from slipstream.errors import CheckpointError
from slipstream.runtime import shared_checkpoint
from slipstream.runtime.shared_checkpoint import Piece, Snapshot
from slipstream.runtime.shared_optimizer import STATE, SharedOptimizer, fits
from slipstream.runtime.workshop_messages import (
    Account,
    Ask,
    Finish,
    Finished,
    Keep,
    Kept,
    Note,
    Ready,
    Restore,
    Start,
    ToServer,
)
from slipstream.transports.local_socket import Hangup, LocalSocket
from slipstream.transports.shared_memory import SharedMemory

LOOK_S = 0.1  # how long a slot may lie here whose learner died before it could ring
LISTEN_EVERY = 64  # updates
LOCK_S = 1.0


class UpdateServer:
    """Rings, weights, and the optimizer that goes from the one to the other."""

    def __init__(self, start: Start, memory: SharedMemory) -> None:
        self._start, self._plan = start, start.plan
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
        """Apply one gradient, if there is one in time."""
        if self._start.direct:
            self.rings.rest(limit_s)
            return False
        ready = self.rings.next(self._last, limit_s)
        if ready is None:
            return False
        self._last, slot = ready
        self._apply(self._slots[self._last][slot])
        self.rings.release(self._last)
        return True

    def _apply(self, slot: memoryview) -> None:
        if self._start.consistent and not self.rings.begin_writing(self.rings.learners, LOCK_S):
            raise RuntimeError("a learner has been reading the weights for too long")
        at = self._plan.version_at
        seen = int.from_bytes(slot[at : at + 8], sys.byteorder)
        try:
            self._optimizer.apply(self._weights, slot)
        except ValueError:
            self.refused += 1
            return
        finally:
            if self._start.consistent:
                self.rings.end_writing()
        self.ages[max(0, self.rings.advance() - 1 - seen)] += 1

    def account(self, checkpoints: int) -> Account:
        return Account(dict(self.ages), self.refused, checkpoints)

    # ---- checkpoints

    def snapshot(self) -> Snapshot:
        """A copy, of one moment."""
        weights = bytes(self._weights)
        pieces = {}
        for tensor, at in zip(self._plan.tensors, self._plan.weights_at, strict=True):
            data = memoryview(weights)[at : at + tensor.nbytes]
            pieces[f"model/{tensor.name}"] = Piece(tensor.dtype, tensor.shape, data)
        told = []
        for name, entries in self._optimizer.pieces().items():
            paths = {entry: f"{STATE}/{name}/{entry}" for entry in entries}
            pieces |= {paths[entry]: piece for entry, piece in entries.items()}
            told.append([name, {"$dict": [[e, {"$tensor": path}] for e, path in paths.items()]}])
        optimizer = [
            ["kind", self._start.optimizer],
            ["state", {"$dict": told}],
            ["groups", {"$list": [{"$dict": []} for _ in self._start.settings]}],
        ]
        facts = {
            "step": self.rings.version,
            "strategy": "gadei",
            "workers": self.rings.learners,
            "optimizer": {"$dict": optimizer},
        }
        return Snapshot(pieces, facts)

    def restore(self, snapshot: Snapshot) -> int:
        """Its weights and memories; what has been pushed since is let go. Returns how many."""
        here = {f"model/{tensor.name}" for tensor in self._plan.tensors}
        there = {name for name in snapshot.pieces if name.startswith("model/")}
        for name in sorted(here ^ there):
            side = "the checkpoint" if name in there else "the model"
            raise CheckpointError(f"only {side} has {name.removeprefix('model/')!r}")
        for tensor in self._plan.tensors:
            fits(snapshot.pieces[f"model/{tensor.name}"], tensor, repr(tensor.name))
        kind, state = optimizer_in(snapshot)
        if kind != self._start.optimizer:
            raise CheckpointError(
                f"it holds the state of {kind}; this job trains with {self._start.optimizer}"
            )
        self._optimizer.load(state)
        for tensor, at in zip(self._plan.tensors, self._plan.weights_at, strict=True):
            self._weights[at : at + tensor.nbytes] = snapshot.pieces[f"model/{tensor.name}"].data
        self.rings.version = snapshot.version
        return sum(self.rings.discard(learner) for learner in range(self.rings.learners))


def optimizer_in(snapshot: Snapshot) -> tuple[str, dict[str, dict[str, Piece]]]:
    """Its kind, and its memories by parameter."""
    told = dict(snapshot.facts["optimizer"]["$dict"])
    state = {
        name: {
            entry: snapshot.pieces[value["$tensor"]]
            for entry, value in entries["$dict"]
            if isinstance(value, dict) and "$tensor" in value
        }
        for name, entries in told["state"]["$dict"]
    }
    return str(told["kind"]), state


class Checkpoints:
    """Written by a thread, one at a time; a disk that is full is told of and costs nothing else."""

    def __init__(self, server: UpdateServer, directory: Path, every_s: float, tell: Any) -> None:
        self._server, self._directory, self._every_s = server, directory, every_s
        self._tell = tell
        self._writer: threading.Thread | None = None
        self._due = time.monotonic() + every_s
        self._version = -1
        self.written = 0

    def look(self) -> None:
        """Begin one if it is time, the last is done, and something has changed."""
        now = time.monotonic()
        busy = self._writer is not None and self._writer.is_alive()
        if now < self._due or busy or self._server.rings.version == self._version:
            return
        self._due = now + self._every_s
        snapshot = self._server.snapshot()
        self._version = snapshot.version
        self._writer = threading.Thread(target=self._keep, args=(snapshot,))
        self._writer.start()

    def _keep(self, snapshot: Snapshot) -> None:
        if trouble := self._write(snapshot):
            self._tell(Note(f"{trouble}; the checkpoint before is kept"))

    def keep_now(self) -> str:
        """One more, before anything else happens; what went wrong, if something did."""
        self.settle()
        return self._write(self._server.snapshot())

    def _write(self, snapshot: Snapshot) -> str:
        try:
            shared_checkpoint.keep(self._directory, snapshot)
        except CheckpointError as error:
            return str(error)
        self.written += 1
        return ""

    def settle(self) -> None:
        if self._writer is not None:
            self._writer.join()


def serve(control: LocalSocket[ToServer], start: Start, memory: SharedMemory) -> None:
    server = UpdateServer(start, memory)
    directory = Path(start.checkpoints)
    shared_checkpoint.sweep_drafts(directory)
    found, notes = shared_checkpoint.newest_in(directory)
    discarded = 0
    if found is not None:
        try:
            discarded = server.restore(found)
        except CheckpointError as error:
            raise CheckpointError(
                f"the checkpoints in {directory} are of something else: {error}"
            ) from error
    control.send(Ready(found is not None, server.rings.version, notes, discarded))
    kept = Checkpoints(server, directory, start.every_s, control.send)
    asked_to_go = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked_to_go.set())
    since = 0
    while not asked_to_go.is_set():
        served = server.serve_one(LOOK_S)
        kept.look()
        since += 1
        if served and since < LISTEN_EVERY:
            continue
        since = 0
        while control.has_come():
            body, _ = control.receive()
            if isinstance(body, Finish):
                finish(server, kept, control)
                return
            obey(body, server, kept, control)
    kept.keep_now()


def obey(
    body: ToServer, server: UpdateServer, kept: Checkpoints, control: LocalSocket[ToServer]
) -> None:
    if isinstance(body, Ask):
        control.send(server.account(kept.written))
    elif isinstance(body, Keep):
        trouble = ""
        if body.path is None:
            trouble = kept.keep_now()
        else:
            try:
                server.snapshot().write(Path(body.path))
            except CheckpointError as error:
                trouble = str(error)
        control.send(Kept(trouble))
    elif isinstance(body, Restore):
        try:
            server.restore(Snapshot.read(Path(body.path)))
            control.send(Kept(kept.keep_now()))
        except CheckpointError as error:
            control.send(Kept(f"{body.path}: {error}"))


def finish(server: UpdateServer, kept: Checkpoints, control: LocalSocket[ToServer]) -> None:
    while server.serve_one(0.0):
        pass
    kept.keep_now()
    control.send(Finished(server.account(kept.written)))


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end = socket.socket(fileno=int(os.environ["SLIPSTREAM_CONTROL_FD"]))
    control: LocalSocket[ToServer] = LocalSocket(end, ToServer)  # type: ignore[arg-type]
    try:
        start, descriptor = control.receive()
        assert isinstance(start, Start)
        assert descriptor is not None
        serve(control, start, SharedMemory(descriptor))
    except Hangup:
        sys.exit("the launcher is gone")
    except CheckpointError as error:
        sys.exit(f"slipstream: {error}")


if __name__ == "__main__":
    main()
