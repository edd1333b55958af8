"""IBM's Natural Language Classifier API, exactly: ``/v1``. Nothing of ours is in its answers."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Final, Literal
from urllib.parse import parse_qs

import msgspec
from starlette.responses import JSONResponse, Response

from slipstream.apps.service import classifiers, keys
from slipstream.apps.service.context import Call
from slipstream.apps.service.database import Row
from slipstream.apps.service.errors import ApiError, Damaged
from slipstream.apps.service.rows import check_length
from slipstream.apps.service.upload import JSON_NBYTES, malformed, read_body, read_json, received

GRANT: Final = "urn:ibm:params:oauth:grant-type:apikey"
TEXT_CHARACTERS: Final = 2048
PHRASES: Final = 30
# Python's json writes a character as up to 12 bytes: a pair of escapes.
CHARACTER_NBYTES: Final = 12
MORE_NBYTES: Final = 1024  # a text, for what is around it
UNKNOWN_KEY: Final = {
    "errorCode": "BXNIM0415E",
    "errorMessage": "Provided API key could not be found.",
}


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


class CollectionItem(msgspec.Struct, frozen=True):
    """The answer to one text of several."""

    text: str
    top_class: str
    classes: list[ClassifiedClass]


class Classification(msgspec.Struct, frozen=True):
    """The answer to one text."""

    classifier_id: str
    url: str
    text: str
    top_class: str
    classes: list[ClassifiedClass]


class ClassificationCollection(msgspec.Struct, frozen=True):
    """The answers to several texts, in their order."""

    classifier_id: str
    url: str
    collection: list[CollectionItem]


class Phrase(msgspec.Struct, frozen=True):
    """A text to classify."""

    text: str


class PhraseCollection(msgspec.Struct, frozen=True):
    """Several texts to classify."""

    collection: Annotated[list[Phrase], msgspec.Meta(min_length=1, max_length=PHRASES)]


class TokenForm(msgspec.Struct, frozen=True):
    """What IAM clients send for a token."""

    grant_type: Literal["urn:ibm:params:oauth:grant-type:apikey"]
    apikey: str
    response_type: str = "cloud_iam"


class Token(msgspec.Struct, frozen=True):
    """An IAM token."""

    access_token: str
    expiration: int
    refresh_token: str = "not_supported"
    token_type: str = "Bearer"
    expires_in: int = keys.TOKEN_S
    scope: str = "ibm openid"


# ---- classifiers


async def create(call: Call) -> Classifier:
    """Train a classifier on new data."""
    with _idempotency_key(call) as key:
        async with received(call) as upload:
            loop, checking = asyncio.get_running_loop(), call.service.checking
            call.path_params["id"] = await loop.run_in_executor(
                checking, classifiers.create, call, upload, key
            )
        return await asyncio.to_thread(show, call)


@contextlib.contextmanager
def _idempotency_key(call: Call) -> Iterator[str | None]:
    """The key of a request, which no other one may have meanwhile."""
    key, under_way = call.headers.get("idempotency-key"), call.service.uploads
    if key is None:
        yield None
        return
    if not re.fullmatch(r"[\x21-\x7e]{1,128}", key):
        raise malformed("An Idempotency-Key has 1 to 128 visible ASCII characters.")
    use = (call.tenant.id, key)
    if use in under_way:
        raise ApiError("Request under way", "Another request has this Idempotency-Key now.")
    under_way.add(use)
    try:
        yield key
    finally:
        under_way.discard(use)


def show(call: Call) -> Classifier:
    """What a classifier is, and its status."""
    return _classifier(call, classifiers.find_job(call))


def list_all(call: Call) -> ClassifierList:
    """All classifiers, newest first."""
    return ClassifierList([_classifier(call, job) for job in classifiers.find_jobs(call)])


def _classifier(call: Call, job: Row) -> Classifier:
    known = (job["classifier"], call.url_of(job["classifier"]), job["name"], job["language"])
    return Classifier(*known, timestamp(job["created"]), *classifiers.status(call, job))


def timestamp(at_ms: int) -> str:
    """UTC with three decimals.

    >>> timestamp(1_700_000_000_042)
    '2023-11-14T22:13:20.042Z'
    """
    moment = datetime.fromtimestamp(at_ms // 1000, UTC)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{at_ms % 1000:03d}Z"


# ---- classify


async def classify(call: Call) -> Classification:
    """Classify a text."""
    if call.method == "POST":
        text = (await read_json(call, max(JSON_NBYTES, most_nbytes(call)))).get("text")
    else:
        query = call.scope["query_string"]
        try:
            text = parse_qs(query.decode("ascii"), errors="strict").get("text", [None])[0]
        except ValueError:
            raise malformed("The query is not percent-encoded UTF-8.") from None
    [item] = await _in_thread(call, [check_text(text, "'text'", most_characters(call))])
    return Classification(call.id, call.url_of(call.id), item.text, item.top_class, item.classes)


async def classify_collection(call: Call) -> ClassificationCollection:
    """Classify several texts."""
    phrases = (await read_json(call, PHRASES * most_nbytes(call))).get("collection")
    if not isinstance(phrases, list) or not phrases:
        raise ApiError("Missing collection", "The field 'collection' is not a list of texts.")
    if len(phrases) > PHRASES:
        most = f"larger than the permitted maximum of {PHRASES}."
        reason = f"The field 'collection' has {len(phrases)} phrases which is {most}"
        raise ApiError("Too many phrases", reason)
    given = [phrase.get("text") if isinstance(phrase, dict) else None for phrase in phrases]
    longest = most_characters(call)
    texts = [
        check_text(text, f"'collection[{place}].text'", longest) for place, text in enumerate(given)
    ]
    items = await _in_thread(call, texts)
    return ClassificationCollection(call.id, call.url_of(call.id), items)


def most_characters(call: Call) -> int:
    """How long a text may be: as long as one to train on, at least."""
    return max(TEXT_CHARACTERS, call.service.options.limits.text_chars)


def most_nbytes(call: Call) -> int:
    """How long such a text may be as JSON."""
    return CHARACTER_NBYTES * most_characters(call) + MORE_NBYTES


def check_text(value: object, place: str, most: int) -> str:
    """A text to classify; ApiError if it is missing, empty or too long."""
    if not isinstance(value, str) or not value.strip():
        reason = f"The field {place} is missing, is no text, or has no words."
        raise ApiError("Missing text", reason)
    check_length("Phrase too long", f"field {place}", value.strip(), most)
    return value


async def _in_thread(call: Call, texts: list[str]) -> list[CollectionItem]:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(call.service.answering, _answers, call, texts)


def _answers(call: Call, texts: list[str]) -> list[CollectionItem]:
    """Classify by the active version."""
    job = classifiers.find_job(call)
    if job["active"] is None:
        raise ApiError("Classifier not available", classifiers.status(call, job)[1])
    try:
        model = call.service.models.get(classifiers.model_path(call, job))
    except Damaged as error:
        classifiers.find_job(call)  # 404 if it was deleted meanwhile
        reason = f"The model file is damaged: {error}."
        raise ApiError("Classifier not available", reason) from None
    answers = [[ClassifiedClass(*pair) for pair in classes] for classes in model.classify(texts)]
    pairs = zip(texts, answers, strict=True)
    return [CollectionItem(text, classes[0].class_name, classes) for text, classes in pairs]


# ---- tokens


async def token(call: Call) -> Token | Response:
    """Exchange a key for a token, as IAM does."""
    form, service = parse_qs((await read_body(call)).decode("utf-8", "replace")), call.service
    hashed = keys.key_hash(form.get("apikey", [""])[0])

    def is_known() -> bool:
        # Where there are keys, also with --no-auth, a wrong one is not taken for none.
        database = service.database
        return keys.tenant_of(database, hashed) is not None or not keys.any_key(database)

    if form.get("grant_type") != [GRANT] or not await asyncio.to_thread(is_known):
        return JSONResponse(UNKNOWN_KEY, 400)
    now = time.time()
    return Token(keys.make_token(hashed, service.secret, now), int(now) + keys.TOKEN_S)
