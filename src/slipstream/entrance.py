"""The first line: ``init`` joins the job that this process was started for, or is alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from slipstream.job import Job
from slipstream.learner_job import LearnerJob
from slipstream.runtime.environment import Environment, Nonfinite, nonfinite_in
from slipstream.runtime.joining import Limits, join
from slipstream.runtime.last_words import speak_for
from slipstream.transports.descriptors import raise_descriptor_limit


def init(
    *,
    servers: int | None = None,
    secret: str | None = None,
    encrypt: bool | None = None,
    interface: str | None = None,
    nonfinite: Nonfinite | None = None,
    start_limit_s: float = 120.0,
    wait_limit_s: float = 600.0,
    silence_limit_s: float = 5.0,
) -> Job:
    """Join the job this process was started for; alone, a world of one.

    Arguments win over the environment (``SLIPSTREAM_SERVERS``, ``SLIPSTREAM_SECRET``,
    ``SLIPSTREAM_ENCRYPT``, ``SLIPSTREAM_INTERFACE``, ``SLIPSTREAM_NONFINITE``). Limits are in
    seconds: for all ranks to join, for any later wait, and for how long a member may be silent
    before it counts as lost. ``nonfinite`` says what becomes of a gradient with a NaN or an
    infinity: it goes on with a warning ("pass", the default), does not count ("refuse"), or ends
    the job ("stop").
    """
    known: list[Environment] = []
    first_here = os.environ.get("LOCAL_RANK", "0") == "0"
    speak_for(
        spoken_rank(os.environ),
        is_local=first_here,
        joined=lambda: bool(known),
        is_learner="SLIPSTREAM_CONTROL_FD" in os.environ,
    )
    raise_descriptor_limit()
    env = Environment.read(os.environ)
    env = replace(
        env,
        servers=servers or env.servers,
        secret=secret.encode() if secret is not None else env.secret,
        encrypt=env.encrypt if encrypt is None else encrypt,
        interface=interface or env.interface,
        nonfinite=env.nonfinite if nonfinite is None else nonfinite_in(nonfinite),
    )
    limits = Limits(start_limit_s, wait_limit_s, silence_limit_s)
    if env.control_fd is not None:
        known.append(env)
        return LearnerJob(env, limits)
    if env.world_size > 1:
        env.require_secret()
    known.append(env)
    return Job(env, join(env, limits) if env.world_size > 1 else None)


def spoken_rank(env: Mapping[str, str]) -> int:
    """RANK; 0 where that makes no sense, so that the complaint about it is heard."""
    rank, world = env.get("RANK", "0"), env.get("WORLD_SIZE", "1")
    usable = rank.isdecimal() and world.isdecimal() and int(rank) < int(world)
    return int(rank) if usable else 0
