"""Every operation of the service, in one table: routing and ``/openapi.json`` are made of it."""

from __future__ import annotations

import functools
import html
import re
from collections.abc import Callable
from importlib import metadata, resources
from typing import Any, Final, NamedTuple

import msgspec
from starlette.responses import Response
from starlette.routing import compile_path

from slipstream.service import classifiers, metrics, own, v1
from slipstream.service.context import Call
from slipstream.service.errors import ApiError, ErrorBody, not_found

PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # no other page may lay a button of its own over ours
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
PAGE: Final = {  # file and type, by path
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


class Operation(NamedTuple):
    """What a method does at a path."""

    method: str
    path: str
    # Returns a response, or what becomes JSON. It runs in a thread unless it is async.
    handler: Callable[[Call], Any]
    answer: Any = None  # its type, if it is JSON
    trains: bool = False  # makes a job: not while the service stops
    is_open: bool = False  # needs no key


# ---- pages


def page(call: Call) -> Response:
    """The page for people."""
    name, kind = PAGE[call.route]
    content = (resources.files("slipstream.service") / "page" / name).read_bytes()
    return Response(content, 200, PAGE_HEADERS, kind)


async def openapi(call: Call) -> dict[str, Any]:
    """This description, by OpenAPI."""
    return description()


async def docs(call: Call) -> Response:
    """This list."""
    rows = "".join(
        f"<tr><td>{method.upper()}</td><td><code>{html.escape(path)}</code></td>"
        f"<td>{html.escape(entry['summary'])}</td></tr>"
        for path, methods in description()["paths"].items()
        for method, entry in methods.items()
    )
    text = (
        "<!doctype html><html lang=en><meta charset=utf-8><title>slipstream serve</title>"
        f"<h1>slipstream serve</h1><table>{rows}</table>"
        "<p>Types: <a href=/openapi.json>/openapi.json</a></p></html>"
    )
    return Response(text, 200, PAGE_HEADERS, "text/html")


# ---- the table

ALL, ONE, OWN = "/v1/classifiers", "/v1/classifiers/{id}", "/api/classifiers/{id}"
OPERATIONS: Final = (
    Operation("POST", ALL, v1.create, v1.Classifier, trains=True),
    Operation("GET", ALL, v1.list_all, v1.ClassifierList),
    Operation("GET", ONE, v1.show, v1.Classifier),
    Operation("DELETE", ONE, classifiers.delete),
    Operation("POST", f"{ONE}/classify", v1.classify, v1.Classification),
    Operation("GET", f"{ONE}/classify", v1.classify, v1.Classification),
    Operation(
        "POST", f"{ONE}/classify_collection", v1.classify_collection, v1.ClassificationCollection
    ),
    Operation("POST", "/identity/token", v1.token, v1.Token, is_open=True),
    Operation("GET", OWN, own.show, own.JobState),
    Operation("GET", f"{OWN}/events", own.events),
    Operation("GET", f"{OWN}/report", own.download),
    Operation("GET", f"{OWN}/report.csv", own.report_csv),
    Operation("GET", f"{OWN}/log", own.log),
    Operation("GET", f"{OWN}/data", own.download),
    Operation("PUT", f"{OWN}/data", own.put_data, own.Changed, trains=True),
    Operation("GET", f"{OWN}/model", own.download),
    Operation("POST", f"{OWN}/cancel", own.cancel, own.JobState),
    Operation("POST", f"{OWN}/retry", own.retry, own.JobState, trains=True),
    Operation("GET", f"{OWN}/versions", own.versions, own.Versions),
    Operation("POST", f"{OWN}/versions/{{number}}/activate", own.activate, own.Changed),
    Operation("GET", "/livez", metrics.live, is_open=True),
    Operation("GET", "/readyz", metrics.ready, is_open=True),
    Operation("GET", "/metrics", metrics.show, is_open=True),
    Operation("GET", "/openapi.json", openapi, is_open=True),
    Operation("GET", "/docs", docs, is_open=True),
    *(Operation("GET", path, page, is_open=True) for path in PAGE),
)
PATHS: Final = {
    path: (compile_path(path), {one.method: one for one in OPERATIONS if one.path == path})
    for path in dict.fromkeys(one.path for one in OPERATIONS)
}


def find_operations(call: Call) -> dict[str, Operation]:
    """What a call's path has, by method; nothing if there is no such path."""
    for path, ((pattern, _, _), methods) in PATHS.items():
        if found := pattern.fullmatch(call.scope["path"]):
            call.scope["path_params"] = found.groupdict()
            call.route = path
            return methods
    return {}


def choose_operation(call: Call, methods: dict[str, Operation]) -> Operation:
    """The operation of a call's method; 404, 405, or 503 if the service stops."""
    if not methods:
        raise not_found(f"There is nothing at {call.method} {call.scope['path'][:200]!r}.")
    methods = {"HEAD": methods["GET"], **methods} if "GET" in methods else methods
    if call.method not in methods:
        allowed = ", ".join(sorted(methods))
        reason = f"{call.method} is not one of {allowed} here."
        raise ApiError("Method not allowed", reason, Allow=allowed)
    if methods[call.method].trains and call.service.stopping.is_set():
        raise ApiError("Service unavailable", "The service is stopping; try again in a moment.")
    return methods[call.method]


@functools.cache
def description() -> dict[str, Any]:
    """The table as OpenAPI 3.1."""
    types = [ErrorBody, *dict.fromkeys(one.answer for one in OPERATIONS if one.answer)]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    contents = {
        kind: {"application/json": {"schema": schema}}
        for kind, schema in zip(types, schemas, strict=True)
    }
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        _, path, parameters = compile_path(one.path)
        paths.setdefault(path, {})[one.method.lower()] = {
            "operationId": re.sub(r"\W+", "_", f"{one.method.lower()}{path}").strip("_"),
            "summary": one.handler.__doc__,
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in parameters
            ],
            "responses": {
                "200": {"description": "Success", "content": contents.get(one.answer, {})},
                "default": {"description": "An error", "content": contents[ErrorBody]},
            },
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "slipstream serve", "version": metadata.version("slipstream")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                scheme: {"type": "http", "scheme": scheme} for scheme in ("basic", "bearer")
            },
        },
        "security": [{"basic": []}, {"bearer": []}],
    }
