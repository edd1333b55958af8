"""Lightning's strategy that trains by a job, and its names in Lightning.

The loop is Lightning's: slipstream joins the workers when ``fit`` begins, distributes the module
and its optimizers, and leaves when ``fit`` ends.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from inspect import signature
from typing import Any

import slipstream
from slipstream.compat import check
from slipstream.errors import ConfigError, SlipstreamError
from slipstream.integrations.lightning.environment import (
    CHILDREN,
    SlipstreamEnvironment,
    SlipstreamLauncher,
    pl,
    reported_once,
)
from slipstream.methods import SharedMemoryUpdates
from slipstream.strategy import Strategy
from slipstream.systems import SYSTEMS, parse

GRACE_S = 3.0  # for workers to end, after a lost one has been silent for long enough
DEVICES = ("cpu", "cuda")


class SlipstreamStrategy(pl.strategies.DDPStrategy):
    """A strategy of Lightning that trains with one of slipstream.

    Args:
        strategy: A strategy of slipstream, its text, or None for that of the command line
            (``SLIPSTREAM_STRATEGY``), else ``push_pull``.
        checkpoint_io: The same as for Lightning's ``DDPStrategy``.
        precision_plugin: The same as for Lightning's ``DDPStrategy``.
        process_group_backend: The same as for Lightning's ``DDPStrategy``.
        options: Arguments of ``slipstream.init``, such as ``servers=2``.

    Attributes:
        summary: The metrics of the last job, on rank 0.

    Raises:
        ConfigError: A Lightning loop cannot train with the strategy; the message gives the reason
            and an alternative.
    """

    strategy_name = "slipstream"
    optimizers: list[Any]

    def __init__(
        self,
        strategy: Strategy | str | None = None,
        *,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        process_group_backend: str | None = None,
        **options: Any,
    ) -> None:
        with reported_once():
            requested = strategy or os.environ.get("SLIPSTREAM_STRATEGY") or "push_pull"
            self._strategy = requested
            self._chosen = chosen(requested)
            self._options = known_options(options)
            environment = SlipstreamEnvironment()
        super().__init__(
            cluster_environment=environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
        )
        self._job: slipstream.Job | None = None
        self._error: BaseException | None = None
        self.summary: dict[str, Any] | None = None

    @property
    def job(self) -> slipstream.Job:
        """The job, from the start of ``fit`` (before ``setup``) to its end.

        Raises:
            ConfigError: There is no job now.
        """
        if self._job is None:
            raise ConfigError(
                "slipstream's job exists from the start of trainer.fit() to its end: use "
                "trainer.strategy.job in hooks of the LightningModule or of callbacks"
            )
        return self._job

    # ---- before the start

    def _configure_launcher(self) -> None:
        with reported_once():
            check_devices(self.parallel_devices or ())
            self.cluster_environment.validate_settings(self.num_processes, self.num_nodes)
            workers = self.num_processes * self.num_nodes
            check_loop(self._chosen, workers)
            if workers > 1 and not self._options["secret"]:
                self.cluster_environment.require_secret(self.num_processes, self.num_nodes)
        self._launcher = SlipstreamLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self._fault_behind
        )

    def _fault_behind(self, error: BaseException) -> SlipstreamError | None:
        return None if self._job is None else self._job.fault_behind(error)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        with self.cluster_environment.for_init(self.num_processes):
            self._job = slipstream.init(**self._options)
        # Not torch's own call: its store would listen on every address of this host.
        self._job.init_process_group(self._process_group_backend)
        CHILDREN.grace_s = self._options["silence_limit_s"] + GRACE_S
        super().setup_distributed()

    # ---- the module and its optimizers

    def configure_ddp(self) -> None:
        """Do nothing: the module stays as it is."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
        if self.world_size > 1:
            check_optimizers(self.lightning_module, self.optimizers)
        pairs = [(self.lightning_module, optimizer) for optimizer in self.optimizers]
        self.optimizers = [loop for _, loop in self.job.distribute(pairs, self._strategy)]

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        # Through the module's forward, as with DDP: weights may arrive layer by layer.
        module = self.lightning_module
        with self.precision_plugin.train_step_context():
            return self._forward_redirection(module, module, "training_step", *args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if self._job is not None:
            self._job.wait()
        return super().validation_step(*args, **kwargs)

    def block_backward_sync(self) -> AbstractContextManager[None]:
        return self.job.accumulate()

    # ---- the end

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._error = exception

    def teardown(self) -> None:
        error, self._error = self._error, None
        try:
            self._leave(error)
        except BaseException as late:  # an error of another worker, after this loop's end
            error = late
            raise
        finally:
            if error is not None:
                CHILDREN.end()
            CHILDREN.leave()
            super().teardown()

    def _leave(self, error: BaseException | None) -> None:
        """Leave the job; after a normal end the optimizers are the module's own again."""
        job, self._job = self._job, None
        if job is None:
            return
        if error is None:
            try:
                self.optimizers = [own_with_state(optimizer) for optimizer in self.optimizers]
            except BaseException as late:  # servers may be lost
                job.__exit__(type(late), late, late.__traceback__)
                raise
        with warnings.catch_warnings():
            # An evaluation distributes nothing.
            warnings.filterwarnings("ignore", "job.distribute was never called")
            job.__exit__(None if error is None else type(error), error, None)
        self.summary = job.summary


def chosen(given: Strategy | str) -> Strategy:
    """Return the strategy, checked as far as possible without a model.

    Raises:
        ConfigError: It is no strategy, its parts are incompatible, or no Lightning loop can use it.
    """
    strategy = parse(given) if isinstance(given, str) else given
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"SlipstreamStrategy takes a strategy, such as slipstream.push_pull(), or its text; it "
            f"was given {strategy!r}"
        )
    check(strategy)
    if isinstance(strategy.method, SharedMemoryUpdates):
        raise ConfigError(
            f"{strategy.name}: learners share memory and do not wait for each other, and "
            "Lightning's loop makes all ranks wait in its barriers: use slipstream_push_pull or "
            "another strategy, or a loop of your own with slipstream.init and job.distribute"
        )
    return strategy


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options, with the defaults of ``slipstream.init``.

    Raises:
        ConfigError: ``slipstream.init`` does not take one of them.
    """
    known = {name: each.default for name, each in signature(slipstream.init).parameters.items()}
    if unknown := sorted({*options} - {*known}):
        raise ConfigError(
            f"SlipstreamStrategy does not take {', '.join(unknown)}: it takes those of "
            f"slipstream.init, {', '.join(known)}"
        )
    return known | options


def check_devices(devices: Any) -> None:
    """Check that slipstream supports the accelerator's devices.

    Raises:
        ConfigError: It does not support one.
    """
    if unknown := {device.type for device in devices} - {*DEVICES}:
        raise ConfigError(
            f"slipstream trains on {' and '.join(DEVICES)}, and the Trainer has chosen "
            f"{', '.join(unknown)}: set Trainer(accelerator='cpu')"
        )


def check_loop(strategy: Strategy, workers: int) -> None:
    """Check that all workers make the same number of rounds, as all make the same number of steps.

    Raises:
        ConfigError: The last rounds would wait for workers that have finished.
    """
    if instead := strategy.instead_if_absent(workers):
        raise ConfigError(
            f"{strategy.name}: in a Lightning loop every worker makes the same number of steps, "
            "so a worker that has missed rounds would wait for others that have finished: use "
            f"{instead[0]}, such as SlipstreamStrategy('{strategy.name}({instead[0]})'), or a loop "
            "of your own with job.steps"
        )


def check_optimizers(module: Any, optimizers: Sequence[Any]) -> None:
    """Check that no optimizer is Lightning's stand-in for one, which has no parameters.

    Raises:
        ConfigError: ``configure_optimizers`` has returned None.
    """
    if not all(optimizer.param_groups for optimizer in optimizers):
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers has returned None, so there are no "
            "gradients to average: return an optimizer, or train with devices=1"
        )


def own_with_state(optimizer: Any) -> Any:
    """Return the module's own optimizer, with the state that servers may have of it."""
    own = getattr(optimizer, "local", None)
    if own is None:
        return optimizer
    own.load_state_dict(optimizer.state_dict())
    return own


def register() -> None:
    """Register the names ``slipstream`` and ``slipstream_<system>`` with Lightning."""
    about = {system: f"slipstream's {system}" for system in SYSTEMS}
    for system, description in {"": "slipstream, as its command line says", **about}.items():
        pl.strategies.StrategyRegistry.register(
            f"slipstream_{system}".rstrip("_"),
            partial(SlipstreamStrategy, system or None),
            description=description,
            override=True,
        )
