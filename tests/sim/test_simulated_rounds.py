"""Whole jobs in one thread: whatever arrives when, all workers end with the same bits."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.codecs import Dense, Factors
from slipstream.consistency import Consistency, Progress
from slipstream.errors import ConfigError, RuntimeFault, WaitLimit
from slipstream.methods import Rounds
from slipstream.routes import ByTensor, Everywhere, Large, Route, Rule
from slipstream.schedules import Priority, WaitFree
from slipstream.strategy import Strategy
from slipstream.systems import all_to_all, allreduce, push_pull
from slipstream.testing import Simulation, simulate, simulator
from slipstream.topologies import Mesh, Sharded
from slipstream.transports.wire import Publish, Push
from slipstream.types import OptimizerRecipe, Spec

DTYPES = ["float32", "float64", "bfloat16", "float16"]
SHAPES = st.sampled_from([(), (1,), (0,), (7,), (20, 30), (450,)])
TENSORS = st.lists(
    st.tuples(SHAPES, st.sampled_from(DTYPES), st.sampled_from(["parameter", "buffer"])),
    min_size=1,
    max_size=6,
)


def specs_of(tensors: Sequence[tuple[tuple[int, ...], str, str]]) -> list[Spec]:
    return [
        Spec(f"t{i}", shape, dtype, i, "parameter" if role == "parameter" else "buffer")
        for i, (shape, dtype, role) in enumerate(tensors)
    ]


def layers(*numels: int) -> list[Spec]:
    return [Spec(f"layer{i}", (numel,), "float32", i) for i, numel in enumerate(numels)]


def absent(rank: int, round_: int, tensor: int, seed: int) -> bool:
    return random.Random(f"{seed} {rank} {round_} {tensor}").random() < 0.4


def some(specs: Sequence[Spec], seed: int) -> Callable[[int, int, int], bytes | None]:
    """Normal numbers of very different sizes, and here and there nothing at all."""

    def contribute(rank: int, round_: int, tensor: int) -> bytes | None:
        if absent(rank, round_, tensor, seed):
            return None
        spec = specs[tensor]
        generator = torch.Generator().manual_seed(hash((seed, rank, round_, tensor)) % 2**31)
        numbers = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        numbers *= 10.0 ** torch.randint(-2, 3, spec.shape, generator=generator)
        return as_bytes(numbers.to(getattr(torch, spec.dtype)))

    return contribute


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def as_tensor(content: bytes, dtype: str) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype)
    return torch.frombuffer(bytearray(content), dtype=kind) if content else torch.empty(0).to(kind)


def mean(
    spec: Spec, contributions: Sequence[bytes | None], wire: str | None = None
) -> bytes | None:
    """In rank order; who has no parameter counts zero, who has no buffer does not count."""
    own: torch.dtype = getattr(torch, spec.dtype)
    short: torch.dtype = getattr(torch, wire) if wire and shorter(wire, spec.dtype) else own
    wide = torch.float64 if spec.dtype == "float64" else torch.float32
    terms = [
        narrowed(as_tensor(c, spec.dtype), short).to(wide) for c in contributions if c is not None
    ]
    if not terms or not spec.numel:
        return None
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    divisor = len(contributions) if spec.role == "parameter" else len(terms)
    return as_bytes(narrowed((total / divisor).to(own), short).to(own))


def narrowed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rounded once: torch itself goes from 64 bits to 16 by way of 32, and rounds twice."""
    if tensor.dtype != torch.float64 or dtype.itemsize > 2:
        return tensor.to(dtype)
    near = tensor.to(torch.float32)
    towards = torch.where(tensor > near, torch.inf, -torch.inf)
    even = near.view(torch.int32) % 2 == 0
    odd = torch.where((near != tensor) & even, torch.nextafter(near, towards.float()), near)
    return odd.to(dtype)  # the odd neighbour is on no boundary of the shorter format


def shorter(wire: str, dtype: str) -> bool:
    return getattr(torch, wire).itemsize < getattr(torch, dtype).itemsize


def check_means(simulation: Simulation, *, wire: str | None = None) -> None:
    for round_, (given_, got) in enumerate(
        zip(simulation.contributions, simulation.results, strict=True)
    ):
        for tensor, spec in enumerate(simulation.plan.specs):
            expected = mean(spec, [worker[tensor] for worker in given_], wire)
            for rank, worker in enumerate(got):
                assert worker[tensor] == expected, (round_, rank, spec)


@given(
    tensors=TENSORS,
    workers=st.integers(1, 5),
    servers=st.integers(1, 3),
    overlap=st.booleans(),
    chunk_bytes=st.sampled_from([256, 1024, 2 << 20]),
    seed=st.integers(0, 2**32),
)
def test_servers_give_every_worker_the_mean_in_rank_order(
    tensors: list[tuple[tuple[int, ...], str, str]],
    workers: int,
    servers: int,
    overlap: bool,
    chunk_bytes: int,
    seed: int,
) -> None:
    specs = specs_of([*tensors, ((900,), "float32", "parameter")])
    simulation = simulate(
        push_pull(overlap=overlap, chunk_bytes=chunk_bytes),
        specs,
        workers=workers,
        servers=servers if chunk_bytes < 2 << 20 else 1,
        seed=seed,
        contribute=some(specs, seed),
    )
    check_means(simulation)
    assert simulation.refused == 0
    assert simulation.max_spread <= 1


@given(
    tensors=TENSORS,
    workers=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    slow=st.none() | st.integers(0, 3),
)
def test_a_mesh_gives_every_worker_the_mean_in_rank_order(
    tensors: list[tuple[tuple[int, ...], str, str]], workers: int, seed: int, slow: int | None
) -> None:
    specs = specs_of(tensors)
    simulation = simulate(
        all_to_all(), specs, workers=workers, seed=seed, contribute=some(specs, seed), slow=slow
    )
    check_means(simulation)
    assert simulation.refused == 0
    assert simulation.max_spread <= 1


@given(TENSORS, st.sampled_from(["bfloat16", "float16", "float32"]), st.integers(0, 2**32))
@settings(max_examples=20)
def test_short_wire_formats_round_once_each_way(
    tensors: list[tuple[tuple[int, ...], str, str]], wire: str, seed: int
) -> None:
    specs = specs_of([*tensors, ((900,), "float64", "parameter")])
    simulation = simulate(
        push_pull(wire=wire),  # type: ignore[arg-type]
        specs,
        workers=3,
        servers=1,
        seed=seed,
        contribute=some(specs, seed),
    )
    check_means(simulation, wire=wire)


def mixed(schedule: Priority | WaitFree) -> Strategy:
    """Every other tensor over servers, the rest between the workers."""
    mesh = Route(Mesh(), up=Dense())
    odd = tuple(Rule(Large(0, pattern=f"layer{i}"), mesh) for i in (1, 3))
    routes = ByTensor(odd, default=Route(Sharded(), up=Dense()))
    return Strategy("mixed", Rounds(routes, schedule=schedule, chunk_bytes=4096))


@given(st.integers(2, 4), st.integers(1, 2), st.integers(0, 2**32))
@settings(max_examples=20)
def test_one_model_may_travel_both_ways(workers: int, servers: int, seed: int) -> None:
    specs = layers(3000, 1, 2000, 3000, 10)
    simulation = simulate(
        mixed(Priority()),
        specs,
        workers=workers,
        servers=servers,
        seed=seed,
        contribute=some(specs, seed),
    )
    check_means(simulation)
    assert set(simulation.sent[0]) == {"dense/mesh", "dense/sharded"}


@pytest.mark.parametrize("system", [push_pull(chunk_bytes=4096), all_to_all()])
def test_equal_seeds_are_equal_runs(system: Strategy) -> None:
    specs = layers(3000, 50, 2000)

    def run(seed: int) -> Simulation:
        servers = 2 if system.name == "push_pull" else 0
        return simulate(system, specs, workers=3, servers=servers, seed=seed, rounds=4)

    first, again, other = run(5), run(5), run(6)
    assert first == again
    assert first.trace != other.trace


@given(st.integers(2, 4), st.sampled_from([Priority(), WaitFree()]), st.integers(0, 2**32))
@settings(max_examples=30)
def test_what_is_most_urgent_on_a_link_arrives_first(
    workers: int, schedule: Priority | WaitFree, seed: int
) -> None:
    specs = layers(2000, 1500, 3000, 20, 2500)
    simulation = simulate(mixed(schedule), specs, workers=workers, servers=1, seed=seed, rounds=2)
    waiting: dict[tuple[str, str], list[tuple[int, Push | Publish]]] = defaultdict(list)
    overtaken = 0
    for event in simulation.trace:
        body, link = event.body, (event.source, event.peer)
        if not isinstance(body, Push | Publish) or event.source == event.peer:
            continue
        if event.kind == "sent":
            orders = [specs[t].order for t in simulation.plan.units[body.unit].tensors]
            urgency = min(orders) if schedule == Priority() else len(specs) - 1 - max(orders)
            assert event.priority == urgency
            waiting[link].append((urgency, body))
        else:
            entry = min(waiting[link], key=lambda pair: pair[0])
            assert body == entry[1]
            overtaken += waiting[link][0] is not entry
            waiting[link].remove(entry)
    assert not any(waiting.values())
    if schedule == Priority():
        assert overtaken, "nothing ever waited: the test shows nothing"


@pytest.mark.parametrize("servers", [0, 2])
def test_a_slow_worker_holds_the_others_within_a_round(servers: int) -> None:
    system = push_pull(chunk_bytes=4096) if servers else all_to_all()
    specs = layers(3000, 2000)
    simulation = simulate(system, specs, workers=4, servers=servers, slow=3, rounds=6)
    check_means(simulation)
    assert simulation.max_spread == 1


def test_workers_send_what_the_plan_says_and_no_more() -> None:
    specs = layers(4096, 4096)
    model = 2 * 4096 * 4
    shards = simulate(push_pull(chunk_bytes=4096), specs, workers=3, servers=2, rounds=4)
    assert shards.sent == shards.received == (Counter({"dense/sharded": 4 * model}),) * 3
    peers = simulate(all_to_all(), specs, workers=3, rounds=4)
    assert peers.sent == peers.received == (Counter({"dense/mesh": 4 * 2 * model}),) * 3


SGD = OptimizerRecipe("SGD", [{"lr": 0.5, "momentum": 0.9}], [0, 0, -1])


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2**32))
@settings(max_examples=15)
def test_servers_that_update_hand_out_the_weights_of_one_optimizer(
    workers: int, servers: int, seed: int
) -> None:
    specs = [*layers(3000, 2100), Spec("mean", (5,), "float32", 2, "buffer")]
    simulation = simulate(
        push_pull(update="server", chunk_bytes=4096),
        specs,
        workers=workers,
        servers=servers,
        rounds=4,
        seed=seed,
        contribute=some(specs, seed),
        optimizer=SGD,
    )
    weights = [torch.nn.Parameter(torch.zeros(spec.shape)) for spec in specs[:2]]
    optimizer = torch.optim.SGD(weights, lr=0.5, momentum=0.9)
    for given_, got in zip(simulation.contributions, simulation.results, strict=True):
        means = [mean(spec, [worker[t] for worker in given_]) for t, spec in enumerate(specs)]
        for weight, content in zip(weights, means, strict=False):
            weight.grad = None if content is None else as_tensor(content, "float32")
        optimizer.step()
        for worker in got:
            for tensor, weight in enumerate(weights):
                expected = None if weight.grad is None else as_bytes(weight.detach())
                assert worker[tensor] == expected
            assert worker[2] == means[2], "a buffer's mean is not an optimizer's business"


@pytest.mark.parametrize("servers", [0, 1])
def test_a_job_that_waits_for_a_worker_says_for_whom(
    servers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Quitter(simulator.Worker):
        """Rank 1 does nothing at all."""

        def train(self) -> Iterator[bool]:
            return iter(()) if self.rank == 1 else super().train()

    monkeypatch.setattr(simulator, "Worker", Quitter)
    system = push_pull() if servers else all_to_all()
    with pytest.raises(WaitLimit, match=r"the results of round 1; missing: rank 1$"):
        simulate(system, layers(10, 20), workers=3, servers=servers)


def test_a_job_that_nobody_lets_go_on_is_found_out() -> None:
    class Never(Consistency, frozen=True):
        """Lets nobody go on."""

        def may_start(self, progress: Progress) -> bool:
            return progress.round == 0

    stuck = Strategy("stuck", Rounds(Everywhere(Route(Mesh())), Never()))
    with pytest.raises(WaitLimit, match="the results of round 1"):
        simulate(stuck, layers(10), workers=2)


def test_a_server_that_finds_workers_out_of_step_ends_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Hasty(simulator.Worker):
        """Rank 1 believes to be a step ahead."""

        def __post_init__(self) -> None:
            super().__post_init__()
            sender = self.exchange._sender
            send = sender.contribute

            def ahead(state, body, frames):  # type: ignore[no-untyped-def]
                body = msgspec.structs.replace(body, step=body.step + self.rank)
                return send(state, body, frames)

            sender.contribute = ahead  # type: ignore[method-assign]

    monkeypatch.setattr(simulator, "Worker", Hasty)
    with pytest.raises(RuntimeFault, match="rank 0 at step 0, rank 1 at step 1"):
        simulate(push_pull(), layers(10), workers=2, servers=1)


def test_collectives_cannot_be_simulated() -> None:
    with pytest.raises(ConfigError, match="allreduce: only rounds over links can be simulated"):
        simulate(allreduce(), layers(10), workers=2)


def test_mesh_workers_send_rows_of_a_layer_to_different_peers_first() -> None:
    """Each begins with the next rank, so that no link receives the rows of all at once."""
    specs = [Spec("fc.weight", (12, 20), "float32", 0, layer="fc", form="factors")]
    strategy = Strategy("factors", Rounds(Everywhere(Route(Mesh(), up=Factors()))))
    run = simulate(strategy, specs, workers=4, rounds=1)
    for rank in range(4):
        sent = [e for e in run.trace if (e.kind, e.source) == ("sent", f"rank {rank}")]
        peers = [event.peer for event in sent if isinstance(event.body, Push)]
        assert peers == [f"rank {(rank + further) % 4}" for further in (1, 2, 3, 4)]
