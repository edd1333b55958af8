"""Keys, the tokens made of them, and how often a tenant may call.

A key has 256 random bits, so its SHA-256 is kept: there is nothing to guess. It is shown once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec

from slipstream.errors import ConfigError
from slipstream.service.database import Row, Transaction, now_ms

LOCAL: Final = "local"
TOKEN_S: Final = 3600
HEADER: Final = b'{"alg":"HS256","typ":"JWT"}'
USED_MS: Final = 60_000  # how exact the time of the last use is


class Tenant(msgspec.Struct, frozen=True):
    """Who calls."""

    id: str
    name: str
    quota: int


class _Claims(msgspec.Struct):
    sub: str
    iat: int
    exp: int


# ---- keys


def new_key() -> str:
    """A key: ``sk_`` and 43 characters.

    >>> len(new_key())
    46
    """
    return "sk_" + secrets.token_urlsafe(32)


def key_hash(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def add_tenant(transaction: Transaction, tenant: str, name: str, quota: int) -> None:
    """Add a tenant, or change the quota of the one with that name."""
    transaction.run(
        "INSERT INTO tenants (id, name, quota, created) VALUES (:id, :name, :quota, :now)"
        " ON CONFLICT (name) DO UPDATE SET quota = excluded.quota",
        {"id": tenant, "name": name, "quota": quota, "now": now_ms()},
    )


def add_key(transaction: Transaction, name: str, quota: int) -> str:
    """Make a key for the tenant of that name; it is the only time the key is known.

    Raises:
        ConfigError: The name is empty, too long or reserved.
    """
    if not 0 < len(name) <= 64 or name == LOCAL or not name.isprintable():
        raise ConfigError(f"{name!r}: a name has 1 to 64 printable characters, and is not 'local'")
    add_tenant(transaction, secrets.token_hex(8), name, quota)
    key = new_key()
    transaction.run(
        "INSERT INTO api_keys (hash, tenant, prefix, created)"
        " SELECT :hash, id, :prefix, :now FROM tenants WHERE name = :name",
        {"hash": key_hash(key), "prefix": key[:9], "now": now_ms(), "name": name},
    )
    return key


def list_keys(transaction: Transaction) -> list[Row]:
    """All keys, without what is secret."""
    return transaction.run(
        "SELECT k.prefix, t.name, t.quota, k.created, k.used, k.revoked FROM api_keys k"
        " JOIN tenants t ON t.id = k.tenant ORDER BY k.created"
    )


def revoke_key(transaction: Transaction, prefix: str) -> str:
    """Revoke the one key that begins so; returns its tenant's name.

    Raises:
        ConfigError: No key begins so, or several do.
    """
    rows = [
        row
        for row in list_keys(transaction)
        if row["revoked"] is None and prefix and row["prefix"].startswith(prefix[:9])
    ]
    if len(rows) != 1:
        raise ConfigError(
            f"{len(rows)} valid keys begin with {prefix[:9]!r}; see 'slipstream keys list'"
        )
    transaction.run(
        "UPDATE api_keys SET revoked = :now WHERE prefix = :prefix",
        {"now": now_ms(), "prefix": rows[0]["prefix"]},
    )
    return str(rows[0]["name"])


def any_key(transaction: Transaction) -> bool:
    """Whether there is a key, also a revoked one: the service was closed to others then."""
    return transaction.one("SELECT 1 AS one FROM api_keys LIMIT 1") is not None


def tenant_of(transaction: Transaction, hashed: str) -> Tenant | None:
    """Who has the key with this hash, unless it was revoked."""
    row = transaction.one(
        "SELECT t.id, t.name, t.quota FROM api_keys k JOIN tenants t ON t.id = k.tenant"
        " WHERE k.hash = :hash AND k.revoked IS NULL",
        {"hash": hashed},
    )
    return None if row is None else msgspec.convert(row, Tenant)


def note_use(transaction: Transaction, hashed: str, now: int) -> None:
    """Keep when a key was last used, to the minute."""
    transaction.run(
        "UPDATE api_keys SET used = :now WHERE hash = :hash"
        " AND (used IS NULL OR used < :now - :step)",
        {"hash": hashed, "now": now, "step": USED_MS},
    )


# ---- what a request carries


def hash_from_header(authorization: str, secret: bytes, now_s: float) -> str | None:
    """The hash of the key that a request shows: Basic, Bearer with a key, Bearer with a token.

    Args:
        authorization: The header's value.
        secret: What signs tokens.
        now_s: Seconds since 1970.

    Returns:
        The hash, or None if there is no credential in it that could be valid.

    >>> hash_from_header("Bearer sk_a", b"", 0) == key_hash("sk_a")
    True
    """
    scheme, _, value = authorization.strip().partition(" ")
    value = value.strip()
    if scheme.lower() == "basic":
        try:
            user_and_key = base64.b64decode(value, validate=True).decode("utf-8")
        except (binascii.Error, ValueError):
            return None
        key = user_and_key.partition(":")[2]
        return key_hash(key) if key else None
    if scheme.lower() != "bearer" or not value:
        return None
    if value.count(".") == 2:
        return check_token(value, secret, now_s)
    return key_hash(value)


def make_token(hashed: str, secret: bytes, now_s: float) -> str:
    """A JWT (HS256) that stands for a key for an hour.

    >>> check_token(make_token("ab", b"s", 5), b"s", 6)
    'ab'
    """
    claims = msgspec.json.encode(_Claims(hashed, int(now_s), int(now_s) + TOKEN_S))
    signed = _base64(HEADER) + b"." + _base64(claims)
    return (signed + b"." + _base64(_signature(signed, secret))).decode()


def check_token(token: str, secret: bytes, now_s: float) -> str | None:
    """The key hash in a token of ours that has not expired, else None."""
    signed, _, signature = token.encode("utf-8", "replace").rpartition(b".")
    if not hmac.compare_digest(_base64(_signature(signed, secret)), signature):
        return None
    try:  # only what we signed comes here, so the header is ours
        claims = msgspec.json.decode(_unbase64(signed.partition(b".")[2]), type=_Claims)
    except (ValueError, msgspec.DecodeError):
        return None
    return claims.sub if claims.exp > now_s else None


def _signature(signed: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, signed, "sha256")


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def _unbase64(data: bytes) -> bytes:
    return base64.urlsafe_b64decode(data + b"=" * (-len(data) % 4))


# ---- how often


class RateLimit:
    """At most ``per_minute`` requests a tenant in any burst, refilled evenly.

    Args:
        per_minute: How many.
        clock: Seconds that never fall.

    >>> limit = RateLimit(2, clock=lambda: 0.0)
    >>> [limit.wait_s("a") for _ in range(3)]
    [0.0, 0.0, 30.0]
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_minute / 60
        self._burst = float(per_minute)
        self._clock = clock
        self._left: dict[str, tuple[float, float]] = {}

    def wait_s(self, tenant: str) -> float:
        """Count a request; 0 if it may pass, else after how many seconds one may."""
        now = self._clock()
        left, at = self._left.get(tenant, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        passes = left >= 1
        self._left[tenant] = (left - 1 if passes else left, now)
        return 0.0 if passes else (1 - left) / self._rate
