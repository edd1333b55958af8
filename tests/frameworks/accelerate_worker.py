"""Trains tiny GPT-2 and BERT by Accelerate and by a Trainer; several cases in one start.

argv: names of cases, which are the functions at the end. Results are in ``results.<rank>.json``.
"""

from __future__ import annotations

import copy
import functools
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn

import slipstream
from slipstream.integrations.accelerate import use

RANK = int(os.environ.get("RANK", "0"))
LENGTH, WIDTH, WORDS, SAMPLES, BATCH = 4, 48, 64, 24, 2
PUSH_PULL, ALLREDUCE, SERVER = "push_pull()", "allreduce()", 'push_pull(update="server")'
POSEIDON = 'poseidon(rate="10mbit")'  # a slow link, so that factors are cheapest
Weights = dict[str, Tensor]


def model_of(kind: str) -> Any:
    torch.manual_seed(RANK)  # rank 0's weights count
    if kind == "gpt2":
        off: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        gpt2 = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=LENGTH, **off
        )
        return transformers.GPT2LMHeadModel(gpt2).double()
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH}
    layers: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 2}
    bert = transformers.BertConfig(
        vocab_size=WORDS, max_position_embeddings=LENGTH, num_labels=3, **shape, **layers, **off
    )
    return transformers.BertForSequenceClassification(bert).double()


def samples(kind: str) -> list[dict[str, Tensor]]:
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(7))
    labels = words if kind == "gpt2" else words.sum(1) % 3
    return [{"input_ids": w, "labels": y} for w, y in zip(words, labels, strict=True)]


def weights_of(model: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def distance(one: Weights, other: Weights) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


class Loop:
    """One training; without a strategy by the framework's own DDP.

    Args:
        every: micro-batches in a step.
        clip: the bound of the gradient's norm; 0 for none.
        mixed: precision.
        after: called after each step, with its number and the accelerator.
        then: called at the end, with the job and the model.
    """

    def __init__(
        self,
        kind: str,
        strategy: str | None = None,
        *,
        every: int = 1,
        clip: float = 0.0,
        mixed: str = "no",
        after: Callable[..., None] = lambda *_: None,
        then: Callable[..., None] = lambda *_: None,
    ) -> None:
        self.kind, self.strategy, self.mixed = kind, strategy, mixed
        self.every, self.clip = every, clip
        self.after, self.then = after, then

    def by_accelerate(self, resume: str = "", first: int = 0) -> Weights:
        with slipstream.init() as job:
            AcceleratorState._reset_state(reset_partial_state=True)
            GradientState._reset_state()
            accelerator: Any = Accelerator(
                cpu=True, gradient_accumulation_steps=self.every, mixed_precision=self.mixed
            )
            if self.strategy is not None:
                use(accelerator, job, self.strategy)
            model = model_of(self.kind) if self.mixed == "no" else model_of(self.kind).float()
            optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
            scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
            loader: Any = torch.utils.data.DataLoader(samples(self.kind), batch_size=BATCH)
            model, optimizer, loader, scheduler = accelerator.prepare(
                model, optimizer, loader, scheduler
            )
            if resume:
                accelerator.load_state(resume)
            for step, batch in enumerate(accelerator.skip_first_batches(loader, first), first + 1):
                with accelerator.accumulate(model):
                    accelerator.backward(model(**batch).loss)
                    if self.clip and accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), self.clip)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                self.after(step, accelerator)
            self.then(job, model)
            return weights_of(accelerator.unwrap_model(model))

    def by_trainer(self, resume: str = "", **options: Any) -> Weights:
        with slipstream.init() as job:
            model = model_of(self.kind)
            arguments = arguments_of(
                gradient_accumulation_steps=self.every, max_grad_norm=self.clip, **options
            )
            trainer = transformers.Trainer(model, arguments, train_dataset=samples(self.kind))
            trainer.add_callback(AfterStep(self.after))
            if self.strategy is not None:
                use(trainer, job, self.strategy)
            trainer.train(resume_from_checkpoint=resume or None)
            self.then(job, model)
            return weights_of(model)


class AfterStep(transformers.TrainerCallback):
    def __init__(self, after: Callable[..., None]) -> None:
        self._after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._after(state.global_step, None)


def arguments_of(**options: Any) -> transformers.TrainingArguments:
    base: dict[str, Any] = {
        "output_dir": "trainer",
        "use_cpu": True,
        "per_device_train_batch_size": BATCH,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(**(base | options))


# ---- cases

# By loop, model, micro-batches a step and bound of the gradient's norm: the systems compared.
EQUAL = {
    ("accelerate", "gpt2", 1, 0.0): (PUSH_PULL, ALLREDUCE, POSEIDON),
    ("accelerate", "gpt2", 2, 0.05): (PUSH_PULL, ALLREDUCE, POSEIDON),
    ("accelerate", "bert", 2, 0.0): (POSEIDON, SERVER),
    ("trainer", "bert", 1, 0.05): (PUSH_PULL, ALLREDUCE, POSEIDON),
    ("trainer", "bert", 2, 0.0): (PUSH_PULL, ALLREDUCE, POSEIDON),
    ("trainer", "gpt2", 2, 0.05): (POSEIDON, "adam_factors()"),
}


def equal() -> dict[str, float]:
    """Distances between the weights of DDP and of each system."""
    return {
        " ".join(map(str, (*how, strategy))): each
        for how, strategies in EQUAL.items()
        for strategy, each in distances(*how, strategies).items()
    }


def distances(
    loop: str, kind: str, every: int, clip: float, strategies: tuple[str, ...]
) -> dict[str, float]:
    def trained(strategy: str | None) -> Weights:
        run = Loop(kind, strategy, every=every, clip=clip)
        return run.by_accelerate() if loop == "accelerate" else run.by_trainer()

    wanted = trained(None)
    assert distance(wanted, weights_of(model_of(kind))) > 0.01  # it has trained
    return {strategy: distance(trained(strategy), wanted) for strategy in strategies}


def few_equal() -> dict[str, float]:
    return {
        loop: distances(loop, "gpt2", 2, 0.05, (POSEIDON,))[POSEIDON]
        for loop in ("accelerate", "trainer")
    }


def mixed_precision() -> float:
    wanted = Loop("gpt2", mixed="bf16").by_accelerate()
    return distance(Loop("gpt2", PUSH_PULL, mixed="bf16").by_accelerate(), wanted)


def bytes_sent() -> dict[str, list[int]]:
    """Of gradients, with each micro-batch a step, and with two in a step."""

    def sent(by: str, every: int) -> int:
        found: list[int] = []

        def then(job: slipstream.Job, _: nn.Module) -> None:
            found.append(sum(job.stats()["bytes"]["by_scheme"].values()))

        getattr(Loop("gpt2", ALLREDUCE, every=every, then=then), by)()
        return found[0]

    return {by: [sent(by, 1), sent(by, 2)] for by in ("by_accelerate", "by_trainer")}


def inspected() -> list[Any]:
    """The plan, and which of the prepared model and its copies have ``no_sync``."""
    found: list[Any] = []

    def then(job: slipstream.Job, model: nn.Module) -> None:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        every = (model, copy.deepcopy(model), torch.load(file, weights_only=False))
        found.extend([job.plan_table(), [hasattr(each, "no_sync") for each in every]])

    Loop("gpt2", POSEIDON, then=then).by_accelerate()
    return found


def resumed_state() -> dict[str, float]:
    """``save_state`` after the third of six steps, and ``load_state`` in another job."""

    def save(folder: str, step: int, accelerator: Any) -> None:
        if step == 3:
            accelerator.save_state(folder)

    found: dict[str, float] = {}
    for number, strategy in enumerate((POSEIDON, SERVER)):
        folder = f"state.{number}"
        wanted = Loop("gpt2", strategy, after=functools.partial(save, folder)).by_accelerate()
        again = Loop("gpt2", strategy).by_accelerate(resume=folder, first=3)
        found[strategy] = distance(again, wanted)
    return found


def resumed_trainer() -> dict[str, float]:
    found: dict[str, float] = {}
    for number, strategy in enumerate((POSEIDON, SERVER)):
        saving: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3}
        folder = f"trainer.{number}"
        wanted = Loop("bert", strategy).by_trainer(output_dir=folder, **saving)
        again = Loop("bert", strategy).by_trainer(f"{folder}/checkpoint-3", output_dir=folder)
        found[strategy] = distance(again, wanted)
    return found


def trained_twice() -> list[Any]:
    """A Trainer that trains again prepares the same model and optimizer again."""
    with slipstream.init() as job:
        model = model_of("bert")
        trainer = transformers.Trainer(model, arguments_of(), train_dataset=samples("bert"))
        use(trainer, job, POSEIDON)
        trainer.evaluate(samples("bert"))
        trainer.train()
        first = weights_of(model)
        trainer.train()
        sums = job.gather(sum(float(each.sum()) for each in weights_of(model).values()))
        return [job.step, len(set(sums)), distance(weights_of(model), first)]


def two_pairs() -> float:
    """Two models with an optimizer each, and one whose parameters are frozen."""
    return distance(adversaries(PUSH_PULL), adversaries(None))


def adversaries(strategy: str | None) -> Weights:
    with slipstream.init() as job:
        AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = Accelerator(cpu=True)
        if strategy is not None:
            use(accelerator, job, strategy)
        torch.manual_seed(RANK)
        one, two, frozen = (nn.Linear(3, 3).double() for _ in range(3))
        nn.init.eye_(frozen.requires_grad_(False).weight)
        nn.init.zeros_(frozen.bias)
        steps: list[Any] = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (one, two)]
        first, second, *steps = accelerator.prepare(one, two, *steps)
        last = frozen if strategy is None else accelerator.prepare(frozen)  # DDP takes none such
        for number in range(4):
            x = torch.full((2, 3), RANK + number / 7).double()
            for model, step, sign in ((second, steps[1], 1), (first, steps[0], -1)):
                step.zero_grad()
                accelerator.backward(sign * (model(last(x)) + second(first(x))).square().mean())
                step.step()
        return weights_of(one) | {f"two.{n}": each for n, each in weights_of(two).items()}


def refused() -> list[str]:
    """Without ``cpu=True`` Accelerate takes each process of a host without GPU as the only one."""
    told = []
    with slipstream.init() as job:
        AcceleratorState._reset_state(reset_partial_state=True)
        try:
            use(Accelerator(), job)
        except slipstream.ConfigError as error:
            told.append(str(error))
    AcceleratorState._reset_state(reset_partial_state=True)
    return told


def learners() -> str:
    try:
        Loop("bert", "gadei()").by_trainer()
    except slipstream.ConfigError as error:
        return str(error)
    return "trained"


def other_systems() -> dict[str, bool]:
    """Systems that are not synchronous: the loops run to their end."""
    found: dict[str, bool] = {}
    for strategy in ("diloco(every=2)", "bounded_staleness(s=1)"):
        weights = Loop("bert", strategy).by_trainer(average_tokens_across_devices=False)
        found[strategy] = all(bool(each.isfinite().all()) for each in weights.values())
    return found


def fails() -> None:
    """Rank 1 raises while rank 0 may wait in a collective of the Trainer's."""

    def fail(step: int, _: object) -> None:
        if step == 2 and RANK == 1:
            raise ZeroDivisionError("rank 1 has enough")

    Loop("gpt2", POSEIDON, after=fail).by_trainer()


def endless() -> None:
    def mark(step: int, _: object) -> None:
        if step == 2:
            Path(f"trains.{RANK}").touch()

    Loop("gpt2", POSEIDON, after=mark).by_trainer(num_train_epochs=1_000_000)


if __name__ == "__main__":
    results = {name: globals()[name]() for name in sys.argv[1:]}
    Path(f"results.{RANK}.json").write_text(json.dumps(results))
