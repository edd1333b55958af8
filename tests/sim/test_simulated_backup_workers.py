"""Rounds of the first N workers: whatever arrives when, each is the mean of N gradients of it."""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.strategy import Strategy
from slipstream.systems import backup_workers, push_pull
from slipstream.testing import Conduct, Simulation, simulate
from slipstream.testing.worker import Contribute, Step
from slipstream.transports.wire import Arrived, Commit, Publish, Push, Serve, WorkerLeft
from slipstream.types import OptimizerRecipe, Spec

SPECS = [
    Spec("first", (20, 20), "float32", 0),
    Spec("bias", (10,), "float32", 1),
    Spec("second", (150,), "float32", 2),
    Spec("statistics", (5,), "float32", 3, "buffer"),
]
SGD = OptimizerRecipe("SGD", [{"lr": 0.5, "momentum": 0.9}], [0, 0, 0, -1])
Tensors = Sequence[bytes | None]


class Reference:
    """One process that makes the updates itself, on weights that begin at zero."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = specs
        self.weights = [torch.nn.Parameter(torch.zeros(spec.numel)) for spec in specs]
        parameters = [
            w for w, spec in zip(self.weights, specs, strict=True) if spec.role == "parameter"
        ]
        settings_ = {"lr": 0.5, "momentum": 0.9}
        self.optimizer = torch.optim.SGD(parameters, **settings_) if parameters else None

    def update(
        self, given_: Sequence[Tensors], divisor: int | None = None, rate: float = 1.0
    ) -> None:
        """By the mean of what was given, each a row of tensors, in the order of the rows."""
        for tensor, (spec, weight) in enumerate(zip(self.specs, self.weights, strict=True)):
            mean = mean_of([row[tensor] for row in given_], spec, divisor or len(given_))
            if spec.role == "parameter":
                weight.grad = mean
            elif mean is not None:
                weight.data.copy_(mean)
        if self.optimizer is not None:
            self.optimizer.param_groups[0]["lr"] = 0.5 * rate
            self.optimizer.step()

    def contents(self) -> tuple[bytes, ...]:
        return tuple(weight.detach().numpy().tobytes() for weight in self.weights)


def mean_of(column: Tensors, spec: Spec, divisor: int) -> torch.Tensor | None:
    """Who has no gradient counts zero; a buffer's mean is over those who have it."""
    terms = [np.frombuffer(content, np.float32) for content in column if content is not None]
    if not terms:
        return None
    total = terms[0].copy()
    for term in terms[1:]:
        total += term
    return torch.from_numpy(total / np.float32(len(terms) if spec.role == "buffer" else divisor))


def some(seed: int, specs: Sequence[Spec] = SPECS) -> Contribute:
    """Normal numbers, and here and there nothing at all."""

    def contribute(rank: int, round_: int, tensor: int) -> bytes | None:
        random = np.random.default_rng((seed, rank, round_, tensor))
        if random.random() < 0.2:
            return None
        return random.normal(size=specs[tensor].numel).astype(np.float32).tobytes()

    return contribute


SLOW = st.builds(Conduct, speed=st.sampled_from([0.02, 0.1, 0.3, 4.0]))
AWAY = st.builds(
    lambda at, for_s: Conduct(away_at=at, back_at=at + for_s),
    st.floats(0, 2),
    st.sampled_from([0.1, 1.0, 100.0]),
)
LOST = st.builds(
    lambda at, for_s, speed: Conduct(speed, away_at=at, back_at=at + for_s, given_up=True),
    st.floats(0, 2),
    st.sampled_from([0.1, 1.0, 100.0]),
    st.sampled_from([0.1, 0.3, 1.0]),
)
LEAVES = st.builds(Conduct, steps=st.integers(0, 4), speed=st.sampled_from([0.1, 1.0]))
SEEDS = st.integers(0, 2**32)
ROUNDS = 5


def conducts(*kinds: st.SearchStrategy[Conduct]) -> st.SearchStrategy[dict[int, Conduct]]:
    return st.dictionaries(st.integers(0, 5), st.one_of(*kinds), max_size=4)


def run(
    strategy: Strategy,
    workers: int,
    servers: int,
    seed: int,
    conduct: Mapping[int, Conduct] | None = None,
    rounds: int = ROUNDS,
) -> Simulation:
    return simulate(
        strategy,
        SPECS,
        workers=workers,
        servers=servers,
        rounds=rounds,
        seed=seed,
        contribute=some(seed),
        conduct=conduct,
        optimizer=SGD,
    )


def pushes_of(simulation: Simulation) -> dict[tuple[int, int], list[Push]]:
    """By rank and step."""
    found: dict[tuple[int, int], list[Push]] = defaultdict(list)
    for event in simulation.trace:
        if isinstance(event.body, Push) and event.kind == "sent":
            found[int(event.source.split()[1]), event.body.step].append(event.body)
    return found


def makers_of(simulation: Simulation) -> list[tuple[int, ...]]:
    """By round; the same at every server that holds anything, and noted once."""
    plan = simulation.plan
    holding = [
        figures.makers
        for node, figures in zip(plan.cluster.server_nodes, simulation.figures, strict=True)
        if plan.held_by(node)
    ]
    assert all(makers == holding[0] for makers in holding)
    assert [round_ for round_, _ in holding[0]] == list(range(len(holding[0])))
    return [tuple(ranks) for _, ranks in holding[0]]


def by_round(steps: Sequence[Step]) -> dict[int, Step]:
    found = {step.round: step for step in steps}
    assert len(found) == len(steps), "nobody makes a round twice"
    return found


def check_rounds(simulation: Simulation) -> list[tuple[int, ...]]:
    """What holds however workers behave; who made which round."""
    makers = makers_of(simulation)
    steps = [by_round(own) for own in simulation.steps]
    reference = Reference(SPECS)
    versions = [reference.contents()]
    for round_, ranks in enumerate(makers):
        assert list(ranks) == sorted(set(ranks))
        reference.update([steps[rank][round_].given for rank in ranks])
        versions.append(reference.contents())
    for (rank, number), pushes in pushes_of(simulation).items():
        step = simulation.steps[rank][number]
        assert step.had == versions[step.round], "weights of another version, or of several"
        assert len(pushes) == len(simulation.plan.chunks)
        tags = {(push.round, push.read) for push in pushes}
        assert tags == {(step.round, step.round)}
    check_answers(simulation)
    check_accounts(simulation, makers)
    assert simulation.refused == 0
    return makers


def check_answers(simulation: Simulation) -> None:
    """Every push is answered by one publish of its unit, of its round or of a later one."""
    waiting: dict[tuple[str, int], Push] = {}
    for event in simulation.trace:
        if event.kind == "sent" and isinstance(event.body, Push):
            assert waiting.setdefault((event.source, event.body.unit), event.body) is event.body
        if event.kind == "sent" and isinstance(event.body, Publish):
            assert waiting.pop((event.peer, event.body.unit)).round <= event.body.round
    assert not waiting


def check_accounts(simulation: Simulation, makers: Sequence[Sequence[int]]) -> None:
    deciding = simulation.figures[0]
    made = Counter(rank for ranks in makers for rank in ranks)
    assert deciding.made == made
    gave = Counter({rank: len(own) for rank, own in enumerate(simulation.steps) if own})
    assert Counter(deciding.made) + Counter(deciding.dropped) == gave


@given(
    workers=st.integers(1, 6),
    spare=st.integers(0, 5),
    servers=st.integers(1, 3),
    overlap=st.booleans(),
    chunk_bytes=st.sampled_from([256, 768]),
    conduct=conducts(SLOW, AWAY),
    seed=SEEDS,
)
@settings(max_examples=150)
def test_every_round_is_the_mean_of_the_first_n_the_same_at_every_shard(
    workers: int,
    spare: int,
    servers: int,
    overlap: bool,
    chunk_bytes: int,
    conduct: dict[int, Conduct],
    seed: int,
) -> None:
    first = max(1, workers - spare)
    strategy = backup_workers(first, overlap=overlap, chunk_bytes=chunk_bytes)
    simulation = run(strategy, workers, servers, seed, conduct)
    makers = check_rounds(simulation)
    assert len(makers) == ROUNDS
    check_sizes(simulation, makers, first)
    assert len(set(simulation.final)) == 1
    check_first_come(simulation, first)


def check_sizes(simulation: Simulation, makers: Sequence[Sequence[int]], first: int) -> None:
    """N make a round; fewer only where no more were left to make it."""
    for round_, ranks in enumerate(makers):
        trained_on = sum(own[-1].round >= round_ for own in simulation.steps if own)
        assert len(ranks) == first or len(ranks) >= min(first, trained_on)
        assert len(ranks) <= first


def check_first_come(simulation: Simulation, first: int) -> None:
    """A round is of those whose gradients were whole first, as the deciding server heard it."""
    reports: Counter[Arrived] = Counter()
    whole: dict[int, list[int]] = defaultdict(list)
    holders = sum(
        bool(simulation.plan.held_by(node)) for node in simulation.plan.cluster.server_nodes
    )
    for event in simulation.trace:
        if event.kind == "taken" and isinstance(event.body, Arrived):
            reports[event.body] += 1
            if reports[event.body] == holders:
                whole[event.body.round].append(event.body.rank)
    commits = {
        event.body.round: event.body.ranks
        for event in simulation.trace
        if isinstance(event.body, Commit)
    }
    for round_, ranks in commits.items():
        assert ranks == sorted(whole[round_][: len(ranks)])
        assert len(whole[round_]) == len(ranks) or len(ranks) == first


@given(workers=st.integers(1, 5), servers=st.integers(1, 3), conduct=conducts(SLOW), seed=SEEDS)
@settings(max_examples=60)
def test_without_backup_workers_these_are_the_rounds_of_push_pull(
    workers: int, servers: int, conduct: dict[int, Conduct], seed: int
) -> None:
    plain = run(push_pull(update="server", chunk_bytes=768), workers, servers, seed, conduct)
    rounds = run(backup_workers(backup=0, chunk_bytes=768), workers, servers, seed, conduct)
    assert check_rounds(rounds) == [tuple(range(workers))] * ROUNDS
    for got, expected in zip(rounds.results, plain.results, strict=True):
        for mine, theirs in zip(got, expected, strict=True):
            # In lockstep a tensor that nobody had a gradient for does not travel.
            for one, other in zip(mine, theirs, strict=True):
                assert other is None or one == other


@given(
    workers=st.integers(1, 6),
    first=st.integers(1, 6),
    servers=st.integers(1, 3),
    conduct=conducts(SLOW, AWAY, LEAVES),
    seed=SEEDS,
)
@settings(max_examples=120)
def test_who_leaves_early_is_not_waited_for(
    workers: int, first: int, servers: int, conduct: dict[int, Conduct], seed: int
) -> None:
    simulation = run(
        backup_workers(min(first, workers), chunk_bytes=768), workers, servers, seed, conduct
    )
    makers = check_rounds(simulation)
    staying = [rank for rank in range(workers) if rank not in conduct or conduct[rank].steps > 4]
    if staying:
        assert len(makers) == ROUNDS
    check_sizes(simulation, makers, first)
    assert len({simulation.final[rank] for rank in staying}) <= 1


def test_the_last_worker_makes_its_rounds_alone() -> None:
    conduct = {rank: Conduct(steps=2) for rank in (0, 1, 3)}
    makers = check_rounds(run(backup_workers(3, chunk_bytes=768), 4, 2, 1, conduct, rounds=9))
    assert makers[-3:] == [(2,)] * 3


@given(
    workers=st.integers(2, 5),
    first=st.integers(1, 5),
    servers=st.integers(1, 3),
    conduct=conducts(SLOW, LOST),
    seed=SEEDS,
)
@settings(max_examples=120)
def test_who_was_given_up_for_lost_may_come_back(
    workers: int, first: int, servers: int, conduct: dict[int, Conduct], seed: int
) -> None:
    conduct.pop(0, None)  # rank 0 gives up others
    simulation = run(
        backup_workers(min(first, workers), chunk_bytes=768), workers, servers, seed, conduct
    )
    makers = check_rounds(simulation)
    assert len(makers) == ROUNDS
    assert len(set(simulation.final)) == 1


@given(
    workers=st.integers(2, 6),
    least=st.integers(1, 3),
    servers=st.integers(1, 3),
    close_after_s=st.sampled_from([0.05, 0.2, 1.0, 30.0]),
    conduct=conducts(SLOW, AWAY, LEAVES),
    seed=SEEDS,
)
@settings(max_examples=120)
def test_a_round_is_over_after_a_time_with_whoever_has_come(
    workers: int,
    least: int,
    servers: int,
    close_after_s: float,
    conduct: dict[int, Conduct],
    seed: int,
) -> None:
    strategy = backup_workers(
        backup=0, close_after_s=close_after_s, min_first=min(least, workers), chunk_bytes=768
    )
    simulation = run(strategy, workers, servers, seed, conduct)
    check_rounds(simulation)
    here, opened_at = set(range(workers)), math.inf
    for event in simulation.trace:
        if event.peer != "server 0":
            continue
        if isinstance(event.body, Arrived):
            opened_at = min(opened_at, event.at_s)  # the first round
        if event.kind == "taken" and isinstance(event.body, WorkerLeft):
            here.discard(event.body.rank)
        if event.kind == "sent" and isinstance(event.body, Commit):
            enough = min(least, workers) if event.at_s >= opened_at + close_after_s else workers
            assert len(event.body.ranks) >= min(enough, len(here.union(event.body.ranks)))
            opened_at = event.at_s


@pytest.mark.parametrize(("least", "made"), [(1, (0, 1)), (2, (0, 1)), (3, (0, 1, 2))])
def test_the_time_closes_a_round_only_for_enough(least: int, made: tuple[int, ...]) -> None:
    strategy = backup_workers(4, close_after_s=5.0, min_first=least)
    conduct = {2: Conduct(away_at=0, back_at=20), 3: Conduct(away_at=0, back_at=1e4)}
    simulation = run(strategy, 4, 1, 3, conduct, rounds=1)
    assert check_rounds(simulation) == [made]


def test_late_gradients_are_dropped_and_their_workers_served_what_is_open() -> None:
    conduct = {2: Conduct(away_at=0.0, back_at=50.0)}
    simulation = run(backup_workers(2, chunk_bytes=768), 3, 2, 5, conduct)
    (late,) = simulation.steps[2]
    assert late.round == 0
    served = [e.body for e in simulation.trace if isinstance(e.body, Serve) and e.kind == "sent"]
    assert set(served) == {Serve(ROUNDS, 2)}
    assert simulation.figures[0].dropped[2] == 1
    assert simulation.figures[0].made.get(2, 0) == 0
    assert simulation.final[2] == simulation.final[0]


def test_histograms_of_arrivals_are_on_the_virtual_clock() -> None:
    simulation = run(backup_workers(2, chunk_bytes=768), 3, 1, 5, {2: Conduct(0.05)}, rounds=20)
    deciding = simulation.figures[0]
    assert {k: sum(n for _, n in pairs) for k, pairs in deciding.arrivals.items()} == Counter(
        k
        for round_ in range(20)
        for k in range(1, 1 + sum(round_ in by_round(own) for own in simulation.steps))
    )
    assert max(deciding.durations_s[2]) > max(deciding.durations_s[0])


def test_equal_seeds_are_equal_runs_out_of_lockstep() -> None:
    first, again, other = (run(backup_workers(2, chunk_bytes=768), 4, 2, s) for s in (5, 5, 6))
    assert first == again
    assert first.trace != other.trace
