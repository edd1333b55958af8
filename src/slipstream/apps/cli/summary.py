"""A job's metrics, as a short table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from slipstream.printable import printable
from slipstream.units import human_bytes


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return the content of ``--json`` as a table."""
    traffic = summary["bytes"]
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_row("strategy", Text(printable(str(summary["strategy"]))))
    table.add_row("workers", str(summary["workers"]))
    table.add_row("servers", str(summary["servers"]))
    if summary.get("accuracy") is not None:
        table.add_row("accuracy", f"{summary['accuracy']:.2%}")
    table.add_row("samples/s", f"{summary['samples_per_s']:,.0f}")
    for scheme, nbytes in sorted(traffic["by_scheme"].items()):
        table.add_row(Text(printable(f"bytes {scheme}")), human_bytes(nbytes))
    if "rounds" in summary:
        made, dropped = (sum(summary["rounds"][key].values()) for key in ("made", "dropped"))
        table.add_row("gradients dropped", f"{dropped} of {made + dropped}")
    ages = [ages_of_tensor["mean"] for ages_of_tensor in summary.get("staleness", {}).values()]
    if any(ages):
        table.add_row("gradients' age, mean", f"{sum(ages) / len(ages):.1f} updates")
    table.add_row("time waited", f"{summary['wait_s']:.1f} of {summary['wall_s']:.1f} s")
    return table
