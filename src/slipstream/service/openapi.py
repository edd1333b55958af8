"""``/openapi.json`` (3.1), made of the msgspec types, and ``/docs``, plain HTML made of it."""

from __future__ import annotations

import functools
import html
from collections.abc import Awaitable, Callable
from importlib import metadata
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from slipstream.service import own, v1
from slipstream.service.errors import ErrorBody

Handler = Callable[[Request], Awaitable[Response]]
ONE, OWN = "/v1/classifiers/{id}", "/api/classifiers/{id}"
# Method, path, handler (its docstring describes it), the type of its answer.
OPERATIONS: tuple[tuple[str, str, Handler, Any], ...] = (
    ("post", "/v1/classifiers", v1.create, v1.Classifier),
    ("get", "/v1/classifiers", v1.list_all, v1.ClassifierList),
    ("get", ONE, v1.show, v1.Classifier),
    ("delete", ONE, v1.delete, None),
    ("post", f"{ONE}/classify", v1.classify, v1.Classification),
    ("get", f"{ONE}/classify", v1.classify_query, v1.Classification),
    ("post", f"{ONE}/classify_collection", v1.classify_collection, v1.ClassificationCollection),
    ("post", "/identity/token", v1.token, v1.Token),
    ("get", OWN, own.show, own.JobState),
    ("get", f"{OWN}/events", own.events, None),
    ("get", f"{OWN}/report", own.report, None),
    ("get", f"{OWN}/report.csv", own.report_csv, None),
    ("get", f"{OWN}/log", own.log, None),
    ("get", f"{OWN}/data", own.data, None),
    ("put", f"{OWN}/data", own.put_data, own.Changed),
    ("get", f"{OWN}/model", own.model, None),
    ("post", f"{OWN}/cancel", own.cancel, own.JobState),
    ("post", f"{OWN}/retry", own.retry, own.JobState),
    ("get", f"{OWN}/versions", own.versions, None),
    ("post", f"{OWN}/versions/{{number}}/activate", own.activate, own.Changed),
    ("get", "/livez", own.livez, None),
    ("get", "/readyz", own.readyz, None),
)


@functools.cache
def description() -> dict[str, Any]:
    """The whole description.

    >>> description()["openapi"]
    '3.1.0'
    """
    types = [ErrorBody, *{answer: None for *_, answer in OPERATIONS if answer is not None}]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    by_type = dict(zip(types, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for method, path, handler, answer in OPERATIONS:
        content = {} if answer is None else {"application/json": {"schema": by_type[answer]}}
        names = [name for name in ("id", "number") if f"{{{name}}}" in path]
        paths.setdefault(path, {})[method] = {
            "operationId": f"{handler.__module__.rpartition('.')[2]}_{handler.__name__}",
            "summary": (handler.__doc__ or "").strip(),
            "parameters": [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in names
            ],
            "responses": {
                "200": {"description": "Success", "content": content},
                "default": {
                    "description": "An error",
                    "content": {"application/json": {"schema": by_type[ErrorBody]}},
                },
            },
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "slipstream serve", "version": metadata.version("slipstream")},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "basic": {"type": "http", "scheme": "basic"},
                "bearer": {"type": "http", "scheme": "bearer"},
            },
        },
        "security": [{"basic": []}, {"bearer": []}],
    }


async def openapi(request: Request) -> Response:
    """GET /openapi.json"""
    return v1.as_json(description())


async def docs(request: Request) -> Response:
    """GET /docs"""
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
    return Response(text, media_type="text/html", headers={"Content-Security-Policy": own.CSP})
