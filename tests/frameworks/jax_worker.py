"""Trains a flax model with optax by slipstream, in several ways: CASE [STRATEGY PORT ...].

``checks`` makes everything in one job, and writes what it found; ``systems`` makes a job for each
strategy, all in this process; ``raises`` has an error on rank 1; ``forever`` is to be interrupted.

Most of the time is that of JAX's compiler, so one rank computes what all are compared with, and
single operations are numpy's.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import slipstream

jax.config.update("jax_enable_x64", True)

STEPS, BATCH = 6, 12
Batch = tuple[Any, Any]


class Net(nn.Module):
    """A convolution, whose kernel has four dimensions, and dense layers; in fp64 by default."""

    dtype: Any = jnp.float64

    @nn.compact
    def __call__(self, x: Any) -> Any:
        kept: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.dtype}
        x = nn.relu(nn.Conv(8, (3, 3), **kept)(x))
        x = x.reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(48, **kept)(x))
        scale = self.param("scale", nn.initializers.ones, (), self.dtype)
        return scale * nn.Dense(1, **kept)(x)[:, 0]


def batches(rank: int = 0, workers: int = 1) -> Iterator[Batch]:
    """A rank's part of every batch."""
    random = np.random.default_rng(5)
    for _ in range(STEPS):
        x, y = random.normal(size=(BATCH, 6, 6, 2)), random.normal(size=BATCH)
        yield x[rank::workers], y[rank::workers]


def gradient_of(net: Net) -> Callable[..., Any]:
    def loss(params: Any, x: Any, y: Any) -> Any:
        return jnp.mean((net.apply(params, x.astype(net.dtype)) - y.astype(net.dtype)) ** 2)

    return jax.jit(jax.grad(loss))


gradient = gradient_of(Net())
added = jax.jit(optax.apply_updates)


def initial(seed: int, net: Net) -> Any:
    return jax.jit(net.init)(jax.random.key(seed), jnp.zeros((1, 6, 6, 2), net.dtype))


def train(
    params: Any, tx: Any, gradient: Any, data: Iterator[Batch], mean: Any = lambda grads: grads
) -> Any:
    """``mean`` stands between two jitted functions."""
    state = tx.init(params)

    @jax.jit
    def apply(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for x, y in data:
        params, state = apply(params, state, mean(gradient(params, x, y)))
    return params


def train_transformed(params: Any, tx: Any, gradient: Any, data: Iterator[Batch]) -> Any:
    state = tx.init(params)
    for x, y in data:
        updates, state = tx.update(gradient(params, x, y), state, params)
        params = added(params, updates)
    return params


def in_parts(params: Any, x: Any, y: Any) -> Any:
    """The mean gradient of a batch, added up over two parts of it."""
    first, second = (gradient(params, x[i::2], y[i::2]) for i in range(2))
    return jax.tree.map(lambda a, b: (np.asarray(a) + np.asarray(b)) / 2, first, second)


def distance(one: Any, two: Any) -> float:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True)
    return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)


def digest(params: Any) -> str:
    return hashlib.sha256(
        b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params))
    ).hexdigest()


def adam() -> Any:
    return optax.adam(1e-2)


def clipped() -> Any:
    return optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(1e-2))


def message(call: Callable[[], Any]) -> str:
    try:
        call()
    except slipstream.SlipstreamError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def alone(job: slipstream.Job, tx: Any) -> Any:
    """What one process makes of whole batches; the other ranks do not compute it."""
    return train(initial(0, Net()), tx, gradient, batches()) if job.rank == 0 else None


def equalities(job: slipstream.Job, engine: Any) -> dict[str, Any]:
    """Distances from what one process makes of whole batches; and whether all ranks are equal."""

    def own() -> Iterator[Batch]:
        return batches(job.rank, job.world_size)

    start = engine.params
    ends = {
        "start": start,
        "mean": train(start, adam(), gradient, own(), engine.mean),
        "accumulated": train(start, adam(), in_parts, own(), engine.mean),
        "resumed": resumed(engine, own()),
        "clipped": train(start, clipped(), gradient, own(), engine.mean),
        "transform": train_transformed(
            start, optax.chain(engine.transform(), clipped()), in_parts, own()
        ),
    }
    trained, held_in = alone(job, adam()), alone(job, clipped())
    wanted = dict.fromkeys(ends, trained) | {"clipped": held_in, "transform": held_in}
    wanted["start"] = initial(0, Net())
    digests = job.gather({name: digest(end) for name, end in ends.items()})
    return {
        "equal": all(each == digests[0] for each in digests),
        "distances": {n: distance(ends[n], wanted[n]) for n in ends} if job.rank == 0 else {},
        "moved": distance(trained, start) if job.rank == 0 else 1.0,
    }


def resumed(engine: Any, data: Iterator[Batch]) -> Any:
    """Stops halfway, saves by numpy, and goes on from the file."""
    tx = adam()
    update = jax.jit(tx.update)
    params, state = engine.params, tx.init(engine.params)
    for step, (x, y) in enumerate(data):
        if step == STEPS // 2:
            leaves, tree = jax.tree.flatten((params, state))
            file = f"saved.{os.environ['RANK']}.npz"
            np.savez(file, *leaves)
            with np.load(file) as saved:
                params, state = tree.unflatten([jnp.asarray(saved[name]) for name in saved.files])
        updates, state = update(engine.mean(gradient(params, x, y)), state, params)
        params = added(params, updates)
    return params


def memory(job: slipstream.Job, engine: Any) -> dict[str, Any]:
    """Whether arrays share memory, and nobody's is written again."""
    given = jax.tree.map(lambda leaf: np.full(leaf.shape, float(job.rank)), engine.params)
    held = [engine.mean(jax.tree.map(lambda leaf, n=n: leaf + n, given)) for n in range(4)]
    wanted = (job.world_size - 1) / 2
    kept = all(is_all(mean, wanted + n) for n, mean in enumerate(held))
    doubled = jax.jit(lambda tree: jax.tree.map(lambda leaf: 2 * leaf, tree), donate_argnums=0)
    donated = doubled(engine.mean(given))
    del held
    places = set()
    for _ in range(6):  # nothing is held: memory is used again
        places.add(jax.tree.leaves(engine.mean(given))[-1].unsafe_buffer_pointer())
    return {
        "kept": kept,
        "unchanged": is_all(given, job.rank),
        "donated": is_all(donated, 2 * wanted),
        "places": len(places),
    }


def is_all(tree: Any, value: float) -> bool:
    return all(bool((np.asarray(leaf) == value).all()) for leaf in jax.tree.leaves(tree))


def mistakes(job: slipstream.Job, engine: Any) -> dict[str, str]:
    """Every rank makes them, and the job goes on."""
    grads = jax.tree.map(lambda leaf: np.zeros(leaf.shape), engine.params)
    flat = grads["params"]
    other = {**flat, "scale": np.zeros(2)}
    single = {**flat, "scale": np.zeros((), np.float32)}
    return {
        "lacks": message(
            lambda: engine.mean({"params": {k: v for k, v in flat.items() if k != "scale"}})
        ),
        "adds": message(lambda: engine.mean({"params": {**flat, "more": np.zeros(2)}})),
        "container": message(
            lambda: engine.mean({"params": {**flat, "Conv_0": list(flat["Conv_0"].values())}})
        ),
        "shape": message(lambda: engine.mean({"params": other})),
        "dtype": message(lambda: engine.mean({"params": single})),
        "no array": message(lambda: engine.mean({"params": {**flat, "scale": "text"}})),
        "jit": message(lambda: jax.jit(engine.mean)(grads)),
        "jit, transform": message(
            lambda: jax.jit(engine.transform().update)(grads, optax.EmptyState())
        ),
        "save": message(lambda: job.save("weights")),
        "load": message(lambda: job.load("weights")),
        "consensus": message(job.consensus),
        "second": message(lambda: slipstream.jax.engine(job, grads)),
    }


FORMATS = {
    "half": np.zeros(2, jnp.bfloat16),
    "complex": np.zeros((2, 1, 1), np.complex64),
    "empty": np.zeros((0, 3), np.float16),
}


def shares(job: slipstream.Job) -> Any:
    """Of each rank, such that their mean adds up to 1."""
    share = {0: 0.0, job.world_size - 1: job.world_size / 2}.get(job.rank, 0.0)
    return {name: np.full_like(array, share) for name, array in FORMATS.items()}


def checks() -> None:
    with slipstream.init() as job:
        engine = slipstream.jax.engine(job, initial(job.rank, Net()))
        second = slipstream.jax.engine(job, FORMATS)
        found: dict[str, Any] = {"memory": memory(job, engine)}
        found["second"] = {
            name: [str(mean.dtype), float(np.asarray(mean).sum().real)]
            for name, mean in second.mean(shares(job)).items()
        }
        found |= equalities(job, engine)
        begun = job.step
        found["mistakes"] = mistakes(job, engine)
        found["steps of mistakes"] = job.step - begun
        away = jax.devices()[1]
        ones = jax.tree.map(lambda leaf: np.ones(leaf.shape), engine.params)
        back = engine.mean(jax.device_put(ones, away))
        here = all(leaf.devices() == {away} for leaf in jax.tree.leaves(back))
        found["away"] = here and is_all(back, 1.0)
        found["plan"] = job.plan_table()
        Path(f"found.{job.rank}.json").write_text(json.dumps(found))


def systems() -> None:
    """Each in a job of its own."""
    net, rank = Net(jnp.float32), os.environ["RANK"]  # which all codecs take
    by_loss, step = (
        gradient_of(net),
        jax.jit(lambda p, g: jax.tree.map(lambda a, b: a - b / 64, p, g)),
    )
    first, own = initial(0, net), initial(int(rank), net)

    def trained(params: Any, mean: Any, data: Iterator[Batch]) -> Any:
        for x, y in data:
            params = step(params, mean(by_loss(params, x, y)))
        return params

    alone = trained(first, lambda grads: grads, batches()) if rank == "0" else first
    found: dict[str, Any] = {"moved": distance(alone, first)}
    for strategy, port in json.loads(sys.argv[2]):
        os.environ["MASTER_PORT"] = str(port)
        with slipstream.init() as job:
            engine = slipstream.jax.engine(job, own, strategy)
            params = trained(engine.params, engine.mean, batches(job.rank, job.world_size))
            schemes = sorted({job.plan.routes[route].scheme for route in job.plan.route_of})
        found[strategy] = {"params": digest(params), "schemes": schemes}
        found[strategy]["distance"] = distance(params, alone)
    Path(f"systems.{rank}.json").write_text(json.dumps(found))


def forever(raises: bool) -> None:
    with slipstream.init() as job:
        engine = slipstream.jax.engine(job, initial(job.rank, Net()))
        x, y = next(batches())
        while True:
            engine.mean(gradient(engine.params, x, y))
            Path(f"trains.{job.rank}").touch()
            if raises and job.rank == 1 and job.step == 3:
                raise ValueError("the loss of rank 1 is gone")


if __name__ == "__main__":
    case = sys.argv[1]
    if case == "checks":
        checks()
    elif case == "systems":
        systems()
    else:
        forever(case == "raises")
