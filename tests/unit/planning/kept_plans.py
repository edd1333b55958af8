"""Plans of every system for several models and clusters, as digests that are kept.

``python tests/unit/planning/kept_plans.py`` records them anew, for a change that is meant.
"""

from __future__ import annotations

import hashlib
import json
from itertools import pairwise
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.plan import Plan
from slipstream.systems import parse
from slipstream.types import Cluster, Spec

FILE = Path(__file__).parent / "kept_plans.json"
STRATEGIES = (
    "push_pull",
    "push_pull(update='server', chunk_bytes=8192)",
    "push_pull(wire='int8')",
    "allreduce(wire='int8')",
    "allreduce",
    "all_to_all",
    "poseidon",
    "poseidon(choose='bytes', wire='int8')",
    "adam_factors",
    "one_bit",
    "low_rank",
    "backup_workers(first=2)",
    "k_async(k=2)",
    "async_sgd",
    "bounded_staleness(s=2)",
    "parameter_flow",
    "diloco(every=4, fragments=2)",
    "diloco(every=4, first=2)",
    "local_sgd",
    "ako",
    "gadei",
)
CLUSTERS = (
    Cluster(2, 2),
    Cluster(3, 1),
    Cluster(4, 4),
    Cluster(5, 2, members=((0, 1), (2,), (3, 4, 5), (6,), (7,))),
)


def layers(widths: tuple[int, ...], dtype: str = "float32") -> tuple[Spec, ...]:
    """Fully connected layers, each with a bias, and a batch-norm statistic at the end."""
    found: list[Spec] = []
    for order, (inputs, outputs) in enumerate(pairwise(widths)):
        layer = {"layer": f"fc{order}", "form": "factors"}
        found.append(Spec(f"fc{order}.weight", (outputs, inputs), dtype, order, **layer))
        found.append(Spec(f"fc{order}.bias", (outputs,), dtype, order, **layer))
    return (*found, Spec("norm.mean", (widths[-1],), dtype, len(widths), role="buffer"))


MODELS = {
    "tiny": layers((7, 5, 3)),
    "small": layers((300, 400, 10)),
    "large": layers((1024, 2048, 2048, 100)),
    "double": layers((300, 400, 10), "float64"),
}


def digest(plan: Plan) -> str:
    """A short digest of all that messages are numbered by, and of who holds what."""
    said = (
        *(plan.routes, plan.route_of, plan.chunks, plan.units, plan.holders, plan.places),
        *(plan.priorities, plan.fragments, plan.consistency),
    )
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


def digests(text: str, model: str) -> str:
    """By cluster, what the plan is, or why there is none."""
    found = []
    for cluster in CLUSTERS:
        try:
            found.append(digest(parse(text).plan(MODELS[model], cluster)))
        except ConfigError as error:
            found.append(type(error).__name__)
    return " ".join(found)


if __name__ == "__main__":
    kept = {text: {model: digests(text, model) for model in MODELS} for text in STRATEGIES}
    FILE.write_text(json.dumps(kept, indent=1) + "\n")
