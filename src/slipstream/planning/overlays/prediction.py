"""The time of a broadcast: the busiest link's bytes over its rate, plus filling the pipeline.

Blocks are forwarded as they arrive, so all links of all trees carry traffic at once. A host's link
is shared by the trees in which the host forwards and by its own shard; a rack's uplink, each way,
by all trees that leave or enter the rack. Filling is the first block's time to the deepest worker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.planning.overlays.network import Network
from slipstream.planning.overlays.rotation import RankTree


@dataclass(frozen=True, slots=True)
class Load:
    """The load of one direction of one link."""

    link: str
    nbytes: float
    bits_s: float

    @property
    def seconds(self) -> float:
        return 8 * self.nbytes / self.bits_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """A broadcast's time and its components; ``egress_bytes`` by host."""

    busiest: Load
    fill_s: float
    egress_bytes: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return self.busiest.seconds + self.fill_s


def predict(
    network: Network, trees: Sequence[RankTree], *, model_bytes: float, block_bytes: float
) -> Prediction:
    """Predict the time of a broadcast: a shard of the model per tree, cut into blocks."""
    shard_bytes = model_bytes / len(trees)
    block_bytes = min(block_bytes, shard_bytes)
    traffic = _Traffic(network)
    fill_s = 0.0
    for home, tree in zip(network.servers, trees, strict=True):
        waiting = [(home, 0.0, tree[0])]
        for sender, arrived_s, children in waiting:
            fill_s = max(fill_s, arrived_s)
            for rank in children:
                receiver = network.workers[rank]
                hop_s = 0.0
                if receiver != sender:
                    hop_s = 8 * block_bytes / traffic.add(sender, receiver, shard_bytes)
                waiting.append((receiver, arrived_s + hop_s, tree[rank + 1]))
    return Prediction(traffic.busiest(), fill_s, tuple(traffic.egress))


class _Traffic:
    """Bytes on every link, each way."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.egress = [0.0] * len(network.hosts)
        self.ingress = [0.0] * len(network.hosts)
        self.up = [0.0] * len(network.racks)
        self.down = [0.0] * len(network.racks)

    def add(self, sender: int, receiver: int, nbytes: float) -> float:
        """Count a transfer, and return the rate of the slowest link on its path."""
        hosts = self.network.hosts
        self.egress[sender] += nbytes
        self.ingress[receiver] += nbytes
        rates = [hosts[sender].link_bits_s, hosts[receiver].link_bits_s]
        leaves, enters = hosts[sender].rack, hosts[receiver].rack
        if leaves != enters:
            self.up[leaves] += nbytes
            self.down[enters] += nbytes
            uplinks = (self.network.racks[rack].uplink_bits_s for rack in (leaves, enters))
            rates += [rate for rate in uplinks if rate is not None]
        return min(rates)

    def busiest(self) -> Load:
        return max(self._loads(), key=lambda load: load.seconds)

    def _loads(self) -> Iterator[Load]:
        for host, out, into in zip(self.network.hosts, self.egress, self.ingress, strict=True):
            yield Load(f"out of {host.name}", out, host.link_bits_s)
            yield Load(f"into {host.name}", into, host.link_bits_s)
        for rack, out, into in zip(self.network.racks, self.up, self.down, strict=True):
            if rack.uplink_bits_s is not None:
                yield Load(f"uplink out of {rack.name}", out, rack.uplink_bits_s)
                yield Load(f"uplink into {rack.name}", into, rack.uplink_bits_s)
