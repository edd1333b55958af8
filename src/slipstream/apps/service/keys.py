"""Keys, the tokens made of them, and how often a tenant may call.

A key has 256 random bits, so its SHA-256 is kept: there is nothing to guess. It is shown once.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from typing import Final

import msgspec

from slipstream.apps.service.database import Database, Row, now_ms
from slipstream.errors import ConfigError

LOCAL: Final = "local"  # the tenant of requests without a key
QUOTA: Final = 8  # classifiers a tenant
TOKEN_S: Final = 3600
HEADER: Final = b'{"alg":"HS256","typ":"JWT"}'
NO_HASH: Final = "-"  # of a credential that cannot be read: no key's
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


def key_hash(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def add_tenant(database: Database, tenant: str, name: str, quota: int | None = None) -> str:
    """Add a tenant; one of that name stays, and has its quota changed if one is given."""
    row = {"id": tenant, "name": name, "quota": quota or QUOTA, "now": now_ms()}
    [kept] = database.run(
        "INSERT INTO tenants (id, name, quota, created) VALUES (:id, :name, :quota, :now)"
        f" ON CONFLICT (name) DO UPDATE SET quota = {'excluded' if quota else 'tenants'}.quota"
        " RETURNING id",
        **row,
    )
    return str(kept["id"])


def add_key(database: Database, name: str, quota: int | None = None) -> str:
    """Make a key for the tenant of that name, who may be new; it is not known afterwards."""
    if not 0 < len(name) <= 64 or name == LOCAL or not name.isprintable():
        raise ConfigError(f"{name!r}: a name has 1 to 64 printable characters, and is not 'local'")
    tenant = add_tenant(database, secrets.token_hex(8), name, quota)
    key = "sk_" + secrets.token_urlsafe(32)
    row = {"hash": key_hash(key), "tenant": tenant, "prefix": key[:9], "created": now_ms()}
    database.insert("api_keys", **row)
    return key


def take_local(database: Database, name: str) -> int:
    """Give a tenant the classifiers that were made without a key; returns how many they were."""
    count = database.number("SELECT COUNT(*) AS n FROM classifiers WHERE tenant = :id", id=LOCAL)
    for table in ("classifiers", "jobs", "idempotency"):
        tenant = "(SELECT id FROM tenants WHERE name = :name)"
        change = f"UPDATE {table} SET tenant = {tenant} WHERE tenant = :local"
        database.run(change, name=name, local=LOCAL)
    return count


def list_keys(database: Database) -> list[Row]:
    """All keys, without what is secret."""
    return database.run(
        "SELECT k.prefix, t.name, t.quota, k.created, k.used, k.revoked FROM api_keys k"
        " JOIN tenants t ON t.id = k.tenant ORDER BY k.created"
    )


def revoke_key(database: Database, prefix: str) -> str:
    """Revoke the one key that begins so; returns its tenant's name."""
    start = prefix[:9]
    if len(start) < 9:  # "sk_" begins every key
        raise ConfigError(
            f"{start!r} is too short; give the 9 characters that 'slipstream keys list' shows"
        )
    valid = [row for row in list_keys(database) if row["revoked"] is None]
    found = [row for row in valid if row["prefix"] == start]
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} valid keys begin with {start!r}; see 'slipstream keys list'"
        )
    statement = "UPDATE api_keys SET revoked = :now WHERE prefix = :prefix"
    database.run(statement, now=now_ms(), prefix=found[0]["prefix"])
    return str(found[0]["name"])


def any_key(database: Database) -> bool:
    """Whether there is a key, also a revoked one: the service was closed to others then."""
    return database.one("SELECT 1 AS one FROM api_keys LIMIT 1") is not None


def tenant_of(database: Database, hashed: str) -> Tenant | None:
    """Who has the key with this hash, unless it was revoked."""
    row = database.one(
        "SELECT t.id, t.name, t.quota FROM api_keys k JOIN tenants t ON t.id = k.tenant"
        " WHERE k.hash = :hash AND k.revoked IS NULL",
        hash=hashed,
    )
    return None if row is None else msgspec.convert(row, Tenant)


# ---- what a request carries


def bearer(authorization: str) -> str:
    """What a header of the scheme Bearer carries, else nothing.

    >>> bearer("bearer  a"), bearer("Basic a")
    ('a', '')
    """
    scheme, _, value = authorization.strip().partition(" ")
    return value.strip() if scheme.lower() == "bearer" else ""


def hash_from_header(authorization: str, secret: bytes, now_s: float) -> str | None:
    """The hash of the key that a header shows: Basic, Bearer with a key, Bearer with a token.

    >>> hash_from_header("Bearer sk_a", b"", 0) == key_hash("sk_a")
    True
    """
    key = bearer(authorization)
    if key.count(".") == 2:
        return check_token(key, secret, now_s)
    scheme, _, value = authorization.strip().partition(" ")
    if scheme.lower() == "basic":
        try:
            key = base64.b64decode(value.strip(), validate=True).decode("utf-8").partition(":")[2]
        except ValueError:
            return None
    return key_hash(key) if key else None


def make_token(hashed: str, secret: bytes, now_s: float) -> str:
    """A JWT (HS256) that stands for a key for an hour.

    >>> check_token(make_token("ab", b"s", 5), b"s", 6)
    'ab'
    """
    claims = msgspec.json.encode(_Claims(hashed, int(now_s), int(now_s) + TOKEN_S))
    signed = _base64(HEADER) + b"." + _base64(claims)
    return (signed + b"." + _signature(signed, secret)).decode()


def check_token(token: str, secret: bytes, now_s: float) -> str | None:
    """The key hash in a token of ours that has not expired, else None."""
    signed, _, signature = token.encode("utf-8", "replace").rpartition(b".")
    if not hmac.compare_digest(_signature(signed, secret), signature):
        return None
    try:  # only what we signed comes here, so the header is ours
        payload = base64.urlsafe_b64decode(signed.partition(b".")[2] + b"==")
        claims = msgspec.json.decode(payload, type=_Claims)
    except ValueError:
        return None
    return claims.sub if claims.exp > now_s else None


def _signature(signed: bytes, secret: bytes) -> bytes:
    return _base64(hmac.digest(secret, signed, "sha256"))


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


class RateLimit:
    """At most ``per_minute`` requests a tenant in any burst, refilled evenly.

    >>> limit = RateLimit(2, clock=lambda: 0.0)
    >>> [limit.wait_s("a") for _ in range(3)]
    [0.0, 0.0, 30.0]
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate, self._burst, self._clock = per_minute / 60, float(per_minute), clock
        self._left: dict[str, tuple[float, float]] = {}

    def wait_s(self, tenant: str) -> float:
        """Count a request; 0 if it may pass, else after how many seconds one may."""
        now = self._clock()
        left, at = self._left.get(tenant, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        passes = left >= 1
        self._left[tenant] = (left - 1 if passes else left, now)
        return 0.0 if passes else (1 - left) / self._rate
