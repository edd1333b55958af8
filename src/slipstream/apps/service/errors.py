"""What the service refuses. Every error answer is ``{"code", "error", "description"}``.

``error`` is short and fixed, in IBM's words where they are known: clients show only that. It
decides the code. ``description`` gives what, where and the way out.
"""

from __future__ import annotations

from typing import Final

import msgspec

from slipstream.errors import ConfigError

CODES: Final = {  # all others are 400
    "Unauthorized": 401,
    "Forbidden": 403,
    "Not found": 404,
    "Method not allowed": 405,
    "Request timeout": 408,
    "Classifier not available": 409,
    "Request under way": 409,
    "Request too large": 413,
    "Unsupported media type": 415,
    "Unsupported content encoding": 415,
    "Range not satisfiable": 416,
    "Idempotency key reused": 422,
    "Too many requests": 429,
    "Queue full": 429,
    "Server error": 500,
    "Service unavailable": 503,
}
HEADERS: Final = {
    401: {"WWW-Authenticate": 'Basic realm="slipstream"'},
    413: {"Connection": "close"},  # the rest of the body is not read
}
NO_KEY: Final = "The API key is missing, unknown or revoked."
MISSING_METADATA: Final = (
    "The required training metadata is missing. The request should contain 'language' and 'name' "
    "besides the training data."
)


class ErrorBody(msgspec.Struct, frozen=True):
    """An error."""

    code: int
    error: str
    description: str


class ApiError(Exception):
    """An answer that is an error, with more headers; ``retry_s`` is when a repetition may pass.

    >>> ApiError("Not found", "Classifier not found.").body
    ErrorBody(code=404, error='Not found', description='Classifier not found.')
    """

    def __init__(self, error: str, description: str, retry_s: int = 0, **headers: str) -> None:
        super().__init__(f"{error}: {description}")
        self.error, self.description, code = error, description, CODES.get(error, 400)
        self.body = ErrorBody(code, error, description)
        self.headers = {**HEADERS.get(code, {}), **headers}
        if retry_s or code == 503:
            self.headers["Retry-After"] = str(retry_s or 5)


class Damaged(ConfigError):
    """A model file that cannot be used. The reason names no path, so that users may see it."""


def not_found(description: str = "Classifier not found.") -> ApiError:
    """404, also for what belongs to another tenant."""
    return ApiError("Not found", description)
