"""The oldest version of a framework, which all integrations check alike."""

from __future__ import annotations

import pytest

from slipstream.errors import ConfigError
from slipstream.integrations.versions import require_version


def require(found: str) -> None:
    require_version("Ray", found, (2, 51), user="slipstream.integrations.ray", extra="ray")


@pytest.mark.parametrize("found", ["2.51.0", "2.51rc1", "3.0.0.dev0", "10.0"])
def test_this_version_or_a_later_one(found: str) -> None:
    require(found)


@pytest.mark.parametrize("found", ["2.50.9", "2.9.3", "1.99", "0.0.0+unknown"])
def test_an_older_one_is_refused_with_the_way_out(found: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require(found)
    assert str(refused.value) == (
        f"slipstream.integrations.ray needs Ray 2.51 or later, and this is {found}: "
        "pip install --upgrade 'slipstream[ray]'"
    )
