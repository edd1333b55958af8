"""Integer programs, built variable by variable and row by row, solved by HiGHS."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slipstream.errors import ConfigError

# A limit for programs that are far harder than others of their size. A program that reaches it is
# refused: a tree that depended on the machine's speed would differ between the ranks of a job.
SOLVE_LIMIT_S = 120.0

Term = tuple[int, float]  # a variable and its coefficient


@dataclass(frozen=True, slots=True)
class Solution:
    """The value of every variable at the optimum, and the cost."""

    values: tuple[int, ...]
    cost: float


@dataclass(slots=True)
class Program:
    """A program that minimises the variables' cost; variables are integers from 0 to a bound."""

    costs: list[float] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    rows: list[tuple[list[Term], float, float]] = field(default_factory=list)

    def variable(self, *, cost: float = 0.0, most: float = 1.0) -> int:
        self.costs.append(cost)
        self.bounds.append(most)
        return len(self.costs) - 1

    def require(
        self, terms: Iterable[Term], *, least: float = -math.inf, most: float = math.inf
    ) -> None:
        self.rows.append((list(terms), least, most))

    def solve(self, *, gap: float = 0.0) -> Solution:
        """Return the optimum, or a solution proven to cost at most ``gap`` more, as a share."""
        # Imported here, because it takes half a second, and few users of planning solve programs.
        from scipy.optimize import Bounds, LinearConstraint, milp

        result = milp(
            self.costs,
            integrality=np.ones(len(self.costs)),
            bounds=Bounds(0.0, np.array(self.bounds)),
            constraints=LinearConstraint(self._matrix(), *self._limits()),
            options={"mip_rel_gap": gap, "time_limit": SOLVE_LIMIT_S},
        )
        if result.status == 1:
            raise ConfigError(
                f"HiGHS found no best tree in {SOLVE_LIMIT_S:.0f} s; describe fewer racks, or pin "
                "degree and depth"
            )
        if result.x is None:
            raise ConfigError(f"HiGHS found no tree within these limits: {result.message}")
        values = np.rint(result.x).astype(int)
        return Solution(tuple(map(int, values)), float(values @ np.array(self.costs)))

    def _matrix(self) -> Any:
        from scipy.sparse import csr_array

        starts = np.cumsum([0, *(len(terms) for terms, _, _ in self.rows)])
        flat = [term for terms, _, _ in self.rows for term in terms]
        columns = [variable for variable, _ in flat]
        coefficients = [coefficient for _, coefficient in flat]
        shape = (len(self.rows), len(self.costs))
        return csr_array((coefficients, columns, starts), shape=shape)

    def _limits(self) -> tuple[Any, Any]:
        return np.array([row[1] for row in self.rows]), np.array([row[2] for row in self.rows])


def cheapest_matching(costs: Any) -> list[int]:
    """Return for every row its column, each column once, with the smallest sum of costs."""
    from scipy.optimize import linear_sum_assignment

    return [int(column) for column in linear_sum_assignment(costs)[1]]
