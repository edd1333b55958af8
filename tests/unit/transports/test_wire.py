"""Headers from anywhere: what was sent, or FrameRefused, and nothing else."""

from typing import get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import FrameRefused
from slipstream.transports.wire import (
    HEADER_BYTES,
    Account,
    AnyBody,
    Arrived,
    Beat,
    Commit,
    Configure,
    Contribute,
    Early,
    Echo,
    Envelope,
    Fault,
    Fetch,
    Final,
    Gathered,
    Greeting,
    HandoverDone,
    Inquire,
    Lease,
    Leased,
    Leave,
    Lost,
    Message,
    Part,
    Probe,
    Publish,
    Push,
    Ready,
    Rejoin,
    Release,
    Replicas,
    Return,
    Returned,
    RouteUpdated,
    Rows,
    Serve,
    SnapshotDue,
    State,
    Tail,
    Welcome,
    WorkerLeft,
    checksum,
    decode_header,
    encode_header,
)

COUNTS = st.integers(0, (1 << 62) - 1)
CHECKSUMS = st.integers(0, (1 << 32) - 1)
NAMES = st.text(max_size=64)
TEXTS = st.text(max_size=300)
NUMBERS = st.floats(allow_nan=False)
SETTINGS = st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | NUMBERS | st.none() | TEXTS
GROUPS = st.lists(
    st.dictionaries(st.text(max_size=20), SETTINGS | st.lists(NUMBERS, max_size=3), max_size=4),
    max_size=3,
)
SOURCES = st.sampled_from(["all", "any"]) | COUNTS
ADDRESSES = st.sampled_from(["tcp://127.0.0.1:1", "tcp://[fe80::1%eth0]:65535", "memory://a"])
BODIES: dict[type[AnyBody], st.SearchStrategy[AnyBody]] = {
    Push: st.builds(
        Push,
        COUNTS,
        COUNTS,
        COUNTS,
        st.lists(COUNTS, max_size=5),
        CHECKSUMS,
        st.none() | GROUPS,
        COUNTS,
        st.floats(0, 1),
        st.booleans(),
    ),
    Publish: st.builds(
        Publish,
        COUNTS,
        COUNTS,
        COUNTS,
        st.lists(COUNTS, max_size=5),
        CHECKSUMS,
        st.lists(COUNTS, max_size=5),
    ),
    Beat: st.builds(
        Beat,
        st.dictionaries(NAMES, COUNTS, max_size=6),
        st.lists(NAMES, max_size=3),
        st.dictionaries(NAMES, st.lists(NAMES, max_size=3), max_size=3),
    ),
    Leave: st.builds(Leave, st.none() | TEXTS, st.booleans(), COUNTS, st.none() | NAMES),
    Fault: st.builds(Fault, NAMES, st.none() | TEXTS, NUMBERS),
    Early: st.builds(Early, COUNTS, COUNTS, CHECKSUMS),
    Part: st.builds(Part, COUNTS, COUNTS, COUNTS, COUNTS, st.booleans(), CHECKSUMS),
    Tail: st.builds(Tail, COUNTS, COUNTS, COUNTS, st.booleans()),
    HandoverDone: st.builds(HandoverDone, COUNTS, COUNTS, COUNTS, COUNTS),
    Return: st.builds(Return, ADDRESSES, COUNTS),
    Returned: st.builds(Returned, COUNTS, ADDRESSES, COUNTS, COUNTS, COUNTS),
    Rejoin: st.builds(Rejoin, ADDRESSES, COUNTS),
    Contribute: st.builds(Contribute, NAMES, SOURCES, st.booleans()),
    Gathered: st.builds(Gathered, NAMES, st.lists(COUNTS, max_size=5)),
    Greeting: st.builds(Greeting),
    Welcome: st.builds(
        Welcome,
        COUNTS,
        COUNTS,
        st.lists(COUNTS, max_size=5),
        st.lists(st.tuples(COUNTS, NAMES, COUNTS), max_size=5),
        st.lists(COUNTS, max_size=5),
        NUMBERS,
    ),
    Rows: st.builds(Rows, COUNTS, st.lists(COUNTS, max_size=5)),
    Replicas: st.builds(Replicas, CHECKSUMS),
    Arrived: st.builds(Arrived, COUNTS, COUNTS),
    Commit: st.builds(Commit, COUNTS, st.lists(COUNTS, max_size=5)),
    Serve: st.builds(Serve, COUNTS, COUNTS),
    WorkerLeft: st.builds(WorkerLeft, COUNTS),
    Lost: st.builds(Lost, COUNTS),
    RouteUpdated: st.builds(RouteUpdated, COUNTS),
    Lease: st.builds(Lease, st.integers(1, 1 << 40)),
    Leased: st.builds(Leased, COUNTS, COUNTS),
    SnapshotDue: st.builds(SnapshotDue, COUNTS),
    Final: st.builds(Final, st.booleans()),
    Inquire: st.builds(Inquire),
    Account: st.builds(Account),
    Probe: st.builds(Probe, COUNTS, st.booleans()),
    Echo: st.builds(Echo, COUNTS),
    Configure: st.builds(Configure),
    Release: st.builds(Release),
    Ready: st.builds(Ready, st.none() | TEXTS),
    Fetch: st.builds(Fetch, NAMES, COUNTS),
    State: st.builds(
        State,
        NAMES,
        COUNTS,
        COUNTS,
        COUNTS,
        CHECKSUMS,
        st.lists(st.tuples(COUNTS, NAMES, NAMES)),
        COUNTS,
    ),
}
ANY_BODY = st.one_of(*BODIES.values())


def test_no_kind_of_message_is_left_out() -> None:
    assert set(BODIES) == set(get_args(AnyBody))


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=25)
def test_every_kind_of_message_survives_the_wire(kind: type[AnyBody], data: st.DataObject) -> None:
    sender, body = data.draw(NAMES), data.draw(BODIES[kind])
    envelope = decode_header(encode_header(sender, body))
    assert envelope == Envelope(sender, body)
    assert type(envelope.body) is kind


def readable(header: bytes) -> bool:
    """Whether a header can be read; anything but FrameRefused is an error."""
    try:
        envelope = decode_header(header)
    except FrameRefused:
        return False
    assert isinstance(envelope.body, get_args(AnyBody))
    assert len(envelope.sender) <= 64
    return True


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bytes_are_read_or_refused(header: bytes) -> None:
    readable(header)


@given(ANY_BODY, st.data())
@settings(max_examples=300)
def test_damaged_headers_are_read_or_refused(body: AnyBody, data: st.DataObject) -> None:
    header = bytearray(encode_header("rank 1", body))
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(header) - 1))
        change = data.draw(st.sampled_from(["byte", "cut", "insert"]))
        if change == "byte":
            header[place] = data.draw(st.integers(0, 255))
        elif change == "insert":
            header[place:place] = data.draw(st.binary(max_size=9))
        elif place:
            del header[place:]
    readable(bytes(header))


@given(ANY_BODY, st.binary(min_size=1, max_size=8))
def test_a_header_with_something_after_it_is_refused(body: AnyBody, tail: bytes) -> None:
    assert not readable(encode_header("rank 1", body) + tail)


@given(
    st.recursive(
        SETTINGS | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=3),
        max_leaves=12,
    )
)
def test_other_msgpack_is_refused(content: object) -> None:
    header = msgspec.msgpack.encode(content)
    if readable(header):
        assert msgspec.msgpack.decode(header, type=Envelope)


@pytest.mark.parametrize(
    "content",
    [
        ["rank 1", ["fetch", "state", -1]],
        ["rank 1", ["fetch", "state", 1 << 62]],
        ["rank 1", ["fetch", "state", 1.5]],
        ["rank 1", ["fetch", "state", "1"]],
        ["rank 1", ["fetch", "state", True]],
        ["rank 1", ["fetch", 1]],
        ["rank 1", ["fetch"]],
        ["rank 1", ["fetch", "state", 1, 2]],
        ["rank 1", ["nonsense", 1]],
        ["rank 1", []],
        ["r" * 65, ["fetch", "state"]],
        [1, ["fetch", "state"]],
        ["rank 1", ["state", "weights", 1, 0, 4, 1 << 32]],
        ["rank 1", ["leave", "x" * 20_001]],
        ["rank 1", ["push", 0, 0, 0, b"\1", 0, [{"lr": {"deep": 1}}]]],
        ["rank 1", ["state", "state", 0, 0, 4, 0, [[0, "n" * 65, "float32"]]]],
        {"sender": "rank 1", "body": ["fetch", "state"]},
    ],
)
def test_values_outside_their_type_are_refused(content: object) -> None:
    with pytest.raises(FrameRefused, match="unreadable header"):
        decode_header(msgspec.msgpack.encode(content))


@pytest.mark.parametrize(
    "announced",
    [
        b"\xdd\xff\xff\xff\xff",  # four billion entries
        b"\xdf\xff\xff\xff\xff",  # as a map
        b"\xc6\xff\xff\xff\xff",  # as bytes
        b"\xdb\xff\xff\xff\xff",  # as text
    ],
)
def test_a_size_that_is_only_announced_costs_nothing(announced: bytes) -> None:
    import tracemalloc

    prefix = encode_header("rank 1", State("state", 3, 0, 0, 7))[:-4]  # up to the list of entries
    tracemalloc.start()
    try:
        for header in (prefix + announced + b"\0" * 20, announced + b"\0" * 20):
            assert not readable(header)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_header_has_a_largest_size() -> None:
    with pytest.raises(FrameRefused, match=f"a header of {HEADER_BYTES + 1} bytes"):
        decode_header(bytes(HEADER_BYTES + 1))
    assert not readable(b"\x91" * HEADER_BYTES), "nested as deep as it is long"


@given(st.lists(st.binary(max_size=50), max_size=5), st.data())
def test_checksums_run_on_over_frames_and_see_every_bit(
    frames: list[bytes], data: st.DataObject
) -> None:
    whole = b"".join(frames)
    assert checksum(frames) == checksum([whole])
    assert checksum([memoryview(frame) for frame in frames]) == checksum(frames)
    if whole:
        place = data.draw(st.integers(0, len(whole) * 8 - 1))
        damaged = bytearray(whole)
        damaged[place // 8] ^= 1 << place % 8
        assert checksum([damaged]) != checksum(frames)


def test_a_message_knows_its_payload() -> None:
    assert Message("rank 0", Leave()).nbytes == 0
    assert Message("rank 0", Leave(), [b"abc", memoryview(bytes(5))]).nbytes == 8


@pytest.mark.parametrize(
    "address",
    ["ipc:///tmp/somewhere", "tcp://example.org:80", "tcp://1.2.3.4:123456", "", "x" * 65],
)
def test_an_address_is_one_of_ours(address: str) -> None:
    for body in (Return(address, 1), Rejoin(address, 1), Returned(1, address, 2, 1, 0)):
        with pytest.raises(FrameRefused, match="unreadable header"):
            decode_header(encode_header("rank 1", body))
