"""The check that a framework is not too old for slipstream."""

from __future__ import annotations

import re

from slipstream.errors import ConfigError


def require_version(
    framework: str, found: str, oldest: tuple[int, int], *, user: str, extra: str
) -> None:
    """Check that a framework is not too old.

    Args:
        framework: Its name.
        found: Its version, of any form: 2.51.0, 3.0.0.dev0, 1.1rc2.
        oldest: The oldest version that works.
        user: The module that needs it.
        extra: The extra of slipstream that installs a newer one.

    Raises:
        ConfigError: It is too old.

    >>> require_version("JAX", "0.4.38", (0, 5), user="slipstream.jax", extra="jax")
    Traceback (most recent call last):
        ...
    slipstream.errors.ConfigError: slipstream.jax needs JAX 0.5 or later, and this is 0.4.38: \
pip install --upgrade 'slipstream[jax]'
    """
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < oldest:
        raise ConfigError(
            f"{user} needs {framework} {'.'.join(map(str, oldest))} or later, and this is "
            f"{found}: pip install --upgrade 'slipstream[{extra}]'"
        )
