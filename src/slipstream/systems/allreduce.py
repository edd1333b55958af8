"""All-reduce: every worker ends with the mean gradient, by torch's own collectives.

- Topology: mesh, its fan-out done by ``torch.distributed`` (gloo on CPU, NCCL on GPU).
- Consistency: rounds of all n workers.
- What travels: dense gradients, 2·(n−1)/n of the model each way. Buffers such as batch-norm
  statistics travel straight between the workers: few bytes, and none while they do not change.
- When: as each layer's backward ends.
"""

from __future__ import annotations

from slipstream.codecs import Dense
from slipstream.codecs.dense import Wire
from slipstream.consistency import Rounds
from slipstream.schedules import AfterBackward, WaitFree
from slipstream.strategy import Route, Strategy
from slipstream.topologies import Mesh
from slipstream.types import Cluster, Spec

# A collective has a cost a call; larger buckets than a server's chunks pay.
BUCKET_BYTES = 8 * 1024 * 1024


def allreduce(
    *, overlap: bool = True, wire: Wire = "own", bucket_bytes: int = BUCKET_BYTES
) -> Strategy:
    """Collective all-reduce, wait-free by default."""
    road = Route(Mesh(), push=Dense(wire), publish=Dense(wire), road="collective")
    between_workers = Route(Mesh(), push=Dense(), publish=Dense())

    def route(spec: Spec, cluster: Cluster) -> Route:
        return road if spec.role == "parameter" else between_workers

    return Strategy(
        "allreduce",
        route=route,
        consistency=Rounds(),
        schedule=WaitFree() if overlap else AfterBackward(),
        chunk_bytes=bucket_bytes,
    )
