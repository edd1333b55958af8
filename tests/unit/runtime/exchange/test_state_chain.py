"""Rank 0's tensors, handed from rank to rank, however far the ranks are apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import values

from slipstream.errors import WaitLimit
from slipstream.runtime.exchange import transfer
from slipstream.runtime.exchange.state_chain import COPY, StateChain
from slipstream.runtime.exchange.transfer import Transfer
from slipstream.runtime.members.member import Member
from slipstream.testing import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import State, checksum
from slipstream.types import Values


class Chain:
    """Several ranks; messages move when the test says so."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        self.network = MemoryNetwork(seed)
        clock = VirtualClock()
        self.members = []
        for rank in range(ranks):
            transport = self.network.endpoint(f"rank {rank}")
            self.members.append(Member(f"rank {rank}", transport, clock=clock))
            for other in range(ranks):
                transport.connect(f"rank {other}", "")
        self.links = [
            StateChain(rank, ranks, Transfer(member), limit_s=0.0)
            for rank, member in enumerate(self.members)
        ]

    def deliver(self) -> None:
        for _ in range(60):
            for member in self.members:
                member.pump_once(0.0)


def tensors(fill: int, *sizes: int) -> list[Values]:
    return [values(np.full(size, fill + i, np.float32)) for i, size in enumerate(sizes)]


def equal(a: list[Values], b: list[Values]) -> bool:
    return all(np.array_equal(x.data, y.data) for x, y in zip(a, b, strict=True))


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PIECE_BYTES", 64)


@given(
    ranks=st.integers(1, 4),
    sizes=st.lists(st.integers(0, 50), max_size=4),
    seed=st.integers(0, 99),
)
def test_everybody_ends_with_rank_0s_tensors(ranks: int, sizes: list[int], seed: int) -> None:
    chain = Chain(ranks, seed)
    mine = tensors(1, *sizes)
    finished: list[int] = []
    chain.links[0].run(mine, lambda: finished.append(0))
    for rank in range(1, ranks):
        chain.deliver()  # arrives before the rank has begun to wait for it
        theirs = tensors(100 * rank, *sizes)
        chain.links[rank].run(theirs, lambda rank=rank: finished.append(rank))
        assert equal(theirs, mine)
    assert finished == list(range(ranks))


def test_several_copies_may_be_under_way_at_once() -> None:
    chain = Chain(3)
    first, second = tensors(1, 40, 7), tensors(50, 40)
    chain.links[0].run(first)
    chain.links[0].run(second)
    chain.deliver()
    for rank in (1, 2):
        a, b = tensors(-1, 40, 7), tensors(-1, 40)
        chain.links[rank].run(a)
        chain.deliver()
        chain.links[rank].run(b)
        chain.deliver()
        assert equal(a, first)
        assert equal(b, second)


def test_a_rank_that_gets_nothing_says_from_whom() -> None:
    chain = Chain(3)
    with pytest.raises(WaitLimit, match="rank 0's weights; missing: rank 1"):
        chain.links[2].run(tensors(0, 5))


def piece(start: int, frame: bytes, total: int = 40) -> State:
    return State(COPY, 0, start, total, checksum([frame]))


FOUR = bytes(4)


@pytest.mark.parametrize(
    ("sender", "body", "frames"),
    [
        ("rank 2", piece(0, FOUR), [FOUR]),
        ("rank 0", State(COPY, 0, 0, 40, 1), [FOUR]),
        ("rank 0", piece(40, FOUR), [FOUR]),
        ("rank 0", piece(0, FOUR, total=44), [FOUR]),
        ("rank 0", State("copy of rank 1", 0, 0, 40, checksum([FOUR])), [FOUR]),
        ("rank 0", piece(0, b""), []),
        ("rank 0", piece(0, FOUR * 2), [FOUR, FOUR]),
    ],
)
def test_a_piece_that_does_not_fit_is_refused_and_the_rest_still_fits(
    sender: str, body: State, frames: list[bytes]
) -> None:
    chain = Chain(3)
    link, member = chain.links[1], chain.members[1]
    target = tensors(7, 10)
    waits = member.wait_until

    def wait_until(holds, **options):  # type: ignore[no-untyped-def]
        """The piece comes while rank 1 waits; then what rank 0 really sends."""
        chain.members[int(sender[-1])].send("rank 1", body, frames)
        chain.deliver()
        assert member.refused == 1
        chain.links[0].run(tensors(3, 10))
        chain.deliver()
        waits(holds, **options)

    member.wait_until = wait_until  # type: ignore[method-assign]
    link.run(target)
    assert member.refused == 1
    assert equal(target, tensors(3, 10))


@pytest.mark.parametrize("sender", ["rank 0", "rank 2"])
def test_early_pieces_are_kept_from_the_rank_before_while_the_chain_is_open(sender: str) -> None:
    chain = Chain(3)
    link, member = chain.links[1], chain.members[1]
    source = chain.members[int(sender[-1])]
    with link.opened():
        source.send("rank 1", State(COPY, 1, 0, 40, checksum([FOUR])), [FOUR])
        chain.deliver()
        assert member.refused == (sender != "rank 0")
    source.send("rank 1", State(COPY, 2, 0, 40, checksum([FOUR])), [FOUR])
    chain.deliver()
    assert f"{COPY} 2 from {sender} is not expected" in member.last_refusal


def test_a_death_anywhere_on_the_way_ends_the_wait_of_all_behind_it() -> None:
    chain = Chain(4)
    mine = tensors(1, 50)
    chain.links[0].run(mine)  # nobody delivers: rank 1 has died with all that it had
    for rank in (2, 3):
        chain.members[rank].lost.append("rank 1")
        assert not chain.links[rank].run(tensors(9, 50))
    for rank in (2, 3):
        chain.links[rank].among([1])
    chain.links[0].among([1])
    chain.links[0].run(mine)
    for rank in (2, 3):
        chain.deliver()
        theirs = tensors(9, 50)
        assert chain.links[rank].run(theirs)
        assert equal(theirs, mine)
