"""The channels of one worker for one pair."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from slipstream.runtime.exchange.channel import Channel
from slipstream.runtime.exchange.rounds import RoundChannel
from slipstream.runtime.gossip.gossip import GossipChannel
from slipstream.runtime.hosts.follower import HostFollower
from slipstream.runtime.hosts.leader import HostLeader
from slipstream.runtime.hosts.memory import HostMemory
from slipstream.torch.channels.collective_channel import CollectiveChannel


@dataclass(frozen=True, slots=True)
class ChannelSet:
    """A worker's channels: at most one for each transport.

    Where there are two levels, ``host`` drives the others, or stands for them at a worker that has
    none.
    """

    collective: CollectiveChannel | None = None
    partial: GossipChannel | None = None
    links: RoundChannel | None = None
    host: HostLeader | HostFollower | None = None
    memory: HostMemory | None = None

    @property
    def rounds(self) -> RoundChannel | HostLeader | HostFollower | None:
        """The one that knows of rounds, and takes layers in compact form."""
        return self.links if self.host is None else self.host

    @property
    def all(self) -> tuple[Channel, ...]:
        """Those that training drives."""
        if self.host is not None:
            return (self.host,)
        return (*([] if self.collective is None else [self.collective]), *self.of_messages)

    @property
    def of_messages(self) -> tuple[GossipChannel | RoundChannel, ...]:
        """The channels that send messages over links, and can continue without a lost worker."""
        found = (self.partial, self.links)
        return tuple(channel for channel in found if channel is not None)

    def bytes(self) -> tuple[Counter[str], Counter[str]]:
        """Payload sent and received, by scheme."""
        sent: Counter[str] = Counter()
        received: Counter[str] = Counter()
        for channel in self.all:
            sent += channel.sent
            received += channel.received
        return sent, received

    def close(self) -> None:
        if self.collective is not None:
            self.collective.collectives.close()
        if self.memory is not None:
            self.memory.close()
