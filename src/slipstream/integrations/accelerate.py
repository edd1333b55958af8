"""Hugging Face: ``use(accelerator, job, "poseidon()")``, or with a ``Trainer`` of transformers.

Accelerate keeps its own part: devices, mixed precision, data loaders, schedulers, checkpoints.
``prepare`` makes the model data-parallel by the job instead of ``DistributedDataParallel``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import nn
from torch.optim import Optimizer

import slipstream
from slipstream.integrations.versions import require_version
from slipstream.torch.tensors.plain_copies import Addition, keep_copies_plain

Pair = tuple[nn.Module, Optimizer]
OLDEST = (1, 1)
PLUGINS = ("deepspeed", "fsdp", "megatron_lm")

try:
    from accelerate import Accelerator, DistributedType
    from accelerate import __version__ as version
except ImportError as error:
    raise ImportError(
        "slipstream.integrations.accelerate needs accelerate: pip install 'slipstream[accelerate]'"
    ) from error


def use(
    target: Any, job: slipstream.Job, strategy: slipstream.Strategy | str | None = None
) -> None:
    """Let ``prepare`` make models data-parallel by this job; call it before ``prepare``.

    Args:
        target: An ``accelerate.Accelerator``, or a ``transformers.Trainer`` before ``train``.
        job: The job of this process.
        strategy: The same as for ``job.distribute``.

    Raises:
        ConfigError: This cannot be trained; the message gives the reason and an alternative.
    """
    require_version("Accelerate", version, OLDEST, user=__name__, extra="accelerate")
    accelerator = target if isinstance(target, Accelerator) else getattr(target, "accelerator", 0)
    if not isinstance(accelerator, Accelerator):
        raise slipstream.ConfigError(
            "use takes an accelerate.Accelerator or a transformers.Trainer; it was given a "
            f"{type(target).__name__}"
        )
    if not isinstance(job, slipstream.Job):
        raise slipstream.ConfigError(
            f"use takes the job of slipstream.init(); it was given {job!r}: call it within `with "
            "slipstream.init() as job:`"
        )
    check_accelerator(accelerator, job)
    if isinstance(strategy, str):
        strategy = slipstream.systems.parse(strategy)
    if not isinstance(strategy, slipstream.Strategy | None):
        raise slipstream.ConfigError(
            f"use takes a strategy, such as slipstream.push_pull(), or its text; it was given "
            f"{strategy!r}"
        )
    if target is not accelerator:
        check_trainer(target)
        target.create_accelerator_and_postprocess = refuse_trials
    Preparation(accelerator, job, strategy)


class Preparation:
    """Replacements of ``prepare`` and ``prepare_model`` of one accelerator."""

    def __init__(
        self, accelerator: Any, job: slipstream.Job, strategy: slipstream.Strategy | None
    ) -> None:
        self._accelerator, self._job, self._strategy = accelerator, job, strategy
        self._prepare, self._prepare_model = accelerator.prepare, accelerator.prepare_model
        self._pairs: list[Pair] = []  # those prepared so far
        accelerator.prepare, accelerator.prepare_model = self.prepare, self.prepare_model

    def prepare(self, *given: Any, device_placement: Sequence[bool | None] | None = None) -> Any:
        """Prepare as ``Accelerator.prepare`` does, and distribute models with their optimizers."""
        places = [None] * len(given) if device_placement is None else device_placement
        placement = {id(each): place for each, place in zip(given, places, strict=True)}
        # A Trainer that trains again prepares the same pair again.
        known = [tuple(map(id, pair)) for pair in self._pairs]
        new = [pair for pair in pairs_in(given) if tuple(map(id, pair)) not in known]
        for model in (each for each in given if isinstance(each, nn.Module)):
            self._require_optimizer(model, new)
        done = self._distribute(new, placement) if new else {}
        rest = [done.get(id(each), each) for each in given]
        return self._prepare(*rest, device_placement=device_placement)

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> Any:
        """Prepare a model that is not trained, as ``Accelerator.prepare_model`` does."""
        if not evaluation_mode:
            self._require_optimizer(model)
        return self._prepare_model(model, device_placement, evaluation_mode=True)  # without DDP

    def _require_optimizer(self, model: nn.Module, new: Sequence[Pair] = ()) -> None:
        """Check that an optimizer of the job trains a model, if the model is trained."""
        trained = any(parameter.requires_grad for parameter in model.parameters())
        if trained and not any(model is each for each, _ in (*self._pairs, *new)):
            raise slipstream.ConfigError(
                f"a {type(model).__name__} was given to accelerator.prepare without its optimizer: "
                "give both in one call; for a model that is not trained, call "
                "accelerator.prepare_model(model, evaluation_mode=True)"
            )

    def _distribute(
        self, pairs: Sequence[Pair], placement: Mapping[int, bool | None]
    ) -> dict[int, Any]:
        """Distribute all pairs at once; return prepared objects by id of the given ones."""
        done: dict[int, Any] = {}
        for model, _ in pairs:
            if id(model) not in done:
                place = placement[id(model)]
                done[id(model)] = self._prepare_model(model, place, evaluation_mode=True)
        placed = [(done[id(model)], optimizer) for model, optimizer in pairs]
        trained: Sequence[Any] = self._job.distribute(placed, self._strategy)
        for given, (model, optimizer) in zip(pairs, trained, strict=True):
            prepared: Any = self._accelerator.prepare_optimizer(optimizer, device_placement=False)
            keep_copies_plain(model)
            model.no_sync = NoSync(self._job)
            model._is_accelerate_prepared = prepared._is_accelerate_prepared = True
            self._pairs.append((model, prepared))
            done |= {id(given[0]): model, id(given[1]): prepared}
        return done


class NoSync(Addition):
    """A replacement of ``DistributedDataParallel.no_sync``, for gradient accumulation."""

    def __init__(self, job: slipstream.Job) -> None:
        self._job = job

    def __call__(self) -> AbstractContextManager[None]:
        return self._job.accumulate()

    def __deepcopy__(self, _memo: object) -> Callable[[], AbstractContextManager[None]]:
        return nullcontext

    def __reduce__(self) -> tuple[Any, ...]:
        return no_sync_of_copies, ()


def no_sync_of_copies() -> Callable[[], AbstractContextManager[None]]:
    """Return a context that does nothing, since copies are not data-parallel."""
    return nullcontext


def pairs_in(given: Sequence[Any]) -> list[Pair]:
    """Return every optimizer with the model whose parameters it holds.

    Raises:
        ConfigError: An optimizer has no such model, or several.
    """
    models = [each for each in given if isinstance(each, nn.Module)]
    pairs: list[Pair] = []
    for optimizer in (each for each in given if isinstance(each, Optimizer)):
        parameters = {id(p) for group in optimizer.param_groups for p in group["params"]}
        owners = [model for model in models if parameters <= {id(p) for p in model.parameters()}]
        if len(owners) != 1:
            raise slipstream.ConfigError(
                f"the parameters of a {type(optimizer).__name__} must all be of one model that is "
                f"given to accelerator.prepare in the same call, and {len(owners)} models of "
                f"{len(models)} have them all: give each optimizer with its model; models with one "
                "optimizer belong into one nn.ModuleDict"
            )
        pairs.append((owners[0], optimizer))
    return pairs


# ---- what cannot be trained


def check_accelerator(accelerator: Any, job: slipstream.Job) -> None:
    """Check that an accelerator leaves data parallelism to a job.

    Raises:
        ConfigError: It does not; the message gives the reason and an alternative.
    """
    if isinstance(getattr(accelerator.prepare, "__self__", None), Preparation):
        raise slipstream.ConfigError(
            "use was called twice for one accelerator: call it once, with one job"
        )
    if accelerator._models or accelerator._optimizers:
        raise slipstream.ConfigError(
            "accelerator.prepare was called before use, and has prepared a model or an optimizer "
            "its own way: call use first"
        )
    state, kind = accelerator.state, accelerator.distributed_type
    plugins = [name for name in PLUGINS if getattr(state, f"{name}_plugin", None) is not None]
    plain = kind == DistributedType.NO or kind.value.startswith("MULTI_")
    if plugins or not plain or getattr(accelerator, "parallelism_config", None) is not None:
        what = plugins[0] if plugins else kind.value if not plain else "a ParallelismConfig"
        raise slipstream.ConfigError(
            f"the accelerator is configured with {what}, which divides or updates the model in its "
            "own way: configure it without, or train without slipstream"
        )
    if accelerator.mixed_precision == "fp8":
        raise slipstream.ConfigError(
            "mixed_precision='fp8' replaces layers in prepare: use 'bf16' or 'no'"
        )
    numbers = accelerator.process_index, accelerator.num_processes
    if numbers != (job.rank, job.world_size):
        raise slipstream.ConfigError(
            f"Accelerate is process {numbers[0]} of {numbers[1]}, the job is rank {job.rank} of "
            f"{job.world_size}: start both with one launcher (slipstream run, torchrun, accelerate "
            "launch), and on hosts without GPU make Accelerator(cpu=True) or "
            "TrainingArguments(use_cpu=True)"
        )


def check_trainer(trainer: Any) -> None:
    """Check that a ``Trainer`` does not train several models, one after the other.

    Raises:
        ConfigError: It would; the message gives the reason and an alternative.
    """
    if trainer.args.auto_find_batch_size:
        raise slipstream.ConfigError(
            "auto_find_batch_size starts the training again with smaller batches, on each rank by "
            "itself: set per_device_train_batch_size instead"
        )


def refuse_trials(*_: Any) -> None:
    """Refuse a trial of a search; trainers call this for each."""
    raise slipstream.ConfigError(
        "hyperparameter_search makes a new Accelerator for each trial, and a job trains one: start "
        "a job for each trial"
    )
