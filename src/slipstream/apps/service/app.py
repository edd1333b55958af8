"""The ASGI application: what holds for every request, then its operation.

Checks come in this order: host, key, rate, then the operation's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import re
import secrets
import time
from collections.abc import Set
from typing import Final
from urllib.parse import urlsplit

import msgspec
from starlette.datastructures import MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from slipstream.apps.service import keys, metrics
from slipstream.apps.service.context import Call, Service
from slipstream.apps.service.database import DatabaseUnavailable, now_ms
from slipstream.apps.service.errors import NO_KEY, ApiError
from slipstream.apps.service.routes import choose_operation, find_operations

LOG = logging.getLogger("slipstream.apps.service")
PREFIX: Final = re.compile(r"(/instances/[\w-]{1,64}|/natural-language-classifier/api)(?=/)")
HEALTH: Final = frozenset({"/livez", "/readyz"})  # answer also if the database does not
LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})


class Gate:
    """Wraps the operations: transaction ids, base URLs, who may call, errors."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._used: dict[str, int] = {}  # when the use of a key was last written

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        began, number, code = time.perf_counter(), secrets.token_hex(16), 0

        async def send_marked(message: Message) -> None:
            nonlocal code
            if message["type"] == "http.response.start":
                code = message["status"]
                MutableHeaders(scope=message)["X-Global-Transaction-Id"] = number
            await send(message)

        call, path = Call(scope, receive), scope["path"]
        call.service = self._service
        try:
            answer = await self._answer(call)
            await answer(scope, receive, send_marked)
        except ClientDisconnect:
            return
        except Exception as error:
            if code:  # the answer has begun; only closing tells that it is not whole
                raise
            await _error_answer(error, number)(scope, receive, send_marked)
        finally:
            seconds = time.perf_counter() - began
            metrics.count_request(call.method, call.route, code, seconds)
            LOG.info("%s %s %r %d %.4fs", number, call.method, path[:200], code, seconds)

    async def _answer(self, call: Call) -> Response:
        if {"content-length", "transfer-encoding"} <= set(call.headers.keys()):
            # Two readers of it would see two different bodies.
            reason = "The request has Content-Length and Transfer-Encoding."
            raise ApiError("Malformed body", reason, Connection="close")
        path = call.scope["path"]
        start = prefix.end() if (prefix := PREFIX.match(path)) else 0
        call.base = _base(call) + path[:start]
        call.scope["path"] = path[start:]
        call.scope["raw_path"] = b""
        methods = find_operations(call)
        if call.route not in HEALTH:
            await self._admit(call, is_open=any(one.is_open for one in methods.values()))
        operation = choose_operation(call, methods)
        if inspect.iscoroutinefunction(operation.handler):
            answer = await operation.handler(call)
        else:
            answer = await asyncio.to_thread(operation.handler, call)
        if isinstance(answer, Response):
            return answer
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def _admit(self, call: Call, *, is_open: bool) -> None:
        tenant, keys_needed = await asyncio.to_thread(self._tenant, call)
        if not keys_needed:
            _check_host(call)
        elif call.headers.get("authorization", "").lower().startswith("basic"):
            # Browsers send Basic by themselves, also for requests of other pages.
            _check_origin(call, {url_host(call.base)})
        if is_open:
            return
        if tenant is None:
            raise ApiError("Unauthorized", NO_KEY)
        if (wait_s := call.service.rate.wait_s(tenant.id)) > 0:
            reason = f"More than {call.service.options.rate:,} requests a minute."
            raise ApiError("Too many requests", reason, retry_s=int(wait_s) + 1)
        call.tenant = tenant

    def _tenant(self, call: Call) -> tuple[keys.Tenant | None, bool]:
        """Who calls, and whether keys are asked for."""
        service, key_hash = call.service, call.key_hash()
        # Before the tenant: if the first key is added in between, the request is refused.
        keys_needed = service.needs_key()
        tenant, now = service.tenant(key_hash), now_ms()
        # Where there are no keys, what is shown is none: it would be kept, and without a bound.
        is_key = tenant is not None and tenant.id != keys.LOCAL
        if is_key and self._used.get(key_hash, 0) < now - keys.USED_MS:
            self._used[key_hash] = now
            with contextlib.suppress(DatabaseUnavailable):
                used = "UPDATE api_keys SET used = :now WHERE hash = :hash"
                service.database.run(used, now=now, hash=key_hash)
        return tenant, keys_needed


def _base(call: Call) -> str:
    options, headers = call.service.options, call.headers
    if options.public_url:
        return options.public_url.rstrip("/")
    scheme, host = call.scope["scheme"], headers.get("host", "")
    if options.behind_proxy:
        scheme = headers.get("x-forwarded-proto", scheme).split(",")[0].strip()
        host = headers.get("x-forwarded-host", host).split(",")[0].strip()
    return f"{scheme}://{host}"


def _check_host(call: Call) -> None:
    """Without keys any web page could train here: only known hosts, and no foreign origin."""
    host = host_name(call.headers.get("host", ""))
    if host not in LOOPBACK | _allowed_hosts(call):
        reason = f"Requests to this host ({host[:80]!r}) are refused; see --allow-host."
        raise ApiError("Forbidden", reason)
    _check_origin(call, LOOPBACK)


def _allowed_hosts(call: Call) -> set[str]:
    return {name.lower() for name in call.service.options.allow_host}


def _check_origin(call: Call, hosts: Set[str]) -> None:
    """Refuse a request of a page from a host that is none of these, nor allowed by an option.

    Schemes are not compared: a proxy that ends TLS may not tell which one the browser used.
    """
    if (origin := call.headers.get("origin")) is None:
        return
    host = url_host(origin)
    if not host or host not in hosts | _allowed_hosts(call):
        reason = f"Requests from this origin ({origin[:80]!r}) are refused; see --allow-host."
        raise ApiError("Forbidden", reason)


def url_host(url: str) -> str:
    """The host in a URL; nothing if there is none.

    >>> url_host("https://NLC.example:8080/path"), url_host("http://[::1]"), url_host("null")
    ('nlc.example', '::1', '')
    """
    try:
        return urlsplit(url).hostname or ""
    except ValueError:  # such as "http://["
        return ""


def host_name(authority: str) -> str:
    """The name in a Host header.

    >>> host_name("[::1]:8080"), host_name("LOCALHOST:1"), host_name("evil")
    ('::1', 'localhost', 'evil')
    """
    if authority.startswith("["):
        return authority[1:].partition("]")[0].lower()
    return authority.partition(":")[0].lower()


def _error_answer(error: Exception, number: str) -> Response:
    if isinstance(error, DatabaseUnavailable):
        LOG.warning("%s %s", number, error)
        error = ApiError("Service unavailable", "The database does not answer now.")
    elif isinstance(error, OSError):
        LOG.warning("%s %s", number, error.strerror)
        error = ApiError("Service unavailable", "The service cannot use its disk now.", retry_s=30)
    elif not isinstance(error, ApiError):
        LOG.error("%s failed", number, exc_info=error)
        reason = f"The service failed; its log has the transaction {number}."
        error = ApiError("Server error", reason)
    body = msgspec.json.encode(error.body)
    return Response(body, error.body.code, error.headers, "application/json")
