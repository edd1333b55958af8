"""A tree before hosts are assigned to it: positions, each in a rack, below a root."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from slipstream.errors import ConfigError

MOST_ALPHA = 1e6
ROOT = -1  # the parent of the positions that the server sends to


@dataclass(frozen=True, slots=True)
class Limits:
    """P3's limits: at most ``degree`` children (T), at most ``depth`` hops from the root (H),
    and the cost of a leaf (α)."""

    degree: int
    depth: int
    alpha: float = 0.1

    def __post_init__(self) -> None:
        for name in ("degree", "depth"):
            if getattr(self, name) < 1:
                raise ConfigError(f"a tree's {name} of {getattr(self, name)}: give 1 or more")
        if not 0 <= self.alpha <= MOST_ALPHA:
            raise ConfigError(f"alpha={self.alpha}: a leaf costs 0 or more, up to {MOST_ALPHA:g}")

    @property
    def capacity(self) -> int:
        """The number of hosts that can be reached: T + T² + … + T^H."""
        return sum(self.degree**level for level in range(1, self.depth + 1))

    def check(self, hosts: int) -> None:
        """Check that there is a tree of so many hosts within these limits."""
        if self.capacity >= hosts:
            return
        depth, degree = least_depth(self.degree, hosts), least_degree(self.depth, hosts)
        raise ConfigError(
            f"a tree of degree {self.degree} and depth {self.depth} reaches {self.capacity} hosts "
            f"at most, not {hosts}; allow a depth of {depth} or a degree of {degree}"
        )


def least_depth(degree: int, hosts: int) -> int:
    """Return the smallest depth at which a tree of this degree reaches so many hosts."""
    depth = 1
    while Limits(degree, depth).capacity < hosts:
        depth += 1
    return depth


def least_degree(depth: int, hosts: int) -> int:
    """Return the smallest degree at which a tree of this depth reaches so many hosts."""
    degree = 1
    while Limits(degree, depth).capacity < hosts:
        degree += 1
    return degree


@dataclass(frozen=True, slots=True)
class Shape:
    """The rack and the parent of every position, parents before their children."""

    racks: tuple[int, ...]
    parents: tuple[int, ...]

    @property
    def depths(self) -> tuple[int, ...]:
        """The number of hops from the root to every position."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The number of children of every position."""
        counted = Counter(self.parents)
        return tuple(counted[position] for position in range(len(self.parents)))

    def among(self, racks: Sequence[int]) -> Shape:
        """Return the same tree with rack r renamed to ``racks[r]``."""
        return Shape(tuple(racks[rack] for rack in self.racks), self.parents)

    @property
    def root_degree(self) -> int:
        return self.parents.count(ROOT)


def chain(racks: Iterable[int]) -> Shape:
    """Return a chain, in the given order of racks."""
    order = tuple(racks)
    return Shape(order, tuple(range(-1, len(order) - 1)))
