from slipstream.topologies import Mesh
from slipstream.types import Cluster


def test_every_worker_holds_every_chunk_and_keeps_its_result() -> None:
    cluster = Cluster(3, servers=2)
    assert Mesh().deal([5, 0, 7], cluster) == ((0, 1, 2),) * 3
    assert [Mesh().fanout(node, node, cluster) for node in cluster.worker_nodes] == [()] * 3


def test_a_mesh_needs_no_servers() -> None:
    assert not Mesh.needs_servers
    assert Mesh().deal([], Cluster(1)) == ()
