"""Lightning itself, the environment of its processes, and its launcher."""

from __future__ import annotations

import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from slipstream.errors import LaunchError, SlipstreamError
from slipstream.initialization import rank_in, with_step
from slipstream.integrations.versions import require_version
from slipstream.runtime.launch.children import Children
from slipstream.runtime.launch.processes import SECRET_VARIABLES
from slipstream.runtime.process.environment import LOOPBACK, Environment
from slipstream.runtime.process.error_reporting import report_errors

OLDEST = (2, 6)
PARENT = "SLIPSTREAM_LIGHTNING_PARENT"  # see ``Children.follow``


def framework() -> str:
    """Return the name under which the script has imported Lightning: its classes exist twice."""
    other = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    return "pytorch_lightning" if other else "lightning.pytorch"


try:
    pl: Any = import_module(framework())
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "slipstream.integrations.lightning needs Lightning: pip install 'slipstream[lightning]'",
        name=error.name,
    ) from error
require_version(
    "Lightning",
    pl.__version__,
    OLDEST,
    user="slipstream.integrations.lightning",
    extra="lightning",
)

CHILDREN = Children()  # a process has one set of workers, and may have several Trainers
environments: Any = import_module(f"{pl.__name__}.plugins.environments")
launchers: Any = import_module(f"{pl.__name__}.strategies.launchers")


@contextmanager
def reported_once() -> Iterator[None]:
    """Let rank 0 alone print an error raised in the block, in one line."""
    try:
        yield
    except SlipstreamError:
        report_errors(rank_in(with_step(os.environ)))
        raise


class SlipstreamEnvironment(environments.LightningEnvironment):
    """The ranks as slipstream reads them: from a launcher or a scheduler (RANK, SLURM_* and so on).

    Without one, Lightning's own launcher starts the workers of this node.
    """

    def __init__(self) -> None:
        super().__init__()
        variables = with_step(os.environ)
        self._env = Environment.read(variables) if variables.get("RANK") else None
        self._port: socket.socket | None = None
        if parent := os.environ.pop(PARENT, None):
            CHILDREN.follow(parent)

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
        """Check that numbers of the Trainer fit the processes that were started.

        Raises:
            LaunchError: They do not fit, or an address is missing.
            SecretError: The job needs a secret.
        """
        trainer = f"Trainer(devices={num_devices}, num_nodes={num_nodes})"
        if self._env is None:
            if num_nodes > 1 and not {"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"} <= {*os.environ}:
                raise LaunchError(
                    f"{trainer}: set MASTER_ADDR and MASTER_PORT to node 0's address and a free "
                    "port, and NODE_RANK, on every node; or start with torchrun or srun"
                )
            return
        started, here = self._env.world_size, self._env.local_world_size
        if num_devices * num_nodes != started:
            raise LaunchError(
                f"{trainer} is for {num_devices * num_nodes} workers, but {started} were started: "
                f"set devices and num_nodes so that their product is {started}, or start "
                f"{num_devices * num_nodes}"
            )
        if here not in (None, num_devices):
            raise LaunchError(
                f"{trainer}, but {here} of the {started} workers were started on this host: set "
                f"devices={here} and num_nodes={started // (here or 1)}"
            )

    def require_secret(self, local_size: int, num_nodes: int) -> None:
        """Check that the job has a secret if it needs one; raise SecretError otherwise."""
        if self._env is not None:
            self._env.with_secret()
        elif num_nodes > 1:
            Environment.read({**os.environ, **self.numbers(local_size)}).with_secret()

    @contextmanager
    def for_init(self, local_size: int) -> Iterator[None]:
        """Set the variables that ``slipstream.init`` reads, within the block."""
        own = {} if self._env is not None else self.numbers(local_size) | self._held_port()
        before = {name: os.environ.get(name) for name in own}
        os.environ.update(own)
        try:
            yield
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    def numbers(self, local_size: int) -> dict[str, str]:
        """Return the variables that a launcher would set for this process."""
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
        """Release the port that was held for slipstream; return the variables that pass it on."""
        port, self._port = self._port, None
        if port is None:
            return {}
        if self.world_size() == 1:
            port.close()
            return {}
        return {"SLIPSTREAM_STORE_FD": str(port.detach())}

    def teardown(self) -> None:
        if self._env is None:
            super().teardown()


class SlipstreamLauncher(launchers._SubprocessScriptLauncher):
    """Lightning's launcher of the other workers of this node, which all end with this process.

    Args:
        fault_behind: Returns the fault of the job that explains an error, if there is one.
    """

    def __init__(
        self,
        cluster_environment: SlipstreamEnvironment,
        num_processes: int,
        num_nodes: int,
        fault_behind: Callable[[BaseException], SlipstreamError | None],
    ) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        self._fault_behind = fault_behind

    def launch(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with CHILDREN.needed():
            try:
                return super().launch(function, *args, **kwargs)
            except Exception as error:
                # Here, so that callbacks and loggers get the fault, too.
                if (fault := self._fault_behind(error)) is not None:
                    raise fault from error
                raise

    def _call_children_scripts(self) -> None:
        if self.num_nodes == 1 and not any(map(os.environ.get, SECRET_VARIABLES)):
            os.environ["SLIPSTREAM_SECRET"] = secrets.token_hex(32)
        os.environ[PARENT] = CHILDREN.parent()
        try:
            super()._call_children_scripts()
        finally:  # also for those started before a failure
            os.environ.pop(PARENT, None)
            CHILDREN.watch(self.procs, self.cluster_environment.global_rank() + 1)
            # Lightning's own observer would kill all, before they have printed their errors.
            self.procs: list[Any] = []

    def kill(self, signum: Any) -> None:
        CHILDREN.send(signum)
