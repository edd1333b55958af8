"""Workers' contributions to a unit, and the closed rounds that they make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from slipstream.consistency import Closed
from slipstream.plan import Plan
from slipstream.types import Buffer, Rank, Settings, Unit

Group = Sequence[Buffer] | None  # the frames of one place of a unit; None: no contribution there


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's frames for one unit: by segment, or all of a layer's in one place."""

    step: int
    read: int
    places: tuple[Group, ...]
    settings: Settings | None
    rate: float
    weights: Sequence[int] = ()  # by place: what it is the sum of, see Push; empty: one each

    def weight(self, place: int) -> int:
        return self.weights[place] if self.weights else 1


@dataclass(frozen=True, slots=True)
class ClosedRound:
    """A closed round of a unit, and its contributions."""

    unit: Unit
    round: int
    closed: Closed
    made: tuple[Contribution, ...]

    @property
    def ranks(self) -> tuple[Rank, ...]:
        return tuple(rank for _, rank in self.closed.contributions)

    def given(self, place: int) -> list[Sequence[Buffer]]:
        """The contributions to one place, in the order in which they are summed."""
        groups = (contribution.places[place] for contribution in self.made)
        return [group for group in groups if group is not None]

    def divisor(self, plan: Plan, place: int) -> float:
        """A parameter's mean runs over all workers of the round (one without a gradient counts as
        zero), where it counts over all rounds that they cover; a buffer's over those workers on
        which it changed."""
        cluster = plan.cluster
        layer = self.unit.layer is not None
        if layer or plan.specs[self.unit.places[place].tensor].role == "parameter":
            if not (cluster.members or plan.weighs_late):
                return self.closed.divisor
            made = zip(self.ranks, self.made, strict=True)
            counted = sum(len(cluster.ranks_at(rank)) * each.weight(place) for rank, each in made)
        else:
            counted = sum(
                each.weight(place) for each in self.made if each.places[place] is not None
            )
        # With two levels a contribution is a host's sum, divided by the workers of a host: by
        # their mean number over hosts.
        return counted * cluster.workers / cluster.ranks
