"""Backup workers: how many of n workers make a round. Pure.

Chen, Pan, Monga, Bengio and Jozefowicz, "Revisiting Distributed Synchronous SGD", section 3.1: of
n = N + b workers the first N make a round. A smaller N waits for fewer stragglers, but has noisier
gradients and needs more rounds; what counts is their product (Fig. 6):

    time to converge(N) = mean round time(N) × iterations(N)

The paper computes the round time from order statistics: the N-th of n arrivals, all started
together (Fig. 4). But a late worker is still busy when the next round opens, so the true time is
longer. Here recorded step durations are replayed by the rule that the servers follow, including
such unfinished steps.

    iterations(N) = a + b/N, fitted to given points; else ∝ 1 + Nc/N with Nc = 4n, which matches
                    the paper's Fig. 5 at n = 100 (137,500 at N = 50; 76,200 at N = 100)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slipstream.errors import ConfigError
from slipstream.printable import shown

Durations = Mapping[int, Sequence[float]]  # by worker: seconds from weights to gradient
Iterations = Callable[[int], float]  # to converge, by the number of workers of a round
Floats = NDArray[np.float64]

LEAST_STEPS = 8  # of a worker; with fewer, one unusual step would decide
ROUNDS = 4000  # rounds replayed, unless there are very many workers
MOST_ROUNDS = 50_000
MOST_REPLAYED = 100_000_000  # rounds times workers²: about three seconds
LEAST_ITERATIONS, MOST_ITERATIONS = 1e-9, 1e15
BLOCK = 50  # consecutive steps that resampling keeps together
STRETCH = 500  # rounds per replay
FIG_5_RATIO = 4.0  # Nc / n


@dataclass(frozen=True, slots=True)
class Split:
    """A split: ``first`` workers make a round, ``backup`` more take part; and its cost."""

    first: int
    backup: int
    round_s: float
    iterations: float
    relative_time: float  # to converge, relative to waiting for all
    dropped_share: float  # of all gradients


def compare_splits(
    durations: Durations,
    iterations: Iterations | Sequence[tuple[int, float]] | None = None,
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
) -> list[Split]:
    """Compare every split of the recorded workers, from ``first=1`` to all of them.

    Args:
        durations: By worker, the seconds of its steps, in order.
        iterations: The number of rounds until convergence, as a function of N or as points
            (N, iterations) for a fit; by default a curve like the paper's is assumed.
        rounds: The number of rounds to replay for every split.
        seed: The seed of the resampling.

    Returns:
        The splits, by ``first``; ``best_split`` finds the fastest.

    Raises:
        ConfigError: There are too few durations or points, or some are invalid.

    >>> steady, slow = [1.0] * 8, [1.0, 3.0] * 4
    >>> splits = compare_splits({0: steady, 1: steady, 2: slow}, lambda first: 100.0, rounds=50)
    >>> best_split(splits).backup > 0
    True
    """
    _check(durations, rounds)
    workers = len(durations)
    needed = _iterations(iterations, workers)
    recorded = [np.asarray(steps, np.float64) for _, steps in sorted(durations.items())]
    round_s, dropped = _mean_round(recorded, rounds, np.random.default_rng(seed))
    everyone_s = float(round_s[-1]) * needed(workers)
    return [
        Split(
            first,
            workers - first,
            float(round_s[first - 1]),
            needed(first),
            float(round_s[first - 1]) * needed(first) / everyone_s,
            float(dropped[first - 1] / (dropped[first - 1] + first)),
        )
        for first in range(1, workers + 1)
    ]


def affordable_rounds(workers: int) -> int:
    """Return how many rounds of so many workers can be replayed within a few seconds."""
    return max(1, min(MOST_ROUNDS, MOST_REPLAYED // workers**2))


plan_backups = compare_splits  # the public name, since "splits" alone is unclear


def best_split(splits: Sequence[Split]) -> Split:
    """Return the split that converges fastest; of equals, the one that drops fewest gradients."""
    return min(splits, key=lambda split: (split.relative_time, -split.first))


@dataclass(frozen=True, slots=True)
class Adapting:
    """A rule that chooses ``first`` again and again, for the holder that closes rounds.

    After ``every`` rounds all splits are compared on each worker's most recent steps. The current
    one stays unless another is predicted to be faster by ``gain``.
    """

    every: int = 50
    gain: float = 0.03
    least_steps: int = LEAST_STEPS
    recent: int = 256
    rounds: int = 200  # rounds replayed for a comparison
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("every", "least_steps", "recent", "rounds"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: give 1 or more")
        if not 0 <= self.gain < math.inf:
            raise ConfigError(f"gain={self.gain}: give a share of 0 or more, such as 0.03")

    def first_after(self, rounds_made: int, durations: Durations, first: int) -> int:
        """Return ``first`` of the following rounds; the argument is that of the last one."""
        if rounds_made % self.every or len(durations) < 2:
            return first
        if min(map(len, durations.values())) < self.least_steps:
            return first
        latest = {worker: list(steps)[-self.recent :] for worker, steps in durations.items()}
        splits = compare_splits(latest, rounds=self.rounds, seed=self.seed)
        best, current = best_split(splits), splits[min(first, len(splits)) - 1]
        if current.relative_time < (1 + self.gain) * best.relative_time:
            return current.first
        return best.first


# ---- iterations to converge


def assumed_iterations(workers: int) -> Iterations:
    """Return 1 + Nc/N, which is proportional to the iterations that N of these workers need."""
    return lambda first: 1 + FIG_5_RATIO * workers / first


def fit_iterations(points: Sequence[tuple[int, float]]) -> Iterations:
    """Fit a + b/N to the points by least squares, with a and b not below 0.

    More workers never need more iterations, and twice as many never need less than half.
    """
    for first, needed in points:
        if first < 1 or not LEAST_ITERATIONS <= needed <= MOST_ITERATIONS:
            raise ConfigError(
                f"iterations {shown(first)}:{needed:g}: N is 1 or more, and iterations are more "
                f"than 0, up to {MOST_ITERATIONS:g}"
            )
    if len({first for first, _ in points}) < 2:
        raise ConfigError(
            f"iterations at {len(points)} point{'s' * (len(points) != 1)} fix no curve: give them "
            "for two different N at least, such as 4:1200,8:700"
        )
    inverse = np.array([1 / first for first, _ in points])
    needed_at = np.array([needed for _, needed in points], np.float64)
    design = np.stack([np.ones_like(inverse), inverse], axis=1)
    a, b = (float(value) for value in np.linalg.lstsq(design, needed_at, rcond=None)[0])
    if b < 0:
        a, b = float(needed_at.mean()), 0.0
    elif a < 0:
        a, b = 0.0, float(inverse @ needed_at / (inverse @ inverse))
    return lambda first: a + b / first


def _iterations(
    iterations: Iterations | Sequence[tuple[int, float]] | None, workers: int
) -> Iterations:
    if iterations is None:
        return assumed_iterations(workers)
    return iterations if callable(iterations) else fit_iterations(iterations)


# ---- round times


def resample(recorded: Sequence[Floats], steps: int, random: np.random.Generator) -> Floats:
    """Resample ``steps`` steps of each worker, in blocks; return one row per worker.

    Blocks keep slow periods together. The blocks of all workers start at the same relative position
    of their recordings, so at about the same moment of the run: otherwise a common slowdown, such
    as of a shared link, would look like stragglers that backups could replace.
    """
    begins = random.random(-(-steps // BLOCK))
    rows = []
    for own in recorded:
        first = (begins * len(own)).astype(np.int64)
        index = (first[:, None] + np.arange(BLOCK)) % len(own)
        rows.append(own[index.ravel()[:steps]])
    return np.stack(rows)


def replay(steps: Floats) -> tuple[Floats, Floats]:
    """Return mean round time, and gradients dropped per round, for N = 1 … n.

    ``steps`` has a row of durations for each worker, one more than there are rounds to replay. In
    a round a worker is busy with a step of this round or of an older one. A gradient of an older
    round arrives late and is dropped, and the worker at once starts a step for the open round.
    Either way there is one moment at which its gradient could count, and the N-th of these moments
    closes the round. The N workers of the round start the next one; the others stay busy.
    """
    workers, rounds = steps.shape[0], steps.shape[1] - 1
    worker = np.arange(workers)
    split = worker[:, None]  # all splits in parallel: row i is N = i + 1
    counts = worker <= split
    ends = np.tile(steps[:, 0], (workers, 1))  # end of each worker's current step
    next_step = np.ones((workers, workers), np.int64)
    late = np.zeros((workers, workers), np.bool_)
    made = np.empty((workers, workers), np.bool_)
    dropped = np.zeros(workers, np.int64)
    closes = np.zeros((workers, 1))
    for _ in range(rounds):
        arrives = np.where(late, ends + steps[worker, next_step], ends)
        order = np.argsort(arrives, axis=1, kind="stable")
        np.put_along_axis(made, order, counts, axis=1)
        closes = np.take_along_axis(arrives, np.take_along_axis(order, split, axis=1), axis=1)
        anew = late & (made | (ends < closes))
        dropped += anew.sum(axis=1)
        next_step += anew
        ends = np.where(anew, arrives, ends)
        ends = np.where(made, closes + steps[worker, next_step], ends)
        next_step += made
        late = ~made
    return closes[:, 0] / rounds, dropped / rounds


def _mean_round(
    recorded: Sequence[Floats], rounds: int, random: np.random.Generator
) -> tuple[Floats, Floats]:
    """Return the result of ``replay``, computed in short pieces. In one long replay, workers with
    fewer steps would lag behind in their recordings, and would no longer be slow at the same
    moments."""
    stretches = -(-rounds // STRETCH)
    steps = -(-rounds // stretches) + 1
    replayed = [replay(resample(recorded, steps, random)) for _ in range(stretches)]
    round_s, dropped = np.mean(replayed, axis=0)
    return round_s, dropped


def _check(durations: Durations, rounds: int) -> None:
    if rounds < 1:
        raise ConfigError(f"rounds={rounds}: replay 1 or more")
    if len(durations) < 2:
        raise ConfigError(
            f"step durations of {len(durations)} worker{'s' * (len(durations) != 1)}: there is "
            "nothing to split below two"
        )
    for worker, steps in durations.items():
        if not len(steps):
            raise ConfigError(f"worker {worker} has no recorded step: record a longer run")
        for step, seconds in enumerate(steps):
            if not 0 < seconds < math.inf:
                raise ConfigError(
                    f"worker {worker}, step {step}: a duration of {seconds} s cannot be; durations "
                    "are seconds above 0"
                )
