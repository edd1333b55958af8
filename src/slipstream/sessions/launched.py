"""A job on this machine under ``slipstream run``: the strategy decides the kind of session.

Rank and size come from the environment, so this process need not join the others at once. With a
strategy of learners it gets shared memory from its launcher; with any other it joins
the others over the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from slipstream.errors import ConfigError, RuntimeFault, SlipstreamError
from slipstream.methods import SharedMemoryUpdates
from slipstream.runtime.figures.summary import WorkerFigures
from slipstream.runtime.launch.presence import Presence
from slipstream.runtime.members.joining import Limits, join
from slipstream.runtime.members.store import close_listener, open_early
from slipstream.runtime.process.environment import Environment
from slipstream.runtime.process.error_reporting import rank_reports
from slipstream.runtime.shared_memory.launcher_line import LauncherLine
from slipstream.sessions.alone import AloneSession
from slipstream.sessions.default_group import GroupStore
from slipstream.sessions.networked import NetworkedSession, on_one_machine_only
from slipstream.sessions.protocol import Session
from slipstream.sessions.shared_memory import SharedMemorySession
from slipstream.strategy import Strategy
from slipstream.systems import parse
from slipstream.torch.modes.mode import TrainingMode
from slipstream.torch.tensors.pairs import Pair


class LaunchedSession:
    """Implements ``Session`` by another session, made when it is needed."""

    def __init__(
        self, env: Environment, limits: Limits, line: LauncherLine, presence: Presence
    ) -> None:
        self._env, self._limits, self._line, self._presence = env, limits, line, presence
        self._session: Session | None = None
        self._store = open_early(env, limits.start_s)  # torch may ask for it before the ranks join
        self._reports: Callable[[SlipstreamError], bool] = self._is_first_to_report
        self._reported: dict[str, bool] = {}  # by error text: whether this process was the first

    # ---- joining

    def broadcast(self, value: Any) -> Any:
        return self._joined("has called job.broadcast before job.distribute").broadcast(value)

    def group_store(self, backend: str) -> GroupStore:
        session = self._joined("has called job.init_process_group before job.distribute")
        return session.group_store(backend)

    def gather(self, call: str, value: Any) -> list[Any]:
        return self._joined(f"has called job.{call} before job.distribute").gather(call, value)

    def open(self, pairs: Sequence[Pair], strategy: Strategy) -> TrainingMode:
        session = self._session
        if session is None and (
            self._is_for_learners or isinstance(strategy.method, SharedMemoryUpdates)
        ):
            session = self._enter(self._share_memory(strategy))
        elif session is None:
            session = self._enter(self._join_network(f"asks for {strategy.name}", self._limits))
        elif isinstance(strategy.method, SharedMemoryUpdates) and not self._is_for_learners:
            raise ConfigError(
                f"job.broadcast or job.init_process_group came before job.distribute, and "
                f"{strategy.name} was not known yet: the workers have joined over the network, and "
                "cannot share memory any more; call it after job.distribute, or start with "
                f"--strategy {strategy.name}"
            )
        return session.open(pairs, strategy)

    def _enter(self, session: Session) -> Session:
        self._session, self._reports = session, session.reports
        return session

    def _joined(self, doing: str, start_s: float = 0.0) -> Session:
        """The session; it joins now, although only the command line's strategy is known."""
        if self._session is not None:
            return self._session
        if self._is_for_learners:
            return self._enter(
                self._share_memory(parse(str(self._env.strategy), parts=self._env.parts))
            )
        if self._env.world_size == 1:
            return AloneSession(self._env)  # the strategy may still be one of learners
        limits = replace(self._limits, start_s=max(start_s, self._limits.start_s))
        return self._enter(self._join_network(doing, limits))

    @property
    def _is_for_learners(self) -> bool:
        """Whether the command line names a strategy of learners."""
        named = self._env.strategy
        return named is not None and isinstance(
            parse(named, parts=self._env.parts).method, SharedMemoryUpdates
        )

    def _share_memory(self, strategy: Strategy) -> Session:
        if self._env.server_addresses:
            raise on_one_machine_only(strategy)
        self._store = None
        close_listener(self._env)
        return SharedMemorySession(self._env, self._limits, self._line, self._presence)

    def _join_network(self, doing: str, limits: Limits) -> Session:
        if self._env.world_size == 1:
            return AloneSession(self._env)
        self._line.joins_network(doing)
        self._reports = lambda error: rank_reports(error, self._env.rank)
        store, self._store = self._store, None
        return NetworkedSession(join(self._env, limits, store))

    # ---- the end

    def leave(self, figures: WorkerFigures) -> dict[str, Any] | None:
        """Workers that have not joined yet have trained alone, and may end at very different
        times."""
        session = self._joined("has ended without job.distribute", self._limits.wait_s)
        return session.leave(figures)

    def fault_behind(self, error: BaseException) -> RuntimeFault | None:
        return None if self._session is None else self._session.fault_behind(error)

    def abort(self, error: BaseException) -> None:
        if self._session is not None:
            self._session.abort(error)
        elif isinstance(error, SlipstreamError):
            self._reports(error)  # while the launcher can still be asked

    def reports(self, error: SlipstreamError) -> bool:
        return self._reports(error)

    def _is_first_to_report(self, error: SlipstreamError) -> bool:
        """Before this rank has joined, no other rank learns of its errors: the first rank with an
        error reports it."""
        text = str(error)
        if text not in self._reported:
            self._reported[text] = True
            with suppress(SlipstreamError):  # the launcher is gone
                self._reported[text] = self._line.is_first(f"error/{text}")
        return self._reported[text]

    def close(self) -> None:
        self._store = None
        if self._session is not None:
            self._session.close()
        self._line.close()
