"""Every operation of the service, in one table: routing and ``/openapi.json`` are made of it."""

from __future__ import annotations

import functools
import pkgutil
import re
from collections.abc import Callable
from importlib import metadata, resources
from typing import Any, Final, NamedTuple

import msgspec
from starlette.responses import Response
from starlette.routing import compile_path

from slipstream.apps.service import classifiers, downloads, metrics, own, v1
from slipstream.apps.service.context import Call
from slipstream.apps.service.docs import docs_page
from slipstream.apps.service.errors import ApiError, ErrorBody, not_found
from slipstream.apps.service.examples import EXAMPLES, PARAMETERS, TAGS, tag_of
from slipstream.apps.service.guide import guide_page
from slipstream.apps.service.rows import Limits
from slipstream.apps.service.upload import TrainingParts

PAGE_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",  # no other page may lay a button of its own over ours
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
MEDIA_TYPES: Final = {  # of bodies that are not JSON
    TrainingParts: "multipart/form-data",
    v1.TokenForm: "application/x-www-form-urlencoded",
}
PAGE: Final = {  # file and type, by path
    "/": ("index.html", "text/html"),
    "/page.js": ("page.js", "text/javascript"),
    "/page.css": ("page.css", "text/css"),
}


class Parameter(NamedTuple):
    """What a request may have besides its path and body."""

    name: str
    place: str  # "query" or "header"
    required: bool = False


class Operation(NamedTuple):
    """What a method does at a path."""

    method: str
    path: str
    # Returns a response, or what becomes JSON. It runs in a thread unless it is async.
    handler: Callable[[Call], Any]
    answer: Any = None  # its type, if it is JSON; or where to import that
    body: Any = None  # what the request carries: the type of its fields
    more: tuple[Parameter, ...] = ()  # parameters that are not in the path
    trains: bool = False  # makes a job: not while the service stops
    is_open: bool = False  # needs no key


# ---- pages


def page(call: Call) -> Response:
    """The page for people."""
    return _page_file(call)


def page_script(call: Call) -> Response:
    """The script of the page."""
    return _page_file(call)


def page_style(call: Call) -> Response:
    """The style sheet of the page, of ``/docs`` and of ``/guide``."""
    return _page_file(call)


def _page_file(call: Call) -> Response:
    name, kind = PAGE[call.route]
    content = (resources.files("slipstream.apps.service") / "page" / name).read_bytes()
    return Response(content, 200, PAGE_HEADERS, kind)


def limits(call: Call) -> Limits:
    """The limits of training data, as the operator has set them."""
    return call.service.options.limits


def openapi(call: Call) -> dict[str, Any]:
    """This description, by OpenAPI."""
    return description()


def docs(call: Call) -> Response:
    """This description, as a page."""
    return Response(docs_page(description(), call.base), 200, PAGE_HEADERS, "text/html")


def guide(call: Call) -> Response:
    """The guide: how to use and to run the service."""
    return Response(guide_page(), 200, PAGE_HEADERS, "text/html")


# ---- the table

ALL, ONE, OWN = "/v1/classifiers", "/v1/classifiers/{id}", "/api/classifiers/{id}"
TEXT, WHOLE = Parameter("text", "query", required=True), Parameter("all", "query")
LONG = Parameter("long", "query")  # "cut": texts that are too long are cut
ONCE, AFTER = Parameter("Idempotency-Key", "header"), Parameter("Last-Event-ID", "header")
REPORT = "slipstream.apps.service.report:Report"  # of the training job; loaded when it is asked for
OPERATIONS: Final = (
    Operation("POST", ALL, v1.create, v1.Classifier, TrainingParts, (ONCE, LONG), trains=True),
    Operation("GET", ALL, v1.list_all, v1.ClassifierList),
    Operation("GET", ONE, v1.show, v1.Classifier),
    Operation("DELETE", ONE, classifiers.delete),
    Operation("POST", f"{ONE}/classify", v1.classify, v1.Classification, v1.Phrase),
    Operation("GET", f"{ONE}/classify", v1.classify, v1.Classification, more=(TEXT,)),
    Operation(
        "POST",
        f"{ONE}/classify_collection",
        v1.classify_collection,
        v1.ClassificationCollection,
        v1.PhraseCollection,
    ),
    Operation("POST", "/identity/token", v1.token, v1.Token, v1.TokenForm, is_open=True),
    Operation("GET", OWN, own.show, own.JobState),
    Operation("GET", f"{OWN}/events", own.events, more=(AFTER,)),
    Operation("GET", f"{OWN}/report", downloads.report, REPORT),
    Operation("GET", f"{OWN}/report.csv", downloads.report_csv),
    Operation("GET", f"{OWN}/log", downloads.log, more=(WHOLE,)),
    Operation("GET", f"{OWN}/data", downloads.data),
    Operation("PUT", f"{OWN}/data", own.put_data, own.Changed, TrainingParts, (LONG,), trains=True),
    Operation("GET", f"{OWN}/model", downloads.model),
    Operation("POST", f"{OWN}/cancel", own.cancel, own.JobState),
    Operation("POST", f"{OWN}/retry", own.retry, own.JobState, trains=True),
    Operation("GET", f"{OWN}/versions", own.versions, own.Versions),
    Operation("POST", f"{OWN}/versions/{{number}}/activate", own.activate, own.Changed),
    Operation("GET", "/api/limits", limits, Limits, is_open=True),
    Operation("GET", "/livez", metrics.live, is_open=True),
    Operation("GET", "/readyz", metrics.ready, is_open=True),
    Operation("GET", "/metrics", metrics.show, is_open=True),
    Operation("GET", "/openapi.json", openapi, is_open=True),
    Operation("GET", "/docs", docs, is_open=True),
    Operation("GET", "/guide", guide, is_open=True),
    Operation("GET", "/", page, is_open=True),
    Operation("GET", "/page.js", page_script, is_open=True),
    Operation("GET", "/page.css", page_style, is_open=True),
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
    names = [ErrorBody, *(name for one in OPERATIONS for name in (one.answer, one.body) if name)]
    types = [pkgutil.resolve_name(name) if isinstance(name, str) else name for name in names]
    schemas, components = msgspec.json.schema_components(
        types, ref_template="#/components/schemas/{name}"
    )
    contents = {
        name: {MEDIA_TYPES.get(name, "application/json"): {"schema": schema, **_example(name)}}
        for name, schema in zip(names, schemas, strict=True)
    }
    paths: dict[str, dict[str, Any]] = {}
    for one in OPERATIONS:
        paths.setdefault(one.path, {})[one.method.lower()] = _entry(one, contents)
    return {
        "openapi": "3.1.0",
        "info": {"title": "slipstream serve", "version": metadata.version("slipstream")},
        "tags": [{"name": tag, "description": about} for tag, about in TAGS.values() if about],
        "paths": paths,
        "components": {
            "schemas": _marked(components),
            "securitySchemes": {
                scheme: {"type": "http", "scheme": scheme} for scheme in ("basic", "bearer")
            },
        },
        "security": [{"basic": []}, {"bearer": []}],
    }


def _marked(value: Any) -> Any:
    """Texts made of docstrings, with code as Markdown has it: `so`, not ``so``."""
    if isinstance(value, str):
        return value.replace("``", "`")
    if isinstance(value, dict):
        return {key: _marked(one) for key, one in value.items()}
    return [_marked(one) for one in value] if isinstance(value, list) else value


def _example(name: Any) -> dict[str, Any]:
    return {"example": msgspec.to_builtins(EXAMPLES[name])} if name in EXAMPLES else {}


def _parameter(one: Parameter) -> dict[str, Any]:
    meaning, example = PARAMETERS[one.name]
    named = {"name": one.name, "in": one.place, "required": one.required}
    return {**named, "description": meaning, "schema": {"type": "string"}, "example": example}


def _entry(one: Operation, contents: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    _, path, names = compile_path(one.path)
    in_path = (Parameter(name, "path", required=True) for name in names)
    entry: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{one.method.lower()}{path}").strip("_"),
        "tags": [tag_of(one.path)],
        "summary": _marked(one.handler.__doc__),
        "parameters": [_parameter(known) for known in (*in_path, *one.more)],
        "responses": {
            "200": {"description": "Success", "content": contents.get(one.answer, {})},
            "default": {"description": "An error", "content": contents[ErrorBody]},
        },
    }
    if one.body:
        entry["requestBody"] = {"required": True, "content": contents[one.body]}
    if one.is_open:
        entry["security"] = []
    return entry
