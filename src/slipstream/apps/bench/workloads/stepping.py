"""Workloads that measure steps: the data is random, so there is nothing to learn."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from slipstream.apps.bench.data import Examples, TensorExamples
from slipstream.apps.bench.data.generated import random_rows
from slipstream.apps.bench.devices import EmulatedNet
from slipstream.apps.bench.models import conv_net, fc_net, vgg_net
from slipstream.apps.bench.tables import Table
from slipstream.apps.bench.workloads.protocol import Workload, sgd

ROWS = 512
EMULATED_ROWS = 1 << 14
# With small images every parameter keeps its shape, and a step takes a fraction of the computation.
CONV_SIDE, VGG_SIDE = 16, 32


def fc() -> Workload:
    rows = random_rows((2048,), classes=1000, count=ROWS)
    return _stepping("fc", "three matrices, 2048-2048-2048-1000, 10.4M", 16, fc_net, rows)


def conv() -> Workload:
    rows = random_rows((3, CONV_SIDE, CONV_SIDE), classes=10, count=ROWS)
    return _stepping("conv", "six convolutions, 9.7M", 2, conv_net, rows)


def vgg(*, scale: float = 1.0) -> Workload:
    rows = random_rows((3, VGG_SIDE, VGG_SIDE), classes=_classes(scale), count=ROWS)
    what = f"VGG19's layers, {143.7 * scale:.4g}M, images {VGG_SIDE} wide"
    return _stepping("vgg", what, 4, partial(vgg_net, scale), rows)


def emulated(table: Table) -> Workload:
    """Return a table's net on an emulated device: a step of its batch takes the table's time."""
    matrices = [layer.shapes[0] for layer in table.layers if layer.kind == "fc"]
    classes = matrices[-1][0] if matrices else 1
    rows = TensorExamples(torch.zeros(EMULATED_ROWS, 1), torch.arange(EMULATED_ROWS) % classes)
    what = (
        f"emulated device, {table.parameters / 1e6:.4g}M, {table.step_ms:.0f} ms for a batch of "
        f"{table.batch}; {table.origin}"
    )
    model = partial(EmulatedNet, table)
    # Without momentum: the update is still computed.
    return _stepping(f"emulated {table.name}", what, table.batch, model, rows, momentum=0.0)


def _classes(scale: float) -> int:
    """Return the number of outputs of a classifier that shrinks like every other layer."""
    return max(1, round(1000 * math.sqrt(scale)))


def _stepping(
    name: str,
    what: str,
    batch: int,
    model: Callable[[], nn.Module],
    rows: Examples,
    *,
    momentum: float = 0.9,
) -> Workload:
    # The labels are noise: a rate that could fit them might diverge within a long run.
    optimizer = partial(sgd, lr=0.001, momentum=momentum)
    return Workload(name, what, batch, model, rows, F.cross_entropy, optimizer)
