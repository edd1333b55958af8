"""Fragments: a model's tensors in groups of about equal size, each with rounds of its own."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from slipstream.errors import ConfigError
from slipstream.types import Spec


def deal_fragments(specs: Sequence[Spec], fragments: int) -> tuple[tuple[int, ...], ...]:
    """Deal tensors, the largest first, to the fragment that is smallest so far.

    Args:
        specs: The model's tensors.
        fragments: The number of fragments; each has a parameter at least.

    Returns:
        The tensors of every fragment, by number, in the model's order.

    Raises:
        ConfigError: There are more fragments than parameters.

    >>> sizes = {"a": 8, "b": 5, "c": 4}
    >>> deal_fragments([Spec(name, (n,), "float32", 0) for name, n in sizes.items()], 2)
    ((0,), (1, 2))
    """
    parameters = sum(spec.role == "parameter" for spec in specs)
    if not fragments <= max(parameters, 1):
        raise ConfigError(
            f"fragments={fragments}, but there are {parameters} parameter tensor(s) to deal: ask "
            f"for at most {max(parameters, 1)} fragment(s)"
        )
    smallest = [(0, fragment) for fragment in range(fragments)]
    dealt: list[list[int]] = [[] for _ in range(fragments)]
    # Parameters first: as there are enough of them, every fragment gets one.
    by_size = sorted(
        range(len(specs)), key=lambda t: (specs[t].role != "parameter", -specs[t].numel)
    )
    for tensor in by_size:
        load, fragment = heapq.heappop(smallest)
        dealt[fragment].append(tensor)
        heapq.heappush(smallest, (load + max(1, specs[tensor].numel), fragment))
    return tuple(tuple(sorted(tensors)) for tensors in dealt)
