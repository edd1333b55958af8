"""What every request handler uses."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from starlette.requests import Request

from slipstream.service.data_directory import DataDirectory
from slipstream.service.database import Database
from slipstream.service.errors import unavailable
from slipstream.service.keys import RateLimit, Tenant
from slipstream.service.models import Models
from slipstream.service.serve_options import MODELS_NBYTES, ServeOptions

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Service:
    """The parts of a running service."""

    options: ServeOptions
    directory: DataDirectory
    database: Database
    secret: bytes
    models: Models = field(default_factory=lambda: Models(MODELS_NBYTES))
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    uploads: set[tuple[str, str]] = field(default_factory=set)
    trainer_beat: Callable[[], float] = lambda: 0.0
    restarts: int = 0
    rate: RateLimit = field(init=False)

    def __post_init__(self) -> None:
        self.rate = RateLimit(self.options.rate)
        # Database calls wait for the disk; classifications compute.
        self._calls = ThreadPoolExecutor(4, "calls")
        self._answers = ThreadPoolExecutor(2, "answers")

    async def call(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run something that waits for disk or database in a thread."""
        bound = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._calls, bound)

    async def answer(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a classification in one of two threads."""
        bound = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._answers, bound)

    def refuse_if_stopping(self) -> None:
        """503 while the service stops."""
        if self.stopping.is_set():
            raise unavailable("The service is stopping; try again in a moment.")

    def close(self) -> None:
        """End the threads and close the database."""
        self._calls.shutdown(wait=True, cancel_futures=True)
        self._answers.shutdown(wait=True, cancel_futures=True)
        self.database.close()


def service_of(request: Request) -> Service:
    """The service a request came to."""
    service: Service = request.scope["slipstream.service"]
    return service


def tenant_of_request(request: Request) -> Tenant:
    """Who sent a request."""
    tenant: Tenant = request.scope["slipstream.tenant"]
    return tenant


def base_url(request: Request) -> str:
    """Scheme, host and prefix as the client wrote them."""
    base: str = request.scope["slipstream.base"]
    return base
