"""The smallest complete script: two lines make the loop data-parallel.

python examples/train.py                                            one process
torchrun --nproc-per-node 4 examples/train.py
slipstream run --workers 4 --strategy push_pull examples/train.py
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import slipstream

data = load_digits()
x, y = torch.from_numpy(data.data).float() / 16, torch.from_numpy(data.target)

with slipstream.init() as job:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer = job.distribute(model, optimizer)

    for _ in range(20):
        for batch in torch.randperm(1500).split(60):
            mine = batch[job.rank :: job.world_size]
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[mine]), y[mine]).backward()
            optimizer.step()

    if job.rank == 0:
        model.eval()
        with torch.no_grad():
            correct = model(x[1500:]).argmax(dim=1) == y[1500:]
        print(f"accuracy {correct.float().mean():.1%}")
