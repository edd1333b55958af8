"""Like the worker of the equivalence tests, with more cases and more ways to choose."""

from __future__ import annotations

import equivalence_worker
from cases import CASES
from poseidon_cases import POSEIDON_CASES, SYSTEMS, choose_as_usual

if __name__ == "__main__":
    CASES.update(POSEIDON_CASES)
    equivalence_worker.SYSTEMS.update(SYSTEMS)
    equivalence_worker.BEFORE_EACH.append(choose_as_usual)
    equivalence_worker.main()
