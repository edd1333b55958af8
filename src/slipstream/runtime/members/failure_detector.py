"""The members of a job: when each last sent a message, and which count as lost.

Pure: the time and the state of links are passed in.
"""

from __future__ import annotations

from collections.abc import Callable

SILENCE_S = 5.0
SILENCE_FACTOR_IF_LINK_ALIVE = 12  # how much longer, while the link itself answers


def is_worker(name: str) -> bool:
    """Return whether a member of this name is a worker."""
    return name.startswith("rank ")


class Roster:
    """The members that this one watches, and the progress of each worker.

    Attributes:
        silence_s: The silence after which a member counts as lost.
        worker_silence_s: The same for workers, if no member waits for a particular one; None:
            as for all.
        heard: By watched member: when its last message arrived.
        rounds: By worker: the number of rounds begun.
        left: Members that left normally, failed or were lost.
        finished: By worker that left normally: the number of rounds begun.
        round: The number of rounds that this member itself has begun, of all pairs together.
        lockstep: True if every worker makes every round, so that all must end together.
    """

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self.worker_silence_s: float | None = None
        self.heard: dict[str, float] = {}
        self.rounds: dict[str, int] = {}
        self.left: set[str] = set()
        self.finished: dict[str, int] = {}
        self.round = 0
        self.lockstep = True

    def expect(self, name: str, now: float) -> None:
        """Watch a member from now on, unless it has left."""
        if name not in self.left:
            self.heard.setdefault(name, now)

    def heard_from(self, name: str, now: float) -> None:
        """Record that a message of a member has arrived."""
        if name in self.heard:
            self.heard[name] = now

    def leave(self, name: str) -> None:
        """Stop watching a member."""
        self.left.add(name)
        self.heard.pop(name, None)
        self.rounds.pop(name, None)

    def returned(self, name: str) -> None:
        """Let a member that had left be expected again."""
        self.left.discard(name)

    def silent(self, now: float) -> list[tuple[str, float]]:
        """Return the members that were silent for longer than allowed, and for how long."""
        ages = ((name, now - at) for name, at in list(self.heard.items()))
        return [(name, age) for name, age in ages if age > self._allowed_s(name)]

    def lost(self, now: float, link_alive: Callable[[str], bool]) -> list[tuple[str, float]]:
        """Return the silent members whose link does not answer, or that were silent for very long.

        If the link of a silent member answers, its process is alive: Python may be busy with one
        long call.
        """
        longest_s = SILENCE_FACTOR_IF_LINK_ALIVE * self.silence_s
        return [
            (name, age) for name, age in self.silent(now) if age > longest_s or not link_alive(name)
        ]

    def dead_workers(
        self, now: float, link_refused: Callable[[str], bool]
    ) -> list[tuple[str, float]]:
        """Return workers whose host refuses connections, and how long they were silent."""
        heard = list(self.heard.items())
        return [(name, now - at) for name, at in heard if is_worker(name) and link_refused(name)]

    def _allowed_s(self, name: str) -> float:
        if self.worker_silence_s is None or not is_worker(name):
            return self.silence_s
        return self.worker_silence_s

    def ahead(self, round_: int) -> list[str]:
        """Return the workers that have begun a later round, if workers are in lockstep."""
        if not self.lockstep:
            return []
        return sorted(name for name, at in self.rounds.items() if at > round_)

    def behind(self, round_: int) -> list[str]:
        """Return the workers that have not begun a round; servers begin no rounds themselves."""
        late = (name for name, at in self.rounds.items() if at < round_)
        return sorted(name for name in late if is_worker(name))

    def finished_early(self) -> list[str]:
        """Return workers in lockstep that left while this member still trains."""
        if not self.lockstep:
            return []
        return [name for name, at in self.finished.items() if at < self.round]
