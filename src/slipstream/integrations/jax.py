"""Data-parallel JAX: ``engine.mean(grads)`` between two jitted functions, or as an optax transform.

engine = slipstream.jax.engine(job, params, "push_pull")
params = engine.params
grads = engine.mean(grads)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch

import slipstream
from slipstream.errors import RuntimeFault
from slipstream.integrations.versions import require_version
from slipstream.torch.distribute.exchange import as_tensor

try:
    import jax
    import jax.dlpack
    import jax.numpy as jnp
    import optax
except ImportError as error:
    raise slipstream.ConfigError(
        f"slipstream.jax needs JAX and optax, of which {error.name!r} is missing: "
        "pip install 'slipstream[jax]'"
    ) from error

__all__ = ["Engine", "engine"]

OLDEST = (0, 5)
require_version("JAX", jax.__version__, OLDEST, user="slipstream.jax", extra="jax")

logger = logging.getLogger(__name__)

DTYPES = ("float32", "float64", "bfloat16", "float16", "complex64", "complex128")


def engine(
    job: slipstream.Job, params: Any, strategy: slipstream.Strategy | str | None = None
) -> Engine:
    """Average gradients of these params over all workers of a job; every rank must call it.

    Args:
        job: The job of ``slipstream.init``.
        params: A pytree of arrays of floating-point numbers, the same on all ranks but for values.
        strategy: A strategy in which workers update, in rounds of all workers, such as "push_pull"
            or "allreduce"; by default that of the command line, else ``push_pull``.

    Raises:
        ConfigError: The strategy or the params cannot be used; nothing was started.
    """
    return Engine(job, params, strategy)


class Engine:
    """The exchange of one pytree's gradients; ``engine`` creates it.

    Arrays are shared with slipstream by DLPack, and are not copied, if they are on JAX's first
    CPU device. Others are copied to it and back.

    Attributes:
        params: Rank 0's params, with which all ranks begin.
    """

    def __init__(
        self, job: slipstream.Job, params: Any, strategy: slipstream.Strategy | str | None = None
    ) -> None:
        paths, self._tree = jax.tree_util.tree_flatten_with_path(params)
        self._names = names_of([path for path, _ in paths])
        self._host = jax.local_devices(backend="cpu")[0]
        self._adopt = adopter(self._host)
        leaves = [as_array(leaf, name) for (_, leaf), name in zip(paths, self._names, strict=True)]
        if not leaves:
            raise slipstream.ConfigError("slipstream.jax.engine was given params without an array")
        for leaf, name in zip(leaves, self._names, strict=True):
            check(leaf, name)
        self._layouts = [(leaf.shape, leaf.dtype) for leaf in leaves]
        shared = dict(zip(self._names, self._on_host(leaves), strict=True))
        self._exchange = job.exchange(shared, strategy, outputs_last=True)
        self.params, self._is_single_worker = params, job.world_size == 1
        weights = self._exchange.weights()  # also with one worker, where nothing is exchanged
        if not self._is_single_worker:
            arrays = map(self._adopt, weights)
            self.params = self._tree.unflatten(map(put_back, arrays, leaves))

    def mean(self, grads: Any) -> Any:
        """Return the mean of all workers' gradients; every rank must call it, once a step.

        Args:
            grads: A pytree of the same structure, shapes and dtypes as the params. It is
                not changed.

        Raises:
            RuntimeFault: The pytree differs from the params, or this was called within ``jax.jit``.
        """
        leaves = self._matching(grads)
        # All at once: threads that carry gradients compete for the interpreter with these calls.
        tensors = [as_tensor(leaf) for leaf in self._on_host(leaves)]
        for number in reversed(range(len(tensors))):  # as a backward pass completes them
            self._exchange.ready(number, tensors[number])
        # While gradients are being exchanged, since this takes JAX some time.
        means = (
            leaves if self._is_single_worker else list(map(self._adopt, self._exchange.places()))
        )
        for number, written in enumerate(self._exchange.finish()):
            if written is None:  # no worker had a gradient that counts
                means[number] = jnp.zeros_like(leaves[number])
        return self._tree.unflatten(map(put_back, means, leaves))

    def transform(self) -> optax.GradientTransformation:
        """Return the same as a transform: ``optax.chain(engine.transform(), optax.adam(1e-3))``.

        Its ``update`` must not be called within ``jax.jit``; later transforms may be.
        """

        def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
            return self.mean(updates), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    def _matching(self, grads: Any) -> list[Any]:
        """Return the arrays of a pytree that has the structure of the params."""
        leaves: list[Any]
        leaves, tree = jax.tree_util.tree_flatten(grads)
        if tree != self._tree:
            raise slipstream.RuntimeFault(
                f"engine.mean was given another pytree than slipstream.jax.engine: "
                f"{self._difference(grads)}; give it the gradients by all of those params"
            )
        for number, (leaf, layout) in enumerate(zip(leaves, self._layouts, strict=True)):
            if isinstance(leaf, jax.core.Tracer):
                raise within_jit()
            leaves[number] = leaf = as_array(leaf, self._names[number])
            if (leaf.shape, leaf.dtype) != layout:
                shape, dtype = layout
                raise slipstream.RuntimeFault(
                    f"the gradient of {self._names[number]!r} is {leaf.dtype} of shape {leaf.shape}"
                    f", but the param was {dtype} of shape {shape} at slipstream.jax.engine: "
                    "cast or reshape it, or make the engine with such params"
                )
        return leaves

    def _difference(self, grads: Any) -> str:
        """Return how a pytree differs from that of the params."""
        paths, _ = jax.tree_util.tree_flatten_with_path(grads)
        names = names_of([path for path, _ in paths])
        if lacking := [name for name in self._names if name not in names]:
            return f"it has no {lacking[0]!r}"
        if added := [name for name in names if name not in self._names]:
            return f"it also has {added[0]!r}"
        return "its containers are of other types"

    def _on_host(self, leaves: list[Any]) -> list[Any]:
        """Return the arrays on the CPU device, where slipstream can read them, once computed."""
        if any(leaf.devices() != {self._host} for leaf in leaves):
            leaves = jax.device_put(leaves, self._host)
        arrays: list[Any] = jax.block_until_ready(leaves)
        return arrays


def adopt(tensor: Any) -> Any:
    """Return an array that shares a tensor's memory.

    Raises:
        RuntimeFault: JAX has copied it, as it does with float64 outside of ``enable_x64``.
    """
    array = jax.dlpack.from_dlpack(tensor, copy=False)
    if array.dtype.itemsize != tensor.element_size():
        raise RuntimeFault(
            f"JAX has made {array.dtype} of {tensor.dtype}: call the engine's mean where 64-bit "
            "types are enabled, as they were when the params were made (jax.enable_x64)"
        )
    return array


def adopter(host: Any) -> Callable[[Any], Any]:
    """Return ``adopt``, or a function that does the same on JAX's CPU in an eighth of the time.

    ``from_dlpack`` also looks up device, stream and dtype, which are known here. The function
    within it is JAX's own, so it is used only if it shares a first tensor in the same way.
    """
    try:
        share = import_module("jax._src.lib")._jax.dlpack_managed_tensor_to_buffer

        def adopt_on_host(tensor: Any) -> Any:
            return share(tensor.__dlpack__(), host, None, False, 1)  # no stream, no copy, a CPU

        first = torch.zeros(16)
        fast, wanted = adopt_on_host(first), adopt(first)
        if fast.unsafe_buffer_pointer() == first.data_ptr() and fast.sharding == wanted.sharding:
            return adopt_on_host
    except Exception as error:  # another version of JAX may raise any error
        logger.info("JAX shares arrays by from_dlpack: %s", error)
    return adopt


def put_back(array: Any, like: Any) -> Any:
    """Return the array on the devices of another one."""
    same = array.sharding == like.sharding
    return array if same else jax.device_put(array, like.sharding)


def names_of(paths: Sequence[Any]) -> list[str]:
    """Return the arrays' names, such as ``Dense_0/kernel``."""
    short = [jax.tree_util.keystr(path, simple=True, separator="/") for path in paths]
    distinct = len(set(short)) == len(short)
    return [name or "params" for name in short] if distinct else list(map(long_name, paths))


def long_name(path: Any) -> str:
    """Return a path as ``['Dense_0']['kernel']``, for when short names are not distinct."""
    return str(jax.tree_util.keystr(path))


def as_array(leaf: Any, name: str) -> Any:
    """Return a leaf of a pytree as JAX's array.

    Raises:
        ConfigError: It is no array, and cannot become one.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        return jnp.asarray(leaf)
    except (TypeError, ValueError) as error:
        raise slipstream.ConfigError(
            f"{name!r} is a {type(leaf).__name__}, and no array: give slipstream.jax what "
            "jax.grad differentiates by, and keep the rest apart"
        ) from error


def check(leaf: Any, name: str) -> None:
    """Check that a leaf can have a gradient, and is in this process.

    Raises:
        ConfigError: It cannot, or is not; the message gives an alternative.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise slipstream.ConfigError(
            "slipstream.jax.engine was called within jax.jit: call it once, before"
        )
    if str(leaf.dtype) not in DTYPES:
        raise slipstream.ConfigError(
            f"{name!r} is {leaf.dtype}, but slipstream averages {', '.join(DTYPES)}: give "
            "slipstream.jax.engine what jax.grad differentiates by, and keep the rest apart"
        )
    if not leaf.is_fully_addressable:
        raise slipstream.ConfigError(
            f"{name!r} is on devices of several processes (jax.distributed): each worker of "
            "slipstream has a copy of its own; leave jax.distributed.initialize out"
        )


def within_jit() -> slipstream.RuntimeFault:
    """Return the error for gradients that are not computed yet."""
    return slipstream.RuntimeFault(
        "engine.mean, or the update of engine.transform(), was called within jax.jit (or scan, "
        "cond, grad): return the gradients from the jitted function, call engine.mean(grads), and "
        "give the result to a second jitted function that updates the params"
    )
