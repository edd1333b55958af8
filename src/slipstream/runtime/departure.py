"""Leaving a job in order: everybody reports to rank 0, which dismisses them when all are done."""

from __future__ import annotations

from functools import partial

from slipstream.errors import RuntimeFault
from slipstream.runtime.joining import Membership
from slipstream.runtime.member import HUB
from slipstream.transports.wire import Leave


def depart(membership: Membership, summary: bytes) -> list[bytes]:
    """Leave with one's figures; on rank 0, the figures of ranks 1 to n-1."""
    member, limit_s = membership.member, membership.limits.wait_s
    if not member.is_hub:
        member.send(HUB, Leave(round=member.round), [summary])
        member.wait_until(
            lambda: member.dismissed,
            what="rank 0 to end the job",
            limit_s=limit_s,
            missing=lambda: [HUB],
        )
        return []
    member.finished = True
    others = [f"rank {rank}" for rank in range(1, membership.env.world_size)]
    ahead = partial(member.roster.ahead, member.round)
    member.wait_until(
        lambda: all(name in member.summaries for name in others) or bool(ahead()),
        what="all ranks to finish",
        limit_s=limit_s,
        missing=lambda: [name for name in others if name not in member.summaries],
    )
    if ahead():
        raise RuntimeFault(
            f"{', '.join(ahead())} still trains, but rank 0 has finished: every worker must run "
            "the same number of steps"
        )
    for name in [*others, *member.roster.heard]:
        member.send(name, Leave())
    return [member.summaries[name] for name in others]
