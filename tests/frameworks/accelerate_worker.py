"""Trains tiny GPT-2 and BERT by Accelerate and by a Trainer, several cases in one start.

argv: the names of the cases, see CASES; results are in ``results.<rank>.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
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
LENGTH, WORDS, SAMPLES = 8, 64, 48
Weights = dict[str, Tensor]


def model_of(kind: str) -> Any:
    torch.manual_seed(RANK)  # rank 0's count
    sizes = {"vocab_size": WORDS}
    if kind == "gpt2":
        off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = transformers.GPT2Config(
            n_embd=32, n_layer=2, n_head=2, n_positions=LENGTH, **sizes, **off
        )
        return transformers.GPT2LMHeadModel(config).double()
    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.BertConfig(
        intermediate_size=64, max_position_embeddings=LENGTH, num_labels=3, **shape, **sizes, **off
    )
    return transformers.BertForSequenceClassification(config).double()


def samples(kind: str) -> list[dict[str, Tensor]]:
    numbers = torch.Generator().manual_seed(7)
    words = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=numbers)
    labels = words if kind == "gpt2" else words.sum(1) % 3
    return [{"input_ids": w, "labels": y} for w, y in zip(words, labels, strict=True)]


def weights_of(model: nn.Module) -> Weights:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def accelerator_of(**options: Any) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


def by_accelerate(
    kind: str, strategy: str, *, every: int = 1, clip: float = 0.0, note: Callable[..., None]
) -> Weights:
    with slipstream.init() as job:
        model = model_of(kind)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.9**n)
        loader: Any = torch.utils.data.DataLoader(samples(kind), batch_size=4)
        accelerator = accelerator_of(gradient_accumulation_steps=every)
        if strategy != "ddp":
            use(accelerator, job, strategy)
        prepared = accelerator.prepare(model, optimizer, loader, scheduler)
        model, optimizer, loader, scheduler = prepared
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch).loss)
                if clip and accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), clip)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if strategy != "ddp":
            note(job, model)
        return weights_of(accelerator.unwrap_model(model))


def arguments_of(**options: Any) -> transformers.TrainingArguments:
    base: dict[str, Any] = {
        "output_dir": "trainer",
        "use_cpu": True,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 1,
        "learning_rate": 0.01,
        "max_grad_norm": 0.0,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    return transformers.TrainingArguments(**(base | options))


def by_trainer(
    kind: str, strategy: str, *, every: int = 1, clip: float = 0.0, note: Callable[..., None]
) -> Weights:
    with slipstream.init() as job:
        model = model_of(kind)
        arguments = arguments_of(gradient_accumulation_steps=every, max_grad_norm=clip)
        trainer = transformers.Trainer(model, arguments, train_dataset=samples(kind))
        if strategy != "ddp":
            use(trainer, job, strategy)
        trainer.train()
        if strategy != "ddp":
            note(job, model)
        return weights_of(model)

if __name__ == "__main__":
    out = {}
    for kind in ("gpt2", "bert"):
        for name, loop in (("accelerate", by_accelerate), ("trainer", by_trainer)):
            for every, clip in ((1, 0.0), (2, 0.0), (1, 0.05), (2, 0.05)):
                ref = None
                for strategy in ("ddp", "push_pull()", "allreduce()", "poseidon()", 'push_pull(update="server")'):
                    t = time.time()
                    def note(job, model):
                        if RANK == 0 and strategy == "poseidon()" and every == 1:
                            print(job.plan_table(), file=sys.stderr)
                    w = loop(kind, strategy, every=every, clip=clip, note=note)
                    ref = ref or w
                    diff = max((w[n] - ref[n]).abs().max().item() for n in ref)
                    if RANK == 0:
                        print(kind, name, every, clip, strategy, diff, round(time.time() - t, 2), flush=True)
