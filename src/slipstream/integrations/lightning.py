"""Lightning's Trainer over slipstream: ``Trainer(strategy="slipstream_poseidon", devices=4)``.

Importing this module registers a strategy of Lightning for every system (``slipstream_push_pull``
and so on), and ``slipstream``, which is that of the command line. ``SlipstreamStrategy`` takes any
strategy of slipstream. The loop is Lightning's: slipstream joins the workers when ``fit`` begins,
distributes the module and its optimizers, and leaves when ``fit`` ends.
"""

from __future__ import annotations

import inspect
import os
import secrets
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import slipstream
from slipstream.compat import check
from slipstream.errors import ConfigError, LaunchError, SlipstreamError
from slipstream.initialization import rank_in, with_step
from slipstream.runtime.environment import LOOPBACK, Environment
from slipstream.runtime.error_reporting import report_errors
from slipstream.runtime.launch.children import Children
from slipstream.runtime.launch.processes import die_with
from slipstream.sessions.request import DEFAULT_STRATEGY, own_optimizer
from slipstream.strategy import Strategy
from slipstream.systems import SYSTEMS, parse
from slipstream.torch.preparing import rounds_may_lack_workers
from slipstream.torch.remote_optimizer import RemoteOptimizer

OLDEST = (2, 6)
PARENT = "SLIPSTREAM_LIGHTNING_PARENT"  # rank 0's process, in those that its launcher starts
FAULT_S = 2.0  # for the reason of a failed collective to arrive
DEVICES = ("cpu", "cuda")


def framework() -> str:
    """The name under which the script has imported Lightning: its classes exist twice."""
    other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return "pytorch_lightning" if other else "lightning.pytorch"


def require_version(version: str) -> None:
    """Refuse a Lightning that is too old.

    Raises:
        ConfigError: it is.
    """
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise ConfigError(
            f"slipstream.integrations.lightning needs Lightning {oldest} or later, and this is "
            f"{version}: pip install 'lightning>={oldest}'"
        )


try:
    pl: Any = import_module(framework())
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "slipstream.integrations.lightning needs Lightning: pip install 'slipstream[lightning]'",
        name=error.name,
    ) from error
require_version(pl.__version__)

environments: Any = import_module(f"{pl.__name__}.plugins.environments")
launchers: Any = import_module(f"{pl.__name__}.strategies.launchers")


@contextmanager
def reported_once() -> Iterator[None]:
    """An error within is printed by rank 0 only, in one line."""
    try:
        yield
    except SlipstreamError:
        report_errors(rank_in(with_step(os.environ)))
        raise


class SlipstreamEnvironment(environments.LightningEnvironment):
    """Ranks as slipstream reads them: from a launcher or a scheduler (RANK and so on, SLURM_*).

    Without one, Lightning's own launcher starts the workers of this node.
    """

    def __init__(self) -> None:
        super().__init__()
        variables = with_step(os.environ)
        self._env = Environment.read(variables) if variables.get("RANK") else None
        self._port: socket.socket | None = None
        if parent := os.environ.pop(PARENT, None):
            arm = die_with(int(parent))
            if arm is not None:
                arm()

    @property
    def creates_processes_externally(self) -> bool:
        return self._env is not None or bool(super().creates_processes_externally)

    @property
    def main_address(self) -> str:
        return str(super().main_address) if self._env is None else self._env.master_addr

    @property
    def main_port(self) -> int:
        if self._env is not None:
            return self._env.master_port
        if "MASTER_PORT" in os.environ:
            return int(os.environ["MASTER_PORT"])
        if self._port is None:
            # Held until slipstream listens there, so that no other program gets it.
            self._port = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._port.bind((LOOPBACK, 0))
        return int(self._port.getsockname()[1])

    def world_size(self) -> int:
        return int(super().world_size()) if self._env is None else self._env.world_size

    def global_rank(self) -> int:
        return int(super().global_rank()) if self._env is None else self._env.rank

    def local_rank(self) -> int:
        return int(super().local_rank()) if self._env is None else self._env.local_rank

    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        """Refuse numbers of the Trainer that do not fit the processes that were started.

        Raises:
            LaunchError: they do not fit, or an address is missing.
            SecretError: the job needs a secret.
        """
        asked = f"Trainer(devices={num_devices}, num_nodes={num_nodes})"
        if self._env is None:
            if num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= {*os.environ}:
                raise LaunchError(
                    f"{asked}: set MASTER_ADDR and MASTER_PORT to node 0's address and a free "
                    "port, and NODE_RANK, on every node; or start with torchrun or srun"
                )
            return
        started, here = self._env.world_size, self._env.local_world_size
        if num_devices * num_nodes != started:
            raise LaunchError(
                f"{asked} is for {num_devices * num_nodes} workers, but {started} were started: "
                f"set devices and num_nodes so that their product is {started}, or start "
                f"{num_devices * num_nodes}"
            )
        if here not in (None, num_devices):
            raise LaunchError(
                f"{asked}, but {here} of the {started} workers were started on this host: set "
                f"devices={here} and num_nodes={started // (here or 1)}"
            )

    def require_secret(self, local_size: int, num_nodes: int) -> None:
        """Raise SecretError if the job needs a secret, and has none."""
        if self._env is not None:
            self._env.require_secret()
        elif num_nodes > 1:
            Environment.read({**os.environ, **self.numbers(local_size)}).require_secret()

    @contextmanager
    def for_init(self, local_size: int) -> Iterator[None]:
        """Within, this process has the variables that ``slipstream.init`` reads."""
        own = {} if self._env is not None else self.numbers(local_size) | self._held_port()
        before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    def numbers(self, local_size: int) -> dict[str, str]:
        """What a launcher would set for this process."""
        numbers = {
            "RANK": self.global_rank(),
            "WORLD_SIZE": self.world_size(),
            "LOCAL_RANK": self.local_rank(),
            "LOCAL_WORLD_SIZE": local_size,
            "MASTER_ADDR": self.main_address,
            "MASTER_PORT": self.main_port,
        }
        return {name: str(value) for name, value in numbers.items()}

    def _held_port(self) -> dict[str, str]:
        """The port that was held for slipstream, handed over."""
        held, self._port = self._port, None
        if held is None:
            return {}
        if self.world_size() == 1:
            held.close()
            return {}
        return {"SLIPSTREAM_STORE_FD": str(held.detach())}

    def teardown(self) -> None:
        if self._env is None:
            super().teardown()


CHILDREN = Children()  # a process has one set of workers, and may have several Trainers


class SlipstreamLauncher(launchers._SubprocessScriptLauncher):
    """Lightning's launcher of the other workers of this node, none of which is ever left over."""

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with CHILDREN.needed():
            return super().launch(function, *args, **kwargs)

    def _call_children_scripts(self) -> None:
        if self.num_nodes == 1 and not any(map(os.environ.get, SECRETS)):
            os.environ["SLIPSTREAM_SECRET"] = secrets.token_hex(32)
        os.environ[PARENT] = str(os.getpid())
        super()._call_children_scripts()
        del os.environ[PARENT]
        CHILDREN.watch(self.procs)
        # Lightning's own observer would kill all, before they have printed why they end.
        self.procs: list[Any] = []

    def kill(self, signum: Any) -> None:
        """Called after Ctrl-C; the strategy's teardown has ended the workers."""


class SlipstreamStrategy(pl.strategies.DDPStrategy):
    """Lightning's strategy that trains with one of slipstream.

    Args:
        strategy: a strategy of slipstream, its text, or None for that of the command line
            (``SLIPSTREAM_STRATEGY``), else ``push_pull``.
        checkpoint_io: as for Lightning's ``DDPStrategy``.
        precision_plugin: as for Lightning's ``DDPStrategy``.
        process_group_backend: as for Lightning's ``DDPStrategy``.
        options: of ``slipstream.init``, such as ``servers=2``.

    Attributes:
        summary: the metrics of the last job, on rank 0.

    Raises:
        ConfigError: a Lightning loop cannot train with the strategy; the message gives the reason
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
            given = strategy or os.environ.get("SLIPSTREAM_STRATEGY") or DEFAULT_STRATEGY
            self._strategy = given
            self._chosen = chosen(given)
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
        self._fault: SlipstreamError | None = None
        self.summary: dict[str, Any] | None = None

    @property
    def job(self) -> slipstream.Job:
        """The job, from the start of ``fit`` (before ``setup``) to its end.

        Raises:
            ConfigError: there is none now.
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
            if workers > 1 and not self._options.get("secret"):
                self.cluster_environment.require_secret(self.num_processes, self.num_nodes)
        self._launcher = SlipstreamLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes
        )

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._process_group_backend = self._get_process_group_backend()
        with self.cluster_environment.for_init(self.num_processes):
            self._job = slipstream.init(**self._options)
        # Not torch's own call: its store would listen on every address of this host.
        self._job.init_process_group(self._process_group_backend)
        CHILDREN.joined = True
        super().setup_distributed()

    # ---- the module and its optimizers

    def configure_ddp(self) -> None:
        """Nothing to wrap: the module stays plain."""

    def setup_optimizers(self, trainer: Any) -> None:
        super().setup_optimizers(trainer)
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
        if self._job is not None and is_of_collective(exception):
            self._fault = fault_of(self._job)

    def teardown(self) -> None:
        error, fault = self._error, self._fault
        self._error = self._fault = None
        try:
            self._leave(fault or error)
        finally:
            if error is not None:
                CHILDREN.end()
            CHILDREN.joined = False
            super().teardown()
        if fault is not None:
            raise fault from error

    def _leave(self, error: BaseException | None) -> None:
        """Leave the job; after a normal end the optimizers are the module's own again."""
        job, self._job = self._job, None
        if job is None:
            return
        if error is None:
            self.optimizers = [own_with_state(optimizer) for optimizer in self.optimizers]
        with warnings.catch_warnings():
            # An evaluation distributes nothing.
            warnings.filterwarnings("ignore", "job.distribute was never called")
            job.__exit__(None if error is None else type(error), error, None)
        self.summary = job.summary


SECRETS = ("SLIPSTREAM_SECRET", "SLIPSTREAM_SECRET_FILE")


def chosen(given: Strategy | str) -> Strategy:
    """The strategy, checked as far as it can be without a model.

    Raises:
        ConfigError: it is none, its parts are incompatible, or no Lightning loop can carry it.
    """
    strategy = parse(given) if isinstance(given, str) else given
    if not isinstance(strategy, Strategy):
        raise ConfigError(
            f"SlipstreamStrategy takes a strategy, such as slipstream.push_pull(), or its text; it "
            f"was given {strategy!r}"
        )
    check(strategy)
    if strategy.shared_memory is not None:
        raise ConfigError(
            f"{strategy.name}: learners share memory and do not wait for each other, and "
            "Lightning's loop makes all ranks wait in its barriers: use slipstream_push_pull or "
            "another strategy, or a loop of your own with slipstream.init and job.distribute"
        )
    return strategy


def known_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options, if ``slipstream.init`` takes them.

    Raises:
        ConfigError: it does not.
    """
    known = inspect.signature(slipstream.init).parameters
    if unknown := sorted({*options} - {*known}):
        raise ConfigError(
            f"SlipstreamStrategy does not take {', '.join(unknown)}: it takes those of "
            f"slipstream.init, {', '.join(known)}"
        )
    return options


def check_devices(devices: Any) -> None:
    """Refuse accelerators that slipstream does not know.

    Raises:
        ConfigError: there is one.
    """
    if unknown := {device.type for device in devices} - {*DEVICES}:
        raise ConfigError(
            f"slipstream trains on {' and '.join(DEVICES)}, and the Trainer has chosen "
            f"{', '.join(unknown)}: set Trainer(accelerator='cpu')"
        )


def check_loop(strategy: Strategy, workers: int) -> None:
    """Refuse rounds of the first N, where all workers make the same number of steps.

    Raises:
        ConfigError: the last rounds would wait for workers that have finished.
    """
    if rounds_may_lack_workers(strategy, workers):
        raise ConfigError(
            f"{strategy.name}: in a Lightning loop every worker makes the same number of steps, "
            "so a worker that has missed rounds would wait for others that have finished: use "
            f"first={workers}, such as SlipstreamStrategy('backup_workers(first={workers})'), or "
            "a loop of your own with job.steps"
        )


def own_with_state(optimizer: Any) -> Any:
    """The module's own optimizer, with the state that servers have of it."""
    own = own_optimizer(optimizer)
    if isinstance(optimizer, RemoteOptimizer):
        own.load_state_dict(optimizer.state_dict())
    return own


def is_of_collective(error: BaseException) -> bool:
    """Whether a collective of torch has failed, perhaps because another worker has ended."""
    names = (frame.filename for frame in traceback.extract_tb(error.__traceback__))
    return isinstance(error, RuntimeError) and any("torch/distributed" in name for name in names)


def fault_of(job: slipstream.Job) -> SlipstreamError | None:
    """The error of another worker that has ended the job, if it arrives in time."""
    deadline = time.monotonic() + FAULT_S
    while time.monotonic() < deadline:
        try:
            job.check()
        except SlipstreamError as fault:
            return fault
        time.sleep(0.02)
    return None


def register() -> None:
    """Give Lightning the names ``slipstream`` and ``slipstream_<system>``."""
    about = {system: f"slipstream's {system}" for system in SYSTEMS}
    for system, description in {"": "slipstream, as its command line says", **about}.items():
        pl.strategies.StrategyRegistry.register(
            f"slipstream_{system}".rstrip("_"),
            partial(SlipstreamStrategy, system or None),
            description=description,
            override=True,
        )


register()
