import hashlib
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from slipstream.transports.credentials import Credentials, stretch

SECRET = b"correct horse battery staple"
HERE = "tcp://127.0.0.1:5000"
CURVE = Credentials.for_run(SECRET, b"job", encrypt=True)
PLAIN = Credentials.for_run(SECRET, b"job", encrypt=False)


def request(mechanism: bytes, *proof: bytes, version: bytes = b"1.0") -> list[bytes]:
    """What ZeroMQ asks of its ZAP handler."""
    return [version, b"42", b"slipstream", b"127.0.0.1", b"", mechanism, *proof]


def curve_proof(credentials: Credentials) -> bytes:
    """The 32 bytes by which a connecting member is known."""
    return z85.decode(presented(credentials).curve_publickey)


def plain_proof(credentials: Credentials) -> tuple[bytes, bytes]:
    socket = presented(credentials)
    return socket.plain_username, socket.plain_password


def presented(credentials: Credentials) -> Any:
    """A socket's options; a real one does not tell all of them."""
    socket: Any = SimpleNamespace()
    credentials.present(socket, HERE)
    return socket


def admitted(credentials: Credentials, asked: list[bytes]) -> bool:
    version, request_id, status, text, user, metadata = credentials.answer(asked, HERE)
    assert (version, request_id, metadata) == (b"1.0", asked[1], b"")
    assert (status, text, user) in [
        (b"200", b"OK", b"member"),
        (b"400", b"not a member of this job", b""),
    ]
    return status == b"200"


STRANGERS = [
    Credentials.for_run(b"another secret entirely", b"job", encrypt=True),
    Credentials.for_run(SECRET, b"another job", encrypt=True),
    Credentials.for_run(SECRET + b"!", b"job", encrypt=True),
]


def test_keys_differ_by_purpose_by_job_and_by_secret() -> None:
    keys = {
        credentials.derive(purpose)
        for credentials in (CURVE, *STRANGERS)
        for purpose in ("token", "sign", "curve/listen", "curve/connect")
    }
    assert len(keys) == 16
    assert all(len(key) == 32 for key in keys)
    assert CURVE.derive("token") == PLAIN.derive("token"), "all members derive the same"


def test_members_are_admitted() -> None:
    assert admitted(CURVE, request(b"CURVE", curve_proof(CURVE)))
    assert admitted(PLAIN, request(b"PLAIN", *plain_proof(PLAIN)))


@pytest.mark.parametrize("stranger", STRANGERS)
def test_others_are_not(stranger: Credentials) -> None:
    in_plain = Credentials(stranger.key, encrypt=False)
    assert not admitted(CURVE, request(b"CURVE", curve_proof(stranger)))
    assert not admitted(PLAIN, request(b"PLAIN", *plain_proof(in_plain)))


def test_a_listener_takes_its_own_mechanism_only() -> None:
    assert not admitted(CURVE, request(b"PLAIN", *plain_proof(PLAIN)))
    assert not admitted(PLAIN, request(b"CURVE", curve_proof(CURVE)))
    for credentials in (CURVE, PLAIN):
        assert not admitted(credentials, request(b"NULL"))
        assert not admitted(credentials, request(b"GSSAPI", b"principal"))


def test_another_version_of_the_protocol_is_refused() -> None:
    assert not admitted(CURVE, request(b"CURVE", curve_proof(CURVE), version=b"2.0"))


@given(
    st.sampled_from([b"CURVE", b"PLAIN", b"NULL", b""]),
    st.lists(st.binary(max_size=70), max_size=4),
)
def test_malformed_proofs_are_refused_without_an_error(
    mechanism: bytes, proof: list[bytes]
) -> None:
    assert not admitted(CURVE, request(mechanism, *proof))
    assert not admitted(PLAIN, request(mechanism, *proof))


def test_a_proof_of_almost_the_right_length_is_refused() -> None:
    proof = curve_proof(CURVE)
    user, password = plain_proof(PLAIN)
    for wrong in (proof[:-1], proof + b"\0", proof[:28], b""):
        assert not admitted(CURVE, request(b"CURVE", wrong))
    assert not admitted(CURVE, request(b"CURVE", proof, proof))
    assert not admitted(PLAIN, request(b"PLAIN", user, password[:-1]))
    assert not admitted(PLAIN, request(b"PLAIN", password))
    assert not admitted(PLAIN, request(b"PLAIN", user, password, b""))


def test_signatures_belong_to_one_content_and_one_job() -> None:
    signature = CURVE.sign(b"address")
    assert CURVE.genuine(b"address", signature)
    assert not CURVE.genuine(b"address!", signature)
    assert not CURVE.genuine(b"address", signature[:-1] + b"\0")
    assert not CURVE.genuine(b"address", b"")
    assert not any(stranger.genuine(b"address", signature) for stranger in STRANGERS)


def test_a_secret_is_stretched() -> None:
    """Guessing costs as much as scrypt does, with parameters that are not lowered unnoticed."""
    salt, cost = b"slipstream job secret", 1 << 14
    expected = hashlib.scrypt(SECRET, salt=salt, n=cost, r=8, p=1, dklen=32)
    assert stretch(SECRET) == expected
    assert stretch(SECRET) != stretch(SECRET + b"!")


def test_runs_of_one_job_have_keys_of_their_own() -> None:
    keys = {Credentials.for_run(SECRET, run, encrypt=True).key for run in (b"one", b"two")}
    assert len(keys) == 2
    assert all(SECRET not in key for key in keys)


def test_servers_have_process_numbers_that_all_members_know() -> None:
    assert CURVE.process_of("server 0") == Credentials(CURVE.key, encrypt=False).process_of(
        "server 0"
    )
    assert CURVE.process_of("server 0") != CURVE.process_of("server 1")
    assert 0 <= CURVE.process_of("server 0") < 1 << 62


def test_a_token_is_worth_nothing_to_another_listener() -> None:
    """Whoever takes the port of a member that has died is shown this one."""
    user, password = plain_proof(PLAIN)
    assert PLAIN.admits(b"PLAIN", [user, password], HERE)
    assert not PLAIN.admits(b"PLAIN", [user, password], "tcp://127.0.0.1:5001")
