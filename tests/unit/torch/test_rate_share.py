"""The learning rate relative to the highest so far, by which bounds of filters decay."""

import torch

from slipstream.torch.tensors.rate_share import RateShare


def test_rate_share_is_of_the_highest_rate_so_far() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    share = RateShare(optimizer)
    shares = []
    for rate in (0.5, 0.25, 1.0, 0.5):
        optimizer.param_groups[0]["lr"] = rate
        shares.append(share())
    assert shares == [1.0, 0.5, 1.0, 0.5]


def test_rate_share_of_a_warmup_is_of_the_rate_that_it_reaches() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
    torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    assert RateShare(optimizer)() == 0.25
