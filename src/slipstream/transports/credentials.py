"""Who may connect: keys derived from the job secret, checked before a single message is read."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass

import zmq
from zmq.utils import z85

ZAP_VERSION = b"1.0"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Everything that follows from (secret, job id): all members can derive all of it.

    ``encrypt=True`` is ZeroMQ CURVE: authenticated and encrypted. ``encrypt=False`` is PLAIN:
    only the job's token is checked, which is enough where nobody else can read the network.
    """

    secret: bytes
    job: str
    encrypt: bool

    def derive(self, purpose: str) -> bytes:
        return hmac.digest(self.secret, f"slipstream/{self.job}/{purpose}".encode(), "sha256")

    def sign(self, content: bytes) -> bytes:
        return hmac.digest(self.derive("sign"), content, hashlib.sha256)

    def genuine(self, content: bytes, signature: bytes) -> bool:
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

    def present(self, socket: zmq.Socket[bytes]) -> None:
        """Make a connecting socket prove its membership."""
        if self.encrypt:
            socket.curve_serverkey = self._keys("listen")[0]
            socket.curve_publickey, socket.curve_secretkey = self._keys("connect")
        else:
            socket.plain_username = b"member"
            socket.plain_password = self.derive("token").hex().encode()

    def admits(self, mechanism: bytes, proof: list[bytes]) -> bool:
        if mechanism == b"CURVE" and self.encrypt and len(proof) == 1:
            return hmac.compare_digest(proof[0], z85.decode(self._keys("connect")[0]))
        if mechanism == b"PLAIN" and not self.encrypt and len(proof) == 2:
            return hmac.compare_digest(proof[1], self.derive("token").hex().encode())
        return False

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The ZAP reply (RFC 27) to an authentication request."""
        version, request_id, _domain, _address, _identity, mechanism, *proof = request
        if version == ZAP_VERSION and self.admits(mechanism, proof):
            return [ZAP_VERSION, request_id, b"200", b"OK", b"member", b""]
        return [ZAP_VERSION, request_id, b"400", b"not a member of this job", b"", b""]
