"""``init``, the first line: it joins the job for which this process was started."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from slipstream.job import Job
from slipstream.part_modules import module_names
from slipstream.runtime.launch.presence import Presence
from slipstream.runtime.launch.whole_lines import write_whole_lines
from slipstream.runtime.members.joining import Limits, join
from slipstream.runtime.members.store import require_same_world
from slipstream.runtime.process.environment import Environment, Nonfinite, nonfinite_in, secret_of
from slipstream.runtime.process.error_reporting import rank_reports, report_errors
from slipstream.runtime.process.slurm import slurm_variables
from slipstream.runtime.shared_memory.launcher_line import LauncherLine
from slipstream.sessions.alone import AloneSession
from slipstream.sessions.launched import LaunchedSession
from slipstream.sessions.networked import NetworkedSession
from slipstream.sessions.protocol import Session
from slipstream.torch.tensors.threads import limit_threads
from slipstream.transports.descriptors import raise_descriptor_limit
from slipstream.transports.local_socket import is_socket


def init(
    *,
    servers: int | None = None,
    secret: str | None = None,
    encrypt: bool | None = None,
    interface: str | None = None,
    nonfinite: Nonfinite | None = None,
    parts: Sequence[str] | None = None,
    start_limit_s: float = 120.0,
    wait_limit_s: float = 600.0,
    silence_limit_s: float = 5.0,
) -> Job:
    """Join the job for which this process was started; without a launcher, a job of one process.

    Arguments have precedence over the environment.

    >>> import slipstream
    >>> with slipstream.init() as job:
    ...     print(job.rank, "of", job.world_size)
    0 of 1

    Args:
        servers: how many server processes there are (``SLIPSTREAM_SERVERS``); by default one per
            host, if the strategy needs servers.
        secret: the job's secret, the same on all ranks and needed across hosts
            (``SLIPSTREAM_SECRET``).
        encrypt: whether links are encrypted (``SLIPSTREAM_ENCRYPT``); by default those between
            hosts are.
        interface: the interface or address to listen on (``SLIPSTREAM_INTERFACE``).
        nonfinite: how to treat a gradient with a NaN or an infinity: it is used, with a warning
            ("pass", the default), does not count ("refuse"), or ends the job ("stop")
            (``SLIPSTREAM_NONFINITE``).
        parts: the modules of parts of your own, which servers that this job starts may import
            (``SLIPSTREAM_PARTS``); by default none.
        start_limit_s: how long all ranks may take to join.
        wait_limit_s: how long any later wait may take.
        silence_limit_s: how long a member may be silent before it counts as lost.

    Returns:
        The job, to be used as a context manager.

    Raises:
        LaunchError: the environment is unusable, or some ranks did not join in time.
        SecretError: a secret is missing, or differs between ranks.
        ConfigError: an argument is invalid.
    """
    variables = with_step(os.environ)
    rank = rank_in(variables)
    # Other ranks cannot know why this one does not join: the first rank of each host reports it.
    is_first_here = variables.get("LOCAL_RANK", "0") == "0"
    rules = [lambda error: is_first_here or rank_reports(error, rank)]
    report_errors(rank, lambda error: rules[-1](error))
    raise_descriptor_limit()
    env = with_arguments(variables, servers, secret, encrypt, interface, nonfinite, parts)
    if env.launcher is not None:
        write_whole_lines()
    if env.world_size > 1:
        env = env.with_secret()
    rules.append(lambda error: rank_reports(error, rank))
    presence = Presence(env.presence_fd)
    limits = Limits(start_limit_s, wait_limit_s, silence_limit_s)
    session = session_for(env, limits, presence)
    rules.append(session.reports)
    return Job(env, session, presence)


def session_for(env: Environment, limits: Limits, presence: Presence) -> Session:
    """The session for the job that the environment describes.

    Under a launcher on this machine, the session joins once the strategy is known; elsewhere the
    ranks join now.
    """
    if env.control_fd is not None and is_socket(env.control_fd):
        line = LauncherLine(env.control_fd, limits.start_s, limits.wait_s)
        return LaunchedSession(env, limits, line, presence)
    if env.world_size > 1:
        return NetworkedSession(join(env, limits))
    require_same_world(env)
    return AloneSession(env)


def with_step(env: Mapping[str, str]) -> Mapping[str, str]:
    """The environment, with what a step of Slurm says instead of a launcher."""
    found = slurm_variables(env)
    if threads := found.pop("OMP_NUM_THREADS", None):
        limit_threads(int(threads))
    return {**env, **found}


def with_arguments(
    variables: Mapping[str, str],
    servers: int | None,
    secret: str | None,
    encrypt: bool | None,
    interface: str | None,
    nonfinite: Nonfinite | None,
    parts: Sequence[str] | None,
) -> Environment:
    """The environment, overridden by the arguments that were given to ``init``."""
    env = Environment.read(variables)
    return replace(
        env,
        servers=servers or env.servers,
        secret=secret_of(secret) if secret else env.secret,
        encrypt=env.encrypt if encrypt is None else encrypt,
        interface=interface or env.interface,
        nonfinite=env.nonfinite if nonfinite is None else nonfinite_in(nonfinite),
        parts=env.parts if parts is None else module_names(parts),
    )


def rank_in(env: Mapping[str, str]) -> int:
    """RANK; 0 if it is invalid, so that the error about it is reported."""
    rank, world = env.get("RANK", "0"), env.get("WORLD_SIZE", "1")
    usable = rank.isdecimal() and world.isdecimal() and int(rank) < int(world)
    return int(rank) if usable else 0
