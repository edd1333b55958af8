"""A server of shared weights takes all of a checkpoint, or nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hostile_checkpoints import COUNTED, FILES, changed, fact
from slipstream._native import format_segment, segment_nbytes
from slipstream.errors import CheckpointError, DamagedCheckpoint
from slipstream.planning.segment import FROZEN, SegmentPlan, SharedTensor, settings_vector
from slipstream.runtime.shared_memory.checkpoints import Snapshot, newest_in
from slipstream.runtime.shared_memory.messages import Start
from slipstream.runtime.shared_memory.update_server import UpdateServer, restore_from
from slipstream.torch.modes.learner_slots import Slot
from slipstream.transports.shared_memory import SharedMemory

GOOD = Path(__file__).parents[3] / "checkpoints" / "gadei.safetensors"
LEARNERS, SLOTS = 2, 2
TENSORS = [
    SharedTensor("first.weight", (6, 4), "float32", 4, 0),
    SharedTensor("first.bias", (6,), "float32", 4, 0),
    SharedTensor("norm.weight", (6,), "float32", 4, 0),
    SharedTensor("norm.bias", (6,), "float32", 4, 0),
    SharedTensor("last.weight", (3, 6), "float32", 4, 0),
    SharedTensor("last.bias", (3,), "float32", 4, 0),
    SharedTensor("norm.running_mean", (6,), "float32", 4, FROZEN),
    SharedTensor("norm.running_var", (6,), "float32", 4, FROZEN),
    SharedTensor("norm.num_batches_tracked", (), "int64", 8, FROZEN),
]


def server(job: str = "a job") -> UpdateServer:
    plan = SegmentPlan.of(TENSORS, groups=1)
    shape = (LEARNERS, SLOTS, plan.slot_nbytes, plan.weights_nbytes)
    memory = SharedMemory.create(segment_nbytes(*shape))
    format_segment(memory.memory, *shape)
    settings = [settings_vector("Adam", {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8})]
    made = UpdateServer(Start(job, plan, "Adam", settings, False, False, "", 1e9), memory)
    memory.close()
    made._weights[:] = bytes(i % 251 for i in range(len(made._weights)))
    for moment in made._optimizer._moments:
        moment[:] = 7
    made._optimizer._steps[:] = 9
    return made


def everything(server: UpdateServer) -> dict[str, Any]:
    return {
        "weights": bytes(server._weights),
        "moments": [moment.tobytes() for moment in server._optimizer._moments],
        "steps": server._optimizer._steps.tolist(),
        "version": server.rings.version,
        "taken": [server.rings.taken(learner) for learner in range(LEARNERS)],
    }


# Of settings, random generators and averages a server takes nothing.
NOT_TAKEN = (
    "lr ", "decay", "betas", "eps", "a setting", "a switch", "an unset", "parameters in",
    "a group less", "a group more", "generator", "an average", "a residual",
    "momentum under another",
)  # fmt: skip
CASES = [name for name in FILES | COUNTED if not name.startswith(NOT_TAKEN)]


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_checkpoint_is_refused_and_changes_nothing(name: str, tmp_path: Path) -> None:
    path = tmp_path / "hostile"
    (FILES | COUNTED)[name](GOOD, path)
    here = server()
    before = everything(here)
    with pytest.raises(CheckpointError) as caught:
        restore_from(path, here)
    assert str(path) in str(caught.value)
    assert everything(here) == before


def test_the_good_one_of_an_earlier_version_is_taken() -> None:
    here = server()
    restore_from(GOOD, here)
    snapshot = Snapshot.read(GOOD)
    assert here.rings.version == snapshot.version == 8
    for tensor, at in zip(TENSORS, here._plan.weights_at, strict=True):
        piece = snapshot.pieces[f"model/{tensor.name}"]
        assert bytes(here._weights[at : at + tensor.nbytes]) == bytes(piece.data), tensor.name
    for name, entries in here._optimizer.pieces().items():
        assert set(entries) == {"exp_avg", "exp_avg_sq", "step"}
        for key, piece in entries.items():
            saved = snapshot.pieces[f"optimizer/state/{name}/{key}"]
            assert bytes(piece.data) == bytes(saved.data), (name, key)


@pytest.mark.parametrize("taken", [[], [1], [1, 2, 3]])
def test_what_was_taken_must_be_of_these_learners(taken: list[int], tmp_path: Path) -> None:
    changed(lambda facts, _: facts.update(taken=taken, job="a job"))(GOOD, tmp_path / "file")
    snapshot = Snapshot.read(tmp_path / "file")
    with pytest.raises(CheckpointError, match=f"of {len(taken)} learners; there are 2"):
        server("a job").taken_by(snapshot)
    assert server("another").taken_by(snapshot) == [0, 0]


@pytest.mark.parametrize(
    "make",
    [fact("taken", [1, -1]), fact("taken", "4"), fact("job", 3), fact("step", -5)],
)
def test_facts_of_other_types_are_passed_over(make: Callable[..., None], tmp_path: Path) -> None:
    """Servers begin from the checkpoint before."""
    good = tmp_path / "weights-000000000000008.safetensors"
    good.write_bytes(GOOD.read_bytes())
    newest = tmp_path / "weights-000000000000009.safetensors"
    make(GOOD, newest)
    with pytest.raises(DamagedCheckpoint, match=r"\$\.(taken|job|step)"):
        Snapshot.read(newest)
    found, wrong = newest_in(tmp_path)
    assert found is not None
    assert found.version == 8
    assert len(wrong) == 1


def test_a_step_may_be_counted_in_another_precision(tmp_path: Path) -> None:
    def doubled(_: object, tensors: dict[str, Any]) -> None:
        for name in tensors:
            if name.endswith("/step"):
                tensors[name] = tensors[name].double()

    changed(doubled)(GOOD, tmp_path / "file")
    here = server()
    restore_from(tmp_path / "file", here)
    assert np.unique(here._optimizer._steps).tolist() == [8]


def test_restored_server_applies_only_rows_pushed_afterwards() -> None:
    """A learner writes rows into a slot that it takes to be zero: also one that was discarded."""
    plan = SegmentPlan.of([SharedTensor("table", (5, 3), "float32", 4, 0, in_rows=True)], groups=1)
    shape = (1, 1, plan.slot_nbytes, plan.weights_nbytes)
    memory = SharedMemory.create(segment_nbytes(*shape))
    format_segment(memory.memory, *shape)
    settings = settings_vector("SGD", {"lr": 1.0})
    here = UpdateServer(Start("a job", plan, "SGD", [settings], False, False, "", 1e9), memory)
    slot = Slot(memory, here.rings.slot_at(0, 0), plan)

    def push(row: int, value: float) -> None:
        values = torch.full((1, 3), value)
        gradient = torch.sparse_coo_tensor([[row]], values, (5, 3), check_invariants=True)
        assert here.rings.reserve(0, 0.0) == 0
        form, _ = slot.place(0, gradient.coalesce())
        slot.describe([form], settings, here.rings.version)
        here.rings.publish(0)

    before = here.snapshot()
    assert before is not None
    push(row=1, value=5.0)
    assert here.restore(before) == [1]
    assert not here.serve_one(0.0), "the gradient pushed before the restore was applied"
    push(row=1, value=1.0)
    assert here.serve_one(0.0)
    after = here.snapshot()
    assert after is not None
    table = np.frombuffer(after.pieces["model/table"].data, np.float32).reshape(5, 3)
    assert table.tolist() == [[-1.0 if row == 1 else 0.0] * 3 for row in range(5)]


def test_a_checkpoint_that_is_not_finite_is_refused_unless_asked(tmp_path: Path) -> None:
    def diverged(_: object, tensors: dict[str, Any]) -> None:
        tensors[f"model/{TENSORS[0].name}"].view(-1)[1] = float("nan")

    changed(diverged)(GOOD, tmp_path / "file")
    here = server()
    before = everything(here)
    with pytest.raises(CheckpointError, match=f"model/{TENSORS[0].name} has values that are not"):
        restore_from(tmp_path / "file", here)
    assert everything(here) == before
    restore_from(tmp_path / "file", here, takes_nonfinite=True)
    assert here.rings.version == 8
