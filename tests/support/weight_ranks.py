"""Run by torchrun: gates over single weights in DDP, whose gradients are averaged before they are looked at."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import tgfx
from examples.distributed.ranks import process_group
from tests.support.group_threads import assert_no_threads_of_the_group

STEPS = 20


def main() -> None:
    torch.set_num_threads(1)
    with process_group():
        trains_alike()
    assert_no_threads_of_the_group()


def trains_alike() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    gated = tgfx.transform(net, torch.zeros(1, 8), granularity="weight").train()
    model, optimizer = DistributedDataParallel(gated), torch.optim.SGD(tgfx.param_groups(gated, lr=0.1))
    torch.manual_seed(distributed.get_rank())  # other data on every rank
    for step in range(STEPS):
        x = torch.randn(8, 8)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        (loss + gated.budget_loss(params=0.4, steps=STEPS)).backward()
        optimizer.step()
        flat = torch.cat([p.detach().flatten() for p in gated.parameters()])
        others = [torch.empty_like(flat) for _ in range(distributed.get_world_size())]
        distributed.all_gather(others, flat)
        assert all(torch.equal(flat, other) for other in others), f"step {step}: ranks differ"
    assert all(own.seen and bool(own.row.any()) for own in gated.controller.evidence.values())
    ratio = float(gated.eval().ratio("params"))
    assert 0.39 < ratio <= 0.4, ratio


if __name__ == "__main__":
    main()
