"""A job's metrics in Weights & Biases: ``job.watch(WandB())``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import slipstream

try:
    import wandb
except ImportError as error:
    raise ImportError(
        f"slipstream.integrations.wandb needs wandb ({error}): pip install 'slipstream[wandb]'"
    ) from error


class WandB(slipstream.Watcher):
    """A watcher that logs ``slipstream/loss`` and so on; strategy and workers are in the config.

    Metrics are logged to the run that is open when training begins, else to a run of its own, which
    ends with the job. Their x axis is ``slipstream/step``.

    In the loop's run only the loop advances W&B's step, since W&B drops what is logged for an
    earlier one. So metrics join the step that the loop has open; if ``job.record`` is called
    several times in one step, the last metrics remain.
    """

    def note_event(self, event: str, content: Mapping[str, Any]) -> None:
        if event == "start":
            self._own = wandb.run is None
            self._run: Any = wandb.run or wandb.init()
            self._run.config.update({"slipstream": dict(content)})
            self._run.define_metric("slipstream/*", step_metric="slipstream/step")
        if event == "failed" and self._own:
            self._run.finish(exit_code=1)

    def note(self, step: int, figures: Mapping[str, float]) -> None:
        with_step = {"step": step, **figures}
        values = {f"slipstream/{name}": value for name, value in with_step.items()}
        self._run.log(values, commit=self._own)

    def close(self) -> None:
        if self._own:
            self._run.finish()
