"""What the operator may set, for the API process and for the trainer."""

from __future__ import annotations

import os
from typing import Final

import msgspec

from slipstream.apps.service.keys import QUOTA
from slipstream.apps.service.rows import Limits

MIB: Final = 1024 * 1024
LEASE_MS: Final = 30_000
DATABASE_VARIABLE: Final = "SLIPSTREAM_DATABASE"
METRICS_KEY_VARIABLE: Final = "SLIPSTREAM_METRICS_KEY"
SECRET_VARIABLES: Final = (DATABASE_VARIABLE, METRICS_KEY_VARIABLE)


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options of ``slipstream serve``; its help says what each is."""

    data: str
    host: str = "127.0.0.1"
    port: int = 8080
    database: str = ""
    learners: int = min(4, os.cpu_count() or 1)
    jobs: int = 1
    queue: int = 64
    epochs: int = 200
    rate: int = 1500
    quota: int = QUOTA  # of classifiers made without a key
    limits: Limits = Limits()
    max_body: int = 96 * MIB
    max_model: int = 256 * MIB
    connections: int = 512
    public_url: str = ""
    allow_host: tuple[str, ...] = ()
    behind_proxy: bool = False
    no_auth: bool = False
    metrics_key: str = ""


class TrainerStart(msgspec.Struct, frozen=True):
    """What the API process writes to the trainer's standard input."""

    options: ServeOptions
    owner: str  # of the database
