"""A ticket speaks for every frame of its message, whatever the last one is like."""

import pytest
from halls import TURNS

from slipstream.transports.credentials import Credentials
from slipstream.transports.wire import Configure
from slipstream.transports.zmq import ZmqTransport

MEMBERS = Credentials.for_run(b"a secret of this test", b"job", encrypt=False)


@pytest.mark.parametrize("last", [b"", b"small", bytes(100_000)])
def test_a_ticket_is_not_done_before_its_largest_frame_has_left(last: bytes) -> None:
    sender = ZmqTransport("sender", host="127.0.0.1", credentials=MEMBERS)
    receiver = ZmqTransport("receiver", host="127.0.0.1", credentials=MEMBERS)
    try:
        sender.connect("receiver", receiver.address)
        ticket = sender.send("receiver", Configure(), [bytes(1 << 20), last])
        assert sender.receive(0.2) is None
        # Nobody has answered the handshake yet, so nothing can have left.
        assert not ticket.done
        message = None
        for _ in range(TURNS):
            message = message or receiver.receive(0.02)
            sender.receive(0.02)
            if ticket.done and message is not None:
                break
        assert ticket.done
        assert message is not None
        assert [len(frame) for frame in message.frames] == [1 << 20, len(last)]
    finally:
        sender.close(0.1)
        receiver.close(0.1)
