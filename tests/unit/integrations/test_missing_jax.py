"""``slipstream.jax`` where there is no JAX."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

import slipstream


@pytest.mark.parametrize("missing", ["jax", "optax"])
def test_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.delitem(sys.modules, "slipstream.integrations.jax", raising=False)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(slipstream.ConfigError, match=r"pip install 'slipstream\[jax\]'"):
        _ = slipstream.jax


def test_an_old_jax_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "slipstream.integrations.jax", raising=False)
    old = ModuleType("jax")
    old.__version__ = "0.4.38"  # type: ignore[attr-defined]
    for name in ("", ".dlpack", ".numpy"):
        monkeypatch.setitem(sys.modules, f"jax{name}", old)
    monkeypatch.setitem(sys.modules, "optax", ModuleType("optax"))
    for name in ("dlpack", "numpy"):
        monkeypatch.setattr(old, name, old, raising=False)
    with pytest.raises(slipstream.ConfigError, match=r"needs JAX 0.5 or later, and this is 0.4.38"):
        _ = slipstream.jax


def test_it_is_not_imported_before_it_is_asked_for() -> None:
    assert "jax" in dir(slipstream)
    assert "jax" not in slipstream.__all__
