"""IBM's Natural Language Classifier API, exactly: ``/v1``. Nothing of ours is in its answers."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from urllib.parse import parse_qs

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from slipstream.service import classifiers, keys
from slipstream.service.context import Service, base_url, service_of, tenant_of_request
from slipstream.service.data_directory import remove
from slipstream.service.database import Row, Transaction
from slipstream.service.errors import ApiError, malformed, unavailable
from slipstream.service.refusals import Damaged
from slipstream.service.serve_options import JSON_NBYTES, PHRASES, TEXT_CHARACTERS
from slipstream.service.upload import Upload, body, receive

GRANT = "urn:ibm:params:oauth:grant-type:apikey"


class Classifier(msgspec.Struct, frozen=True):
    """A classifier."""

    classifier_id: str
    url: str
    name: str | None
    language: str
    created: str
    status: str
    status_description: str


class ClassifierList(msgspec.Struct, frozen=True):
    """All classifiers of a tenant, newest first."""

    classifiers: list[Classifier]


class ClassifiedClass(msgspec.Struct, frozen=True):
    """A class and how sure it is."""

    class_name: str
    confidence: float


class Classification(msgspec.Struct, frozen=True):
    """The answer to one text."""

    classifier_id: str
    url: str
    text: str
    top_class: str
    classes: list[ClassifiedClass]


class CollectionItem(msgspec.Struct, frozen=True):
    """The answer to one text of several."""

    text: str
    top_class: str
    classes: list[ClassifiedClass]


class ClassificationCollection(msgspec.Struct, frozen=True):
    """The answers to several texts, in their order."""

    classifier_id: str
    url: str
    collection: list[CollectionItem]


class Token(msgspec.Struct, frozen=True):
    """An IAM token."""

    access_token: str
    refresh_token: str
    token_type: str
    expires_in: int
    expiration: int
    scope: str


def as_json(value: object, code: int = 200) -> Response:
    """A JSON answer."""
    return Response(msgspec.json.encode(value), code, media_type="application/json")


def timestamp(at_ms: int) -> str:
    """UTC with three decimals.

    >>> timestamp(1_700_000_000_042)
    '2023-11-14T22:13:20.042Z'
    """
    moment = datetime.fromtimestamp(at_ms / 1000, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{at_ms % 1000:03d}Z"


# ---- classifiers


async def create(request: Request) -> Response:
    """POST /v1/classifiers"""
    service, tenant = service_of(request), tenant_of_request(request)
    service.refuse_if_stopping()
    key = request.headers.get("idempotency-key")
    if key is None:
        classifier = await _create(request, service, tenant, None)
        return await _show(request, classifier)
    if not re.fullmatch(r"[\x21-\x7e]{1,128}", key):
        raise malformed("An Idempotency-Key has 1 to 128 visible ASCII characters.")
    if (tenant.id, key) in service.uploads:
        raise ApiError(
            409, "Request under way", "A request with this Idempotency-Key is under way."
        )
    service.uploads.add((tenant.id, key))
    try:
        classifier = await _create(request, service, tenant, key)
    finally:
        service.uploads.discard((tenant.id, key))
    return await _show(request, classifier)


async def _create(request: Request, service: Service, tenant: keys.Tenant, key: str | None) -> str:
    upload = await receive_upload(request)
    try:
        metadata = classifiers.parse_metadata(upload.metadata)
        draft = await service.call(classifiers.prepare, service, upload)
        try:
            return await service.call(classifiers.create, service, tenant, metadata, draft, key)
        finally:
            remove(draft.directory)
    finally:
        upload.close()


async def receive_upload(request: Request) -> Upload:
    """An upload; a full disk is a 503."""
    service = service_of(request)
    try:
        return await receive(request, service.directory.incoming, service.options.max_body)
    except OSError:
        raise unavailable("The service cannot store the upload now.", 30) from None


async def _show(request: Request, classifier: str) -> Response:
    def read() -> Classifier:
        with service.database.reading() as reading:
            row = classifiers.find(reading, tenant_of_request(request), classifier)
            return _classifier(request, reading, row)

    service = service_of(request)
    return as_json(await service.call(read))


def _classifier(request: Request, reading: Transaction, row: Row) -> Classifier:
    found = classifiers.status(service_of(request), reading, row)
    return Classifier(
        row["id"],
        url_of(request, row["id"]),
        row["name"],
        row["language"],
        timestamp(row["created"]),
        found.status,
        found.description,
    )


def url_of(request: Request, classifier: str) -> str:
    """The address of a classifier, as the client would write it."""
    return f"{base_url(request)}/v1/classifiers/{classifier}"


async def show(request: Request) -> Response:
    """GET /v1/classifiers/{id}"""
    return await _show(request, request.path_params["id"])


async def list_all(request: Request) -> Response:
    """GET /v1/classifiers"""

    def read() -> ClassifierList:
        with service.database.reading() as reading:
            rows = reading.run(
                "SELECT * FROM classifiers WHERE tenant = :tenant ORDER BY serial DESC",
                {"tenant": tenant_of_request(request).id},
            )
            return ClassifierList([_classifier(request, reading, row) for row in rows])

    service = service_of(request)
    return as_json(await service.call(read))


async def delete(request: Request) -> Response:
    """DELETE /v1/classifiers/{id}"""
    service, tenant = service_of(request), tenant_of_request(request)
    await service.call(classifiers.delete, service, tenant, request.path_params["id"])
    return as_json({})


# ---- classify


async def read_json(request: Request) -> dict[str, object]:
    """The JSON object in a body.

    Raises:
        ApiError: 400, 413 or 415.
    """
    kind, _, charset = request.headers.get("content-type", "").lower().partition(";")
    if kind.strip() != "application/json" or "utf-16" in charset or "utf-32" in charset:
        raise ApiError(415, "Unsupported media type", "Send application/json in UTF-8.")
    raw = (await body(request, JSON_NBYTES)).removeprefix(b"\xef\xbb\xbf")
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise malformed(f"The body is not JSON in UTF-8: {error}.") from None
    if not isinstance(value, dict):
        raise malformed("The body is not a JSON object.")
    return value


def check_text(value: object, place: str) -> str:
    """A text to classify.

    Raises:
        ApiError: It is missing, empty or too long.
    """
    if not isinstance(value, str) or not value.strip():
        raise ApiError(400, "Missing text", f"The field {place} is not a text that has words.")
    length = len(value.strip())
    if length > TEXT_CHARACTERS:
        raise ApiError(
            400,
            "Phrase too long",
            f"The field {place} has {length:,} characters which is larger than the permitted "
            f"maximum of {TEXT_CHARACTERS:,} characters.",
        )
    return value


async def classify(request: Request) -> Response:
    """POST /v1/classifiers/{id}/classify"""
    text = check_text((await read_json(request)).get("text"), "'text'")
    return await _classify(request, text)


async def classify_query(request: Request) -> Response:
    """GET /v1/classifiers/{id}/classify?text=…"""
    query = request.scope["query_string"]
    try:
        found = parse_qs(query.decode("ascii"), encoding="utf-8", errors="strict")
    except (UnicodeDecodeError, ValueError):
        raise malformed("The query is not percent-encoded UTF-8.") from None
    return await _classify(request, check_text(found.get("text", [None])[0], "'text'"))


async def _classify(request: Request, text: str) -> Response:
    [answer] = await answers_to(request, [text])
    classifier = request.path_params["id"]
    return as_json(
        Classification(classifier, url_of(request, classifier), text, answer[0].class_name, answer)
    )


async def classify_collection(request: Request) -> Response:
    """POST /v1/classifiers/{id}/classify_collection"""
    phrases = (await read_json(request)).get("collection")
    if not isinstance(phrases, list) or not phrases:
        raise ApiError(400, "Missing collection", "The field 'collection' is not a list of texts.")
    if len(phrases) > PHRASES:
        raise ApiError(
            400,
            "Too many phrases",
            f"The field 'collection' has {len(phrases)} phrases which is larger than the "
            f"permitted maximum of {PHRASES}.",
        )
    texts = [
        check_text(
            phrase.get("text") if isinstance(phrase, dict) else None, f"'collection[{i}].text'"
        )
        for i, phrase in enumerate(phrases)
    ]
    answers = await answers_to(request, texts)
    items = [
        CollectionItem(text, answer[0].class_name, answer)
        for text, answer in zip(texts, answers, strict=True)
    ]
    classifier = request.path_params["id"]
    return as_json(ClassificationCollection(classifier, url_of(request, classifier), items))


async def answers_to(request: Request, texts: Sequence[str]) -> list[list[ClassifiedClass]]:
    """Classify by the active version.

    Raises:
        ApiError: 404, or 409 with the status's description.
    """
    service = service_of(request)
    row, description = await service.call(_active, request)
    if row["active"] is None:
        raise ApiError(409, "Classifier not available", description)
    path = service.directory.version(row["id"], row["active"]) / "model.safetensors"

    def compute() -> list[list[tuple[str, float]]]:
        found: list[list[tuple[str, float]]] = service.models.get(path).classify(texts)
        return found

    try:
        found = await service.answer(compute)
    except Damaged as error:
        await service.call(_active, request)  # 404 if it was deleted meanwhile
        raise ApiError(
            409, "Classifier not available", f"The model file is damaged: {error}."
        ) from None
    return [[ClassifiedClass(name, confidence) for name, confidence in one] for one in found]


def _active(request: Request) -> tuple[Row, str]:
    service = service_of(request)
    with service.database.reading() as reading:
        row = classifiers.find(reading, tenant_of_request(request), request.path_params["id"])
        if row["active"] is not None:
            return row, ""
        return row, classifiers.status(service, reading, row).description


# ---- tokens


async def token(request: Request) -> Response:
    """POST /identity/token: IAM's exchange of a key for a token."""
    service = service_of(request)
    form = parse_qs((await body(request, JSON_NBYTES)).decode("utf-8", "replace"))
    hashed = keys.key_hash(form.get("apikey", [""])[0])

    def known() -> bool:
        with service.database.reading() as reading:
            if service.options.no_auth or not keys.any_key(reading):
                return True
            return keys.tenant_of(reading, hashed) is not None

    if form.get("grant_type", [""])[0] != GRANT or not await service.call(known):
        error = {
            "errorCode": "BXNIM0415E",
            "errorMessage": "Provided API key could not be found.",
        }
        return as_json(error, 400)
    now = time.time()
    made = keys.make_token(hashed, service.secret, now)
    expiration = int(now) + keys.TOKEN_S
    return as_json(Token(made, "not_supported", "Bearer", keys.TOKEN_S, expiration, "ibm openid"))
