"""The ASGI application: what holds for every request, then the route.

Checks come in this order: host, key, rate, then the route's own.
"""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import Awaitable, Callable
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slipstream.service import keys, metrics, own, v1
from slipstream.service.context import Service
from slipstream.service.database import DatabaseUnavailable, now_ms
from slipstream.service.errors import ApiError, not_found, too_many, unauthorized, unavailable
from slipstream.service.openapi import docs, openapi
from slipstream.service.refusals import Refused

Handler = Callable[[Request], Awaitable[Response]]
LOG = logging.getLogger("slipstream.service")
PREFIX: Final = re.compile(r"(/instances/[\w-]{1,64}|/natural-language-classifier/api)(?=/)")
HEALTH: Final = frozenset({"/livez", "/readyz"})  # they answer also without a database
OPEN: Final = frozenset({"/metrics", "/identity/token", "/openapi.json", "/docs"})
PAGE: Final = frozenset({"/", "/page.js", "/page.css"})
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def path(template: str, **handlers: Handler) -> Route:
    """All methods of one path; the others are 405 with ``Allow``."""
    if "GET" in handlers:
        handlers.setdefault("HEAD", handlers["GET"])

    async def dispatch(request: Request) -> Response:
        handler = handlers.get(request.method)
        if handler is None:
            allowed = ", ".join(sorted(handlers))
            raise ApiError(
                405,
                "Method not allowed",
                f"{request.method} is not one of {allowed} here.",
                {"Allow": allowed},
            )
        return await handler(request)

    route = Route(template, dispatch)
    route.methods = set()  # every method comes to dispatch
    return route


async def _nowhere(scope: Scope, receive: Receive, send: Send) -> None:
    raise not_found(f"There is nothing at {scope['method']} {scope['path'][:200]!r}.")


def routes() -> Router:
    """Every path of the service."""
    one, own_one = "/v1/classifiers/{id}", "/api/classifiers/{id}"
    return Router(
        [
            path("/v1/classifiers", GET=v1.list_all, POST=v1.create),
            path(one, GET=v1.show, DELETE=v1.delete),
            path(f"{one}/classify", GET=v1.classify_query, POST=v1.classify),
            path(f"{one}/classify_collection", POST=v1.classify_collection),
            path("/identity/token", POST=v1.token),
            path(own_one, GET=own.show),
            path(f"{own_one}/events", GET=own.events),
            path(f"{own_one}/report", GET=own.report),
            path(f"{own_one}/report.csv", GET=own.report_csv),
            path(f"{own_one}/log", GET=own.log),
            path(f"{own_one}/data", GET=own.data, PUT=own.put_data),
            path(f"{own_one}/model", GET=own.model),
            path(f"{own_one}/cancel", POST=own.cancel),
            path(f"{own_one}/retry", POST=own.retry),
            path(f"{own_one}/versions", GET=own.versions),
            path(own_one + "/versions/{number:int}/activate", POST=own.activate),
            path("/livez", GET=own.livez),
            path("/readyz", GET=own.readyz),
            path("/metrics", GET=metrics.show),
            path("/openapi.json", GET=openapi),
            path("/docs", GET=docs),
            path("/", GET=own.page),
            path("/{file:str}", GET=own.page),
        ],
        redirect_slashes=False,
        default=_nowhere,
    )


class Gate:
    """Wraps the routes: transaction ids, base URLs, who may call, errors.

    Args:
        service: What requests are about.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._routes: ASGIApp = routes()
        self._used: dict[str, int] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, number = time.perf_counter(), secrets.token_hex(16)
        code = 0

        async def send_marked(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                message["headers"] = [
                    *message.get("headers", []),
                    (b"x-global-transaction-id", number.encode()),
                ]
            await send(message)

        request = Request(scope, receive)
        original = scope["path"]
        try:
            await self._admit(request)
            await self._routes(scope, receive, send_marked)
        except ClientDisconnect:
            return
        except Exception as error:
            if code:  # the answer has begun; only closing tells that it is not whole
                raise
            answer = _error_answer(error, number)
            await answer(scope, receive, send_marked)
        finally:
            seconds = time.perf_counter() - began
            metrics.count_request(scope, code, seconds)
            LOG.info("%s %s %r %d %.4fs", number, scope["method"], original[:200], code, seconds)

    async def _admit(self, request: Request) -> None:
        scope, service = request.scope, self._service
        scope["slipstream.service"] = service
        if {"content-length", "transfer-encoding"} <= set(request.headers.keys()):
            raise ApiError(  # two readers of it would see two different bodies
                400,
                "Malformed body",
                "The request has Content-Length and Transfer-Encoding.",
                {"Connection": "close"},
            )
        prefix = PREFIX.match(scope["path"])
        start = prefix.end() if prefix else 0
        scope["slipstream.base"] = _base(service, request) + scope["path"][:start]
        scope["path"] = scope["path"][start:]
        scope["raw_path"] = b""
        if scope["path"] in HEALTH:
            return
        credential = request.headers.get("authorization", "")
        tenant, closed = await service.call(self._tenant, credential)
        if not closed:
            _check_host(service, request)
        if scope["path"] in OPEN or scope["path"] in PAGE:
            return
        if tenant is None:
            raise unauthorized()
        wait_s = service.rate.wait_s(tenant.id)
        if wait_s > 0:
            raise too_many(
                "Too many requests",
                f"More than {service.options.rate:,} requests a minute.",
                int(wait_s) + 1,
            )
        scope["slipstream.tenant"] = tenant

    def _tenant(self, credential: str) -> tuple[keys.Tenant | None, bool]:
        """Who calls, and whether keys are asked for."""
        service = self._service
        hashed = keys.hash_from_header(credential, service.secret, time.time())
        with service.database.reading() as reading:
            tenant = keys.tenant_of(reading, hashed) if hashed else None
            closed = not service.options.no_auth and keys.any_key(reading)
        if tenant is not None and hashed is not None:
            self._note_use(hashed)
        if tenant is None and not closed:
            tenant = keys.Tenant(keys.LOCAL, keys.LOCAL, service.options.quota)
        return tenant, closed

    def _note_use(self, hashed: str) -> None:
        if self._used.get(hashed, 0) < (now := now_ms()) - keys.USED_MS:
            self._used[hashed] = now
            with self._service.database.transaction() as transaction:
                keys.note_use(transaction, hashed, now)


def _base(service: Service, request: Request) -> str:
    options, headers = service.options, request.headers
    if options.public_url:
        return options.public_url.rstrip("/")
    scheme, host = request.scope["scheme"], headers.get("host", "")
    if options.behind_proxy:
        scheme = headers.get("x-forwarded-proto", scheme).split(",")[0].strip()
        host = headers.get("x-forwarded-host", host).split(",")[0].strip()
    return f"{scheme}://{host}"


def _check_host(service: Service, request: Request) -> None:
    """Without keys any web page could train here: only known hosts, and no foreign origin."""
    allowed = LOOPBACK | set(service.options.allow_host)
    host = host_name(request.headers.get("host", ""))
    if host not in allowed:
        raise ApiError(
            403,
            "Forbidden",
            f"Requests to this host ({host[:80]!r}) are refused; see --allow-host.",
        )
    origin = request.headers.get("origin")
    if origin is not None and host_name(urlsplit(origin).netloc) not in allowed:
        raise ApiError(
            403, "Forbidden", f"Requests from this origin ({origin[:80]!r}) are refused."
        )


def host_name(authority: str) -> str:
    """The name in a Host header.

    >>> host_name("[::1]:8080"), host_name("LOCALHOST:1"), host_name("evil")
    ('::1', 'localhost', 'evil')
    """
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()


def _error_answer(error: Exception, number: str) -> Response:
    if isinstance(error, Refused):
        error = ApiError(400, error.error, error.description)
    elif isinstance(error, DatabaseUnavailable):
        LOG.warning("%s %s", number, error)
        error = unavailable("The database does not answer now.")
    elif isinstance(error, OSError):
        LOG.warning("%s %s", number, error.strerror)
        error = unavailable("The service cannot use its disk now.", 30)
    elif not isinstance(error, ApiError):
        LOG.error("%s failed", number, exc_info=error)
        error = ApiError(
            500, "Server error", f"The service failed; its log has the transaction {number}."
        )
    return Response(error.body(), error.code, error.headers, "application/json")
