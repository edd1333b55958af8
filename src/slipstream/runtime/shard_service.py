"""What a worker asks servers for beside rounds: batches to train on, and their figures."""

from __future__ import annotations

import msgspec

from slipstream.consistency.leases import Batch
from slipstream.errors import FrameRefused
from slipstream.runtime.accounts import ServerFigures
from slipstream.runtime.member import Member
from slipstream.runtime.server import DECIDING, server_of
from slipstream.transports.wire import Account, Inquire, Lease, Leased, Message


class ShardService:
    """One question at a time, on the training thread."""

    def __init__(self, servers: int, member: Member, limit_s: float) -> None:
        self._servers, self._member, self._limit_s = servers, member, limit_s
        self._leased: Batch | None = None
        self._accounts: dict[int, ServerFigures] = {}
        member.on(Leased, self._on_leased)
        member.on(Account, self._on_account)

    def lease(self, batches: int, returned: int) -> Batch:
        """A batch of the data, of so many an epoch; the last ``returned`` were not trained on."""
        self._member.send(DECIDING, Lease(batches, returned))
        self._member.wait_until(
            lambda: self._leased is not None,
            what="a batch to train on",
            limit_s=self._limit_s,
            missing=lambda: [DECIDING],
        )
        batch, self._leased = self._leased, None
        assert batch is not None
        return batch

    def accounts(self) -> list[ServerFigures]:
        """Every server's."""
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

    def _on_leased(self, message: Message) -> None:
        body = message.body
        assert isinstance(body, Leased)
        if message.sender != DECIDING:
            raise FrameRefused(f"a batch from {message.sender}")
        with self._member.changed:
            self._leased = Batch(body.epoch, body.number)
            self._member.changed.notify_all()

    def _on_account(self, message: Message) -> None:
        index = server_of(message.sender)
        if not 0 <= index < self._servers or len(message.frames) != 1:
            raise FrameRefused(f"an account from {message.sender}")
        try:
            account = msgspec.json.decode(message.frames[0], type=ServerFigures)
        except msgspec.MsgspecError as error:
            raise FrameRefused(f"unreadable account: {error}") from error
        with self._member.changed:
            self._accounts[index] = account
            self._member.changed.notify_all()
