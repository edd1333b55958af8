"""Keys and tokens: what is accepted, and what is not."""

from __future__ import annotations

import base64
import json

import pytest

from slipstream.apps.service import keys
from slipstream.apps.service.database import Database
from slipstream.errors import ConfigError

SECRET = b"s" * 32


def coded(part: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=")


def test_tokens_that_are_refused() -> None:
    claims = {"sub": "h", "iat": 0, "exp": 10**12}
    unsigned = f"{coded({'alg': 'none'})}.{coded(claims)}."
    good = keys.make_token("h", SECRET, 1000)
    assert keys.check_token(good, SECRET, 1001) == "h"
    for token in (unsigned, good[:-2] + "xx", keys.make_token("h", b"other", 1000), "a.b.c", ".."):
        assert keys.check_token(token, SECRET, 1001) is None
    assert keys.check_token(good, SECRET, 1000 + keys.TOKEN_S) is None


@pytest.mark.parametrize("header", ["", "Basic", "Basic %%%", "Basic /w==", "Digest x", "Bearer "])
def test_headers_without_a_credential(header: str) -> None:
    assert keys.hash_from_header(header, SECRET, 0) is None


def test_a_key_from_its_birth_to_its_end() -> None:
    with Database(":memory:") as database:
        database.migrate()
        with database.transaction() as transaction:
            key = keys.add_key(transaction, "team", 3)
            other = keys.add_key(transaction, "team", 5)
            tenant = keys.tenant_of(transaction, keys.key_hash(key))
            assert tenant is not None
            assert tenant.quota == 5
            assert key not in str(transaction.run("SELECT * FROM api_keys"))
            with pytest.raises(ConfigError, match="'sk_' is too short"):  # every key begins so
                keys.revoke_key(transaction, "sk_")
            assert keys.revoke_key(transaction, key) == "team"
            assert keys.tenant_of(transaction, keys.key_hash(key)) is None
            assert keys.tenant_of(transaction, keys.key_hash(other)) == tenant
            with pytest.raises(ConfigError):
                keys.revoke_key(transaction, key)
            with pytest.raises(ConfigError):
                keys.add_key(transaction, "local", 1)


def test_a_quota_stays_unless_another_is_given() -> None:
    with Database(":memory:") as database:
        database.migrate()
        key = keys.add_key(database, "team", 20)
        keys.add_key(database, "team")
        keys.add_key(database, "other")
        tenant = keys.tenant_of(database, keys.key_hash(key))
        assert tenant is not None
        assert tenant.quota == 20
        assert [row["quota"] for row in keys.list_keys(database)].count(8) == 1


def test_the_rate_refills() -> None:
    now = [0.0]
    limit = keys.RateLimit(60, clock=lambda: now[0])
    assert [limit.wait_s("a") for _ in range(61)] == [0.0] * 60 + [1.0]
    assert limit.wait_s("b") == 0.0
    now[0] = 1.0
    assert limit.wait_s("a") == 0.0
