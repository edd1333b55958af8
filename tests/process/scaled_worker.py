"""Mixed precision as torch's examples do it, with a GradScaler: STRATEGY [OPTIMIZER]."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn

import slipstream

STRATEGY, KIND = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "SGD"
BROKEN = 3  # the step whose gradient is infinite

torch.manual_seed(0)
with slipstream.init(wait_limit_s=120) as job:
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    optimizer = getattr(torch.optim, KIND)(model.parameters(), lr=0.1)
    net, optimizer = job.distribute(model, optimizer, STRATEGY)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for step in range(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = net(torch.full((2, 6), 0.1 * (step + 1))).square().mean()
        scaler.scale(loss * (float("inf") if step == BROKEN else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        job.wait()
        scales.append(scaler.get_scale())
    weights = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    told = {"scales": scales, "weights": weights, "steps": job.step}
Path(f"told.{os.environ.get('RANK', 0)}.json").write_text(json.dumps(told))
