"""A short calibration at the start of a job: links, GEMM, and the servers' summing.

A machine's own speeds are measured once and cached; see ``speed_cache``. Links are measured at
every start, under the load they will have: every worker sends to the next one at the same time,
more and more until it takes long enough to measure. All workers use the same result, the slowest of
all workers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import torch

from slipstream._native import mean_into
from slipstream.errors import FrameRefused
from slipstream.planning.costs import Speeds
from slipstream.runtime.members.joining import Membership
from slipstream.runtime.members.member import Member
from slipstream.torch.channels.speed_cache import OwnSpeeds, cache_file, cached, this_machine
from slipstream.transports.wire import Echo, Message, Probe

LONG_ENOUGH_S = 0.05
FIRST_BYTES, MOST_BYTES = 1 << 18, 1 << 24
FRAME_BYTES = 1 << 20
GEMM_SIDE, GEMM_ROWS = 1024, 64


def measure_speeds(membership: Membership) -> Speeds:
    """The slowest link, GEMM and summing of all workers."""
    here = cached(cache_file(os.environ), this_machine(), measure_machine)
    own = [measure_link(membership), here.gemm_flops, here.summing_bytes]
    said = membership.gathering.gather("speeds", own, list[float])
    return Speeds(*(min(column) for column in zip(*said, strict=True)))


def measure_machine() -> OwnSpeeds:
    return OwnSpeeds(measure_gemm(), measure_summing())


def measure_gemm() -> float:
    """Flops per second of computing a weight gradient from few rows."""
    x, y = torch.randn(GEMM_ROWS, GEMM_SIDE), torch.randn(GEMM_ROWS, GEMM_SIDE)
    out = torch.empty(GEMM_SIDE, GEMM_SIDE)
    flops = 2 * GEMM_ROWS * GEMM_SIDE * GEMM_SIDE
    return flops / best_of(lambda: torch.mm(y.t(), x, out=out))


def measure_summing() -> float:
    """Bytes per second that a server sums."""
    inputs = [np.ones(1 << 20, np.uint8) for _ in range(4)]
    out = np.empty(1 << 20, np.uint8)
    return 4 * (1 << 20) / best_of(lambda: mean_into(out, inputs, "float32", 4.0))


def best_of(work: Callable[[], object], times: int = 5) -> float:
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def measure_link(membership: Membership) -> float:
    """Bits per second to the next worker, while all workers send to the next."""
    member, env = membership.member, membership.env
    echoes: dict[int, int] = {}
    member.on(Probe, lambda message: answer(member, message))
    member.on(Echo, lambda message: note(member, message, echoes))
    membership.gathering.gather("probing", True, bool)
    peer = f"rank {(env.rank + 1) % env.world_size}"
    number, nbytes = 0, FIRST_BYTES
    while True:
        number += 1
        begun = time.perf_counter()
        send_probe(member, peer, number, nbytes)
        member.wait_until(
            lambda number=number: number in echoes,  # type: ignore[misc]
            what="an answer to a measurement of the link",
            limit_s=membership.limits.start_s,
            missing=lambda: [peer],
        )
        elapsed = time.perf_counter() - begun
        if elapsed >= LONG_ENOUGH_S or nbytes >= MOST_BYTES:
            break
        nbytes *= 2
    membership.gathering.gather("probed", True, bool)
    return nbytes * 8 / elapsed


def send_probe(member: Member, peer: str, number: int, nbytes: int) -> None:
    frame = np.zeros(min(nbytes, FRAME_BYTES), np.uint8)
    frames = nbytes // len(frame)
    for index in range(frames):
        member.send(peer, Probe(number, index == frames - 1), [frame])


def answer(member: Member, message: Message[Probe]) -> None:
    if message.body.last:
        member.send(message.sender, Echo(message.body.number))


def note(member: Member, message: Message[Echo], echoes: dict[int, int]) -> None:
    if message.body.number > len(echoes) + 1:
        raise FrameRefused("an answer to nothing that was asked")
    with member.updating():
        echoes[message.body.number] = 1
