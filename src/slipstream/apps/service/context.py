"""What every request handler uses: the running service, and the request with who sent it."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from starlette.requests import Request

from slipstream.apps.service import keys
from slipstream.apps.service.data_directory import DataDirectory
from slipstream.apps.service.database import Database
from slipstream.apps.service.models import Models
from slipstream.apps.service.serve_options import ServeOptions


@dataclass
class Service:
    """The parts of a running service."""

    options: ServeOptions
    directory: DataDirectory
    database: Database
    secret: bytes
    rate: keys.RateLimit
    models: Models = field(default_factory=Models)
    # Classifications compute, so they have threads of their own; the others wait for the disk.
    answering: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "answers"))
    # Few uploads are checked at a time, so that requests of others need not wait for all of them.
    checking: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2, "checks"))
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    streams: Counter[str] = field(default_factory=Counter)  # of events, by tenant
    uploads: set[tuple[str, str]] = field(default_factory=set)  # tenants, idempotency keys
    trainer_silent_s: Callable[[], float] = lambda: 0.0
    restarts: int = 0

    def needs_key(self) -> bool:
        """Whether requests need a key: from the first one on, unless ``--no-auth`` is given."""
        return not self.options.no_auth and keys.any_key(self.database)

    def tenant(self, key_hash: str) -> keys.Tenant | None:
        """Who shows a key of this hash, or shows none; None if nobody is let in with it."""
        if key_hash and (found := keys.tenant_of(self.database, key_hash)):
            return found
        # Where there are keys (--no-auth), a wrong one is not taken for none.
        if self.needs_key() or (key_hash and keys.any_key(self.database)):
            return None
        return keys.Tenant(keys.LOCAL, keys.LOCAL, self.options.quota)

    def close(self) -> None:
        """End the threads and close the database."""
        self.answering.shutdown(cancel_futures=True)
        self.checking.shutdown(cancel_futures=True)
        self.database.close()


class Call(Request):
    """A request that was let in."""

    service: Service
    tenant: keys.Tenant
    base: str  # scheme, host and prefix as the client wrote them
    route: str = "none"  # the template of its path

    def key_hash(self) -> str:
        """The hash of the key that it shows; nothing if it shows none.

        It changes when a token expires: to that of no key.
        """
        if not (shown := self.headers.get("authorization", "")):
            return ""
        return keys.hash_from_header(shown, self.service.secret, time.time()) or keys.NO_HASH

    @property
    def id(self) -> str:
        """The classifier in its path."""
        return str(self.path_params["id"])

    def url_of(self, classifier: str) -> str:
        """The address of a classifier, as the client would write it."""
        return f"{self.base}/v1/classifiers/{classifier}"

    def version_folder(self, number: int) -> Path:
        """The files of a version of its classifier."""
        return self.service.directory.version(self.id, number)
