"""``slipstream.jax`` where there is no JAX."""

from __future__ import annotations

import sys

import pytest

import slipstream


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delitem(sys.modules, "slipstream.integrations.jax", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(slipstream.ConfigError, match=r"pip install 'slipstream\[jax\]'"):
        _ = slipstream.jax


def test_it_is_not_imported_before_it_is_asked_for() -> None:
    assert "jax" in dir(slipstream)
    assert "jax" not in slipstream.__all__
