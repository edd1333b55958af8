"""Trains with Lightning, a ``fit`` for each case of PLAN. Each rank writes what came out."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pl: Any = importlib.import_module(os.environ.get("FRAMEWORK", "lightning.pytorch"))
integration: Any = importlib.import_module("slipstream.integrations.lightning")

warnings.filterwarnings("ignore", ".*does not have many workers.*")
warnings.filterwarnings("ignore", ".*recommended to use.*sync_dist.*")
INPUTS, WIDE, OUTPUTS, SAMPLES, BATCH = 12, 256, 4, 56, 4
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "use_distributed_sampler": True,
    "max_epochs": 2,
}


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, INPUTS, generator=generator)
    y = torch.randn(SAMPLES, OUTPUTS, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=BATCH)


class Plain(pl.LightningModule):  # type: ignore[misc, name-defined]
    """A wide layer, whose gradient may be sent as factors, and a parameter of the module itself."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.case, self.losses = case, list[float]()
        self.wide, self.out = nn.Linear(INPUTS, WIDE), nn.Linear(WIDE, OUTPUTS)
        self.scale = nn.Parameter(torch.ones(OUTPUTS))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(torch.tanh(self.wide(x)))
        return out

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if self.case.get("wait") and self.global_step == 2:
            wait_for_signal(self.global_rank)
        if self.global_rank == self.case.get("raises", -1) and self.global_step == 2:
            raise ValueError("this batch is broken")
        loss = F.mse_loss(self(batch[0]) * self.scale, batch[1])
        self.losses.append(loss.item())
        self.log("loss", loss, sync_dist=True)
        return loss

    def on_train_end(self) -> None:
        if self.global_rank == self.case.get("raises_at_end", -1):
            raise ValueError("this end is broken")

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        if self.global_rank == self.case.get("raises_in_validation", -1):
            raise ValueError("this validation is broken")
        self.log("val", F.mse_loss(self(batch[0]) * self.scale, batch[1]), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        momentum = 0.0 if "rate" in self.case else 0.9
        rate = self.case.get("rate", 0.1)
        optimizer = torch.optim.SGD(self.parameters(), lr=rate, momentum=momentum)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)]


class Gan(pl.LightningModule):  # type: ignore[misc, name-defined]
    """Two optimizers, and steps of its own; one of the passes runs through both networks."""

    def __init__(self, case: dict[str, Any]) -> None:
        super().__init__()
        self.automatic_optimization, self.losses = False, list[float]()
        self.generator = nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, OUTPUTS))
        self.critic = nn.Sequential(nn.Linear(OUTPUTS, 16), nn.Tanh(), nn.Linear(16, 1))

    def training_step(self, batch: list[Tensor], index: int) -> None:
        of_generator, of_critic = self.optimizers()
        noise, real = batch
        self.toggle_optimizer(of_critic)
        of_critic.zero_grad()
        made = self.generator(noise).detach()
        self.manual_backward(
            F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(made)).mean()
        )
        of_critic.step()
        self.untoggle_optimizer(of_critic)
        of_generator.zero_grad()
        loss = F.softplus(-self.critic(self.generator(noise))).mean()
        self.manual_backward(loss)
        of_generator.step()
        self.losses.append(loss.item())

    def configure_optimizers(self) -> Any:
        return (
            torch.optim.Adam(self.generator.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.05),
        )


class Ending(pl.Callback):  # type: ignore[misc, name-defined]
    """Notes how a ``fit`` has failed."""

    def __init__(self) -> None:
        self.trainer, self.error = None, ""

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        self.trainer, self.error = trainer, type(exception).__name__

    def write(self, case: dict[str, Any]) -> None:
        told = {"callback": self.error, "stage": str(self.trainer.state.stage)}
        Path(f"{case['name']}.{self.trainer.global_rank}.failed").write_text(json.dumps(told))


def wait_for_signal(rank: int) -> None:
    Path(f"trains.{rank}").touch()
    signal.sigtimedwait([signal.SIGUSR1], 120)  # which never comes; Ctrl-C does


def strategy_of(text: str) -> Any:
    return text if text.startswith(("ddp", "slipstream")) else integration.SlipstreamStrategy(text)


def trainer_of(case: dict[str, Any], **more: Any) -> Any:
    chosen = {
        "strategy": strategy_of(case["strategy"]),
        "devices": case.get("devices", 2),
        "num_nodes": case.get("nodes", 1),
        "accumulate_grad_batches": case.get("accumulate", 1),
        "gradient_clip_val": case.get("clip"),
        "enable_checkpointing": False,
    }
    return pl.Trainer(**QUIET | chosen | more)


def half(case: dict[str, Any], model: Any) -> str:
    """Half of a training, and its checkpoint: of a callback, if one made after it is the same."""
    saved, afterwards = f"{case['name']}.ckpt", f"{case['name']}-afterwards.ckpt"
    saving = pl.callbacks.ModelCheckpoint(dirpath=".", filename=case["name"])
    trainer = trainer_of(case, max_epochs=1, enable_checkpointing=True, callbacks=[saving])
    trainer.fit(model, loader())
    trainer.save_checkpoint(afterwards)
    if not trainer.is_global_zero:
        return saved
    first, second = (torch.load(file, weights_only=False) for file in (saved, afterwards))
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(first[part], second[part], rtol=0, atol=0)
    assert "momentum_buffer" in first["optimizer_states"][0]["state"][0]
    return saved


def train(case: dict[str, Any], ending: Ending) -> tuple[Any, Any]:
    torch.manual_seed(7 + int(os.environ.get("LOCAL_RANK", "0")))  # rank 0's weights count
    model = (Gan if case.get("gan") else Plain)(case)
    validation = loader() if case.get("validates") else None
    trainer = trainer_of(case, callbacks=[ending])
    if case.get("resumes"):
        saved = half(case, model)
        model = Plain(case)
        trainer.fit(model, loader(), ckpt_path=saved)
    else:
        trainer.fit(model, loader(), validation)
    return model, trainer


def run(case: dict[str, Any]) -> None:
    began, ending = time.monotonic(), Ending()
    try:
        model, trainer = train(case, ending)
    except Exception:
        time.sleep(case.get("ending_s", 0))  # a script may have much to do then
        ending.write(case)
        raise
    told = {
        "rank": trainer.global_rank,
        "size": trainer.world_size,
        "losses": model.losses,
        "seconds": time.monotonic() - began,
    }
    if case.get("tests"):
        told["tested"] = trainer.test(model, loader(), verbose=False)[0]["val"]
    summary = getattr(trainer.strategy, "summary", None)
    told["bytes"] = (summary or {}).get("bytes", {}).get("by_scheme", {})
    rank = trainer.global_rank
    torch.save(model.state_dict(), f"{case['name']}.{rank}.pt")
    Path(f"{case['name']}.{rank}.json").write_text(json.dumps(told))
    if rank == case.get("exits_after", -1):
        sys.exit(1)


if __name__ == "__main__":
    if os.environ.get("LOCAL_RANK") == os.environ.get("DIES_EARLY", "none"):
        sys.exit("this rank never begins")
    for case in json.loads(sys.argv[1]):
        run(case)
