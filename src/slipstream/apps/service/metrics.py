"""Health of the service, and ``/metrics`` for Prometheus."""

from __future__ import annotations

import hmac
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.responses import JSONResponse, Response

from slipstream.apps.service.context import Call
from slipstream.apps.service.database import DatabaseUnavailable, now_ms
from slipstream.apps.service.errors import NO_KEY, ApiError
from slipstream.apps.service.keys import bearer
from slipstream.apps.service.serve_options import MIB

REGISTRY: Final = CollectorRegistry()
REQUESTS: Final = Counter(
    "slipstream_requests", "Requests.", ["method", "route", "code"], registry=REGISTRY
)
SECONDS: Final = Histogram(
    "slipstream_request_seconds", "Seconds a request took.", ["route"], registry=REGISTRY
)
STATES: Final = ("waiting", "running", "done", "failed", "cancelled")
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})
FREE_NBYTES: Final = 1024 * MIB  # below, the service is not ready
TRAINER_SILENT_S: Final = 30.0


def count_request(method: str, route: str, code: int, seconds: float) -> None:
    """Count a request under its route; never under what a client wrote."""
    REQUESTS.labels(method if method in METHODS else "other", route, str(code)).inc()
    SECONDS.labels(route).observe(seconds)


def show(call: Call) -> Response:
    """Figures for Prometheus; with ``--metrics-key`` only for who has it."""
    service = call.service
    given, wanted = bearer(call.headers.get("authorization", "")), service.options.metrics_key
    if wanted and not hmac.compare_digest(wanted.encode(), given.encode()):
        raise ApiError("Unauthorized", NO_KEY)
    counts = service.database.run(
        "SELECT state, COUNT(*) AS n, MIN(queued) AS oldest, SUM(samples_s) AS samples_s"
        " FROM jobs GROUP BY state"
    )
    now = now_ms()
    none = {"n": 0, "oldest": now, "samples_s": 0}
    jobs = dict.fromkeys(STATES, none) | {row["state"]: row for row in counts}
    gauges = CollectorRegistry()
    by_state = Gauge("slipstream_jobs", "Jobs by state.", ["state"], registry=gauges)
    for state, row in jobs.items():
        by_state.labels(state).set(row["n"])
    oldest_s = (now - jobs["waiting"]["oldest"]) / 1000
    for name, description, value in (
        ("oldest_wait_seconds", "How long the oldest waiting job waits.", oldest_s),
        ("samples_per_second", "Samples a second of running jobs.", jobs["running"]["samples_s"]),
        ("trainer_restarts", "Restarts of the trainer.", service.restarts),
        ("disk_free_bytes", "Free on the data's disk.", service.directory.free_nbytes()),
    ):
        Gauge(f"slipstream_{name}", description, registry=gauges).set(value)
    shown = generate_latest(REGISTRY) + generate_latest(gauges)
    return Response(shown, media_type="text/plain; version=0.0.4")


async def live(call: Call) -> dict[str, bool]:
    """Whether the process answers."""
    return {"live": True}


def ready(call: Call) -> Response:
    """Whether database, disk and trainer are well."""
    service, database_answers = call.service, True
    try:
        service.database.run("DELETE FROM purges WHERE at < 0")
    except DatabaseUnavailable:
        database_answers = False
    well = {
        "database": database_answers,
        "disk": service.directory.free_nbytes() >= FREE_NBYTES,
        "trainer": service.trainer_silent_s() < TRAINER_SILENT_S,
        "running": not service.stopping.is_set(),
    }
    all_well = all(well.values())
    shown = {"ready": all_well, **well, "at": now_ms() // 1000}
    return JSONResponse(shown) if all_well else JSONResponse(shown, 503, {"Retry-After": "5"})
