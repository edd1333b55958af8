"""A worker's other requests to servers: batches to train on, and figures."""

from __future__ import annotations

import msgspec

from slipstream.consistency.leases import Batch
from slipstream.errors import FrameRefused
from slipstream.runtime.members.endpoint import Endpoint
from slipstream.runtime.servers.accounts import ServerFigures
from slipstream.runtime.servers.senders import COORDINATOR, server_of
from slipstream.transports.wire import Account, Inquire, Lease, Leased, Message


class ShardService:
    """A worker's requests to servers, one at a time, on the training thread."""

    def __init__(self, servers: int, member: Endpoint, limit_s: float) -> None:
        self._servers, self._member, self._limit_s = servers, member, limit_s
        self._leased: Batch | None = None
        self._accounts: dict[int, ServerFigures] = {}
        member.on(Leased, self._on_leased)
        member.on(Account, self._on_account)

    def lease(self, batches: int, returned: int) -> Batch:
        """Lease a batch of an epoch; the last ``returned`` ones were not trained on."""
        self._member.send(COORDINATOR, Lease(batches, returned))
        self._member.wait_until(
            lambda: self._leased is not None,
            what="a batch to train on",
            limit_s=self._limit_s,
            missing=lambda: [COORDINATOR],
        )
        batch, self._leased = self._leased, None
        assert batch is not None
        return batch

    def accounts(self) -> list[ServerFigures]:
        """Return every server's figures."""
        self._accounts.clear()
        for index in range(self._servers):
            self._member.send(f"server {index}", Inquire())
        self._member.wait_until(
            lambda: len(self._accounts) == self._servers,
            what="the servers' figures",
            limit_s=self._limit_s,
            missing=lambda: [
                f"server {k}" for k in range(self._servers) if k not in self._accounts
            ],
        )
        return [self._accounts[index] for index in range(self._servers)]

    def _on_leased(self, message: Message[Leased]) -> None:
        body = message.body
        if message.sender != COORDINATOR:
            raise FrameRefused(f"a batch from {message.sender}")
        with self._member.updating():
            self._leased = Batch(body.epoch, body.number)

    def _on_account(self, message: Message[Account]) -> None:
        index = server_of(message.sender)
        if not 0 <= index < self._servers or len(message.frames) != 1:
            raise FrameRefused(f"an account from {message.sender}")
        try:
            account = msgspec.json.decode(message.frames[0], type=ServerFigures)
        except msgspec.MsgspecError as error:
            raise FrameRefused(f"unreadable account: {error}") from error
        with self._member.updating():
            self._accounts[index] = account
