"""Credentials: keys derived from the job secret, checked before any message is read.

The secret is stretched once (scrypt), so that guessing a weak one from a signature is slow. Every
run of a job has its own key, derived from the stretched secret and from values that are new in
that run; signatures and messages of another run are invalid.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import zmq
from zmq.utils import z85

ZAP_VERSION = b"1.0"
# About 50 ms and 16 MiB for one guess. The salt is the same for every job: all members must derive
# the same key before they have agreed on anything.
SCRYPT_COST, SCRYPT_BLOCK, SCRYPT_SALT = 1 << 14, 8, b"slipstream job secret"


def stretch(secret: bytes) -> bytes:
    """Return a key from a secret that may be weak."""
    return hashlib.scrypt(secret, salt=SCRYPT_SALT, n=SCRYPT_COST, r=SCRYPT_BLOCK, p=1, dklen=32)


@dataclass(frozen=True, slots=True)
class Credentials:
    """The key of one run, and all that its members derive from it.

    ``encrypt=True`` is ZeroMQ CURVE: authenticated and encrypted, both ways. ``encrypt=False`` is
    PLAIN: a connecting peer sends a token, which is enough if nobody else can read the network.
    Each listener has its own token: a process that takes a dead member's port receives a token that
    no other member accepts.
    """

    key: bytes
    encrypt: bool

    @classmethod
    def for_run(cls, master: bytes, run: bytes, *, encrypt: bool) -> Credentials:
        """Return credentials from the job's key, and bytes that are unique to this run."""
        return cls(hmac.digest(master, b"slipstream/run/" + run, "sha256"), encrypt)

    def derive(self, purpose: str) -> bytes:
        """Return a key for one purpose."""
        return hmac.digest(self.key, f"slipstream/{purpose}".encode(), "sha256")

    def process_of(self, server: str) -> int:
        """Return the process number of a server: see ``wire.Envelope``."""
        return process_number(self.derive(f"process/{server}"))

    def sign(self, content: bytes) -> bytes:
        """Return a signature of this run."""
        return hmac.digest(self.derive("sign"), content, hashlib.sha256)

    def genuine(self, content: bytes, signature: bytes) -> bool:
        """Return whether a signature is of this content and run."""
        return hmac.compare_digest(self.sign(content), signature)

    def _keys(self, side: str) -> tuple[bytes, bytes]:
        private = z85.encode(self.derive(f"curve/{side}"))
        return zmq.curve_public(private), private

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Make a listening socket accept members only (through the ZAP handler)."""
        socket.zap_domain = b"slipstream"
        if self.encrypt:
            socket.curve_server = True
            socket.curve_secretkey = self._keys("listen")[1]
        else:
            socket.plain_server = True

    def token(self, listener: str) -> bytes:
        """Return the token that a listener's peers send, in hexadecimal."""
        return self.derive(f"token/{listener}").hex().encode()

    def present(self, socket: zmq.Socket[bytes], listener: str) -> None:
        """Make a socket prove its membership to the listener at that address."""
        if self.encrypt:
            socket.curve_serverkey = self._keys("listen")[0]
            socket.curve_publickey, socket.curve_secretkey = self._keys("connect")
        else:
            socket.plain_username = b"member"
            socket.plain_password = self.token(listener)

    def admits(self, mechanism: bytes, proof: list[bytes], listener: str) -> bool:
        """Return whether a proof is valid for this listener."""
        if mechanism == b"CURVE" and self.encrypt and len(proof) == 1:
            return hmac.compare_digest(proof[0], z85.decode(self._keys("connect")[0]))
        if mechanism == b"PLAIN" and not self.encrypt and len(proof) == 2:
            return hmac.compare_digest(proof[1], self.token(listener))
        return False

    def answer(self, request: list[bytes], listener: str) -> list[bytes]:
        """Return the ZAP reply (RFC 27) to an authentication request at this address."""
        version, request_id, _domain, _address, _identity, mechanism, *proof = request
        if version == ZAP_VERSION and self.admits(mechanism, proof, listener):
            return [ZAP_VERSION, request_id, b"200", b"OK", b"member", b""]
        return [ZAP_VERSION, request_id, b"400", b"not a member of this job", b"", b""]


def process_number(nonce: bytes) -> int:
    """Return a number for a process, from bytes that are unique to it."""
    return int.from_bytes(nonce[:8], "big") >> 2
