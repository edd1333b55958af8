"""``/metrics`` for Prometheus."""

from __future__ import annotations

import hmac
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from slipstream.service.context import Service, service_of
from slipstream.service.database import now_ms
from slipstream.service.errors import unauthorized

REGISTRY: Final = CollectorRegistry()
REQUESTS: Final = Counter(
    "slipstream_requests", "Requests.", ["method", "route", "code"], registry=REGISTRY
)
SECONDS: Final = Histogram(
    "slipstream_request_seconds", "Seconds a request took.", ["route"], registry=REGISTRY
)
JOBS: Final = Gauge("slipstream_jobs", "Jobs by state.", ["state"], registry=REGISTRY)
OLDEST_S: Final = Gauge(
    "slipstream_oldest_wait_seconds", "How long the oldest waiting job waits.", registry=REGISTRY
)
SAMPLES_S: Final = Gauge(
    "slipstream_samples_per_second", "Samples a second of running jobs.", registry=REGISTRY
)
RESTARTS: Final = Gauge(
    "slipstream_trainer_restarts", "Restarts of the trainer.", registry=REGISTRY
)
FREE: Final = Gauge("slipstream_disk_free_bytes", "Free on the data's disk.", registry=REGISTRY)
STATES: Final = ("waiting", "running", "done", "failed", "cancelled")
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"})


def count_request(scope: Scope, code: int, seconds: float) -> None:
    """Count a request under its route; never under what a client wrote."""
    route = getattr(scope.get("route"), "path", "none")
    method = scope["method"] if scope["method"] in METHODS else "other"
    REQUESTS.labels(method, route, str(code)).inc()
    SECONDS.labels(route).observe(seconds)


async def show(request: Request) -> Response:
    """GET /metrics; with ``--metrics-key`` only for who has it."""
    service = service_of(request)
    wanted = service.options.metrics_key
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if wanted and not hmac.compare_digest(wanted.encode(), given.encode()):
        raise unauthorized()
    await service.call(_measure, service)
    return Response(generate_latest(REGISTRY), media_type="text/plain; version=0.0.4")


def _measure(service: Service) -> None:
    with service.database.reading() as reading:
        counts = reading.run(
            "SELECT state, COUNT(*) AS n, MIN(queued) AS oldest, SUM(samples_s) AS samples_s"
            " FROM jobs GROUP BY state"
        )
    by_state = {row["state"]: row for row in counts}
    for state in STATES:
        JOBS.labels(state).set(by_state[state]["n"] if state in by_state else 0)
    oldest = by_state.get("waiting", {}).get("oldest")
    OLDEST_S.set(0 if oldest is None else max(0, now_ms() - oldest) / 1000)
    SAMPLES_S.set(by_state.get("running", {}).get("samples_s") or 0)
    RESTARTS.set(service.restarts)
    FREE.set(service.directory.free_nbytes())
