"""The state of one server, behind the messages of rank 0."""

from __future__ import annotations

from collections.abc import Sequence

from slipstream.errors import FrameRefused
from slipstream.plan import Plan
from slipstream.runtime.exchange.aggregator import Aggregator
from slipstream.runtime.exchange.transfer import Transfer
from slipstream.runtime.members.member import HUB, Member
from slipstream.runtime.servers.checkpoint_state import ServerOptimizerState, StatefulUpdater
from slipstream.testing import VirtualClock
from slipstream.transports.memory import MemoryNetwork
from slipstream.transports.wire import AnyBody
from slipstream.types import Buffer, Entry, Node


class StateMessages:
    """Rank 0 and a server that updates; messages are handled at once."""

    def __init__(self, plan: Plan, node: Node, updater: StatefulUpdater) -> None:
        network, clock = MemoryNetwork(), VirtualClock()
        self._server = Member("server 0", network.endpoint("server 0"), clock=clock)
        self._hub = Member(HUB, network.endpoint(HUB), clock=clock)
        self._hub.transport.connect("server 0", "")
        self._transfer = Transfer(self._hub)
        ServerOptimizerState(node, updater, Aggregator(node, plan, updater), Transfer(self._server))

    def send(
        self, name: str, chunk: int, frames: Sequence[Buffer], entries: Sequence[Entry] = ()
    ) -> None:
        """Send state as rank 0 does.

        Raises:
            FrameRefused: The server has refused it.
        """
        self._transfer.send("server 0", name, chunk, frames, entries=entries)
        self._handle()

    def post(self, body: AnyBody, *frames: Buffer) -> None:
        """Send one message as it is."""
        self._hub.send("server 0", body, frames)
        self._handle()

    def _handle(self) -> None:
        before = self._server.refused
        self._server.pump_once(0.0)
        if self._server.refused > before:
            raise FrameRefused(self._server.last_refusal)
