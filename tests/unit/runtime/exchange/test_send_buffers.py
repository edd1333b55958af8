"""Memory for what is sent is used again when nobody reads it any more."""

from dataclasses import dataclass

import numpy as np

from slipstream.runtime.exchange.send_buffers import SendBuffers


@dataclass
class Leaving:
    """A ticket that the test marks."""

    done: bool = False


def test_a_buffer_is_free_when_it_was_let_go_of_and_has_left() -> None:
    buffers, ticket = SendBuffers(), Leaving()
    loan = buffers.take("a", 8)
    assert not loan.free
    loan.sent([ticket])
    loan.release()
    assert not loan.free
    assert buffers.take("a", 8) is not loan
    ticket.done = True
    assert loan.free
    again = buffers.take("a", 8)
    assert again is loan
    assert not again.free
    assert again.tickets == []


def test_what_has_left_may_still_be_needed_here() -> None:
    buffers = SendBuffers()
    loan = buffers.take("a", 8)
    loan.sent([Leaving(done=True)])
    assert buffers.take("a", 8) is not loan
    loan.release()
    assert buffers.take("a", 8) is loan


def test_keys_have_buffers_of_their_own_and_sizes_may_change() -> None:
    buffers = SendBuffers()
    first, other = buffers.take("a", 8), buffers.take("b", 8)
    assert not np.shares_memory(first.data, other.data)
    first.release()
    larger = buffers.take("a", 16)
    assert larger.data.nbytes == 16
    larger.release()
    assert buffers.take("a", 16) is larger
    assert buffers.take("a", 8) is not first, "memory of another size was given up"


def test_no_more_buffers_than_are_in_use_at_a_time() -> None:
    buffers = SendBuffers()
    used = set()
    for _ in range(10):
        loans = [buffers.take("a", 8) for _ in range(3)]
        used |= {id(loan) for loan in loans}
        for loan in loans:
            loan.release()
    assert len(used) == 3
