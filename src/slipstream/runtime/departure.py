"""Leaving a job in order: everybody reports to rank 0, which dismisses them when all are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from slipstream.errors import RuntimeFault, WaitLimit
from slipstream.runtime.joining import Membership
from slipstream.runtime.member import HUB
from slipstream.transports.wire import Final, Leave, Retire


def depart(membership: Membership, summary: bytes) -> list[bytes]:
    """Leave with one's figures; on rank 0, the figures of ranks 1 to n-1."""
    member = membership.member
    if not member.is_hub:
        member.send(HUB, Leave(round=member.round), [summary])
        wait_for_others(
            membership,
            lambda: member.dismissed,
            what="rank 0 to end the job",
            missing=lambda: [HUB],
        )
        return []
    member.finished = True
    others = [f"rank {rank}" for rank in range(1, membership.env.world_size)]
    ahead = partial(member.roster.ahead, member.round)
    wait_for_others(
        membership,
        lambda: (
            all(name in member.summaries or name in member.lost for name in others)
            or (member.lockstep and bool(ahead()))
        ),
        what="all ranks to finish",
        missing=lambda: [
            name for name in others if name not in member.summaries and name not in member.lost
        ],
    )
    if member.lockstep and ahead():
        raise RuntimeFault(
            f"{', '.join(ahead())} still trains, but rank 0 has finished: every worker must run "
            "the same number of steps"
        )
    membership.close_store()  # before anybody can begin another job
    for name in [*others, *member.roster.heard]:
        member.send(name, Leave())
    return [member.summaries[name] for name in others if name in member.summaries]


def settle(membership: Membership) -> bool:
    """Wait until nobody trains any more; whether everybody is here to take the last weights."""
    member, world = membership.member, membership.env.world_size
    others = [f"rank {rank}" for rank in range(1, world)]
    if not member.is_hub:
        member.send(HUB, Retire(membership.env.rank))
        wait_for_others(
            membership,
            lambda: member.final is not None,
            what="the others to finish training",
            missing=lambda: [HUB],
        )
        return bool(member.final)
    wait_for_others(
        membership,
        lambda: all(name in member.retired or name in member.lost for name in others),
        what="the others to finish training",
        missing=lambda: [n for n in others if n not in member.retired and n not in member.lost],
    )
    complete = not member.lost
    for name in others:
        member.send(name, Final(complete))
    return complete


def wait_for_others(
    membership: Membership,
    holds: Callable[[], bool],
    *,
    what: str,
    missing: Callable[[], Sequence[str]],
) -> None:
    """Where workers end at different times, the limit is on how long nobody makes a round."""
    member, limit_s = membership.member, membership.limits.wait_s
    while True:
        before = dict(member.roster.rounds)
        try:
            member.wait_until(holds, what=what, limit_s=limit_s, missing=missing)
        except WaitLimit:
            if member.lockstep or member.roster.rounds == before:
                raise
        else:
            return
