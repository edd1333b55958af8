"""Every error answer of the service: ``{"code", "error", "description"}``.

``error`` is short and fixed, in IBM's words where they are known: clients show only that.
``description`` gives what, where and the way out.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

MISSING_METADATA = (
    "The required training metadata is missing. The request should contain 'language' and 'name' "
    "besides the training data."
)


class ErrorBody(msgspec.Struct, frozen=True):
    """The JSON of an error."""

    code: int
    error: str
    description: str


class ApiError(Exception):
    """An answer that is an error.

    Args:
        code: The HTTP status.
        error: Short and fixed.
        description: What, where, the way out.
        headers: More response headers.

    >>> ApiError(404, "Not found", "Classifier not found.").body()
    b'{"code":404,"error":"Not found","description":"Classifier not found."}'
    """

    def __init__(
        self, code: int, error: str, description: str, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(f"{code} {error}: {description}")
        self.code = code
        self.error = error
        self.description = description
        self.headers = dict(headers or {})

    def body(self) -> bytes:
        """The body of the answer."""
        return msgspec.json.encode(ErrorBody(self.code, self.error, self.description))


def malformed(description: str) -> ApiError:
    """400: the body has not the form it should have."""
    return ApiError(400, "Malformed body", description)


def not_found(description: str = "Classifier not found.") -> ApiError:
    """404, also for what belongs to another tenant."""
    return ApiError(404, "Not found", description)


def unauthorized() -> ApiError:
    """401: no key, or one that is unknown or revoked."""
    return ApiError(
        401,
        "Unauthorized",
        "The API key is missing, unknown or revoked.",
        {"WWW-Authenticate": 'Basic realm="slipstream"'},
    )


def too_large(limit_nbytes: int) -> ApiError:
    """413: the body is above its limit. The rest of it is not read."""
    return ApiError(
        413,
        "Request too large",
        f"The body has more than the permitted {limit_nbytes:,} bytes.",
        {"Connection": "close"},
    )


def too_many(error: str, description: str, retry_s: int) -> ApiError:
    """429, with the seconds after which a retry may pass."""
    return ApiError(429, error, description, {"Retry-After": str(max(1, retry_s))})


def unavailable(reason: str, retry_s: int = 5) -> ApiError:
    """503: a retry may pass."""
    return ApiError(503, "Service unavailable", reason, {"Retry-After": str(retry_s)})
