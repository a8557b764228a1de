"""Train a gated model with Hugging Face Accelerate: the loop is Accelerate's own, tgfx adds one term to the loss.

accelerate launch -m examples.accelerate.train          (or python -m examples.accelerate.train --quick)
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import tgfx
from examples.demo import data
from examples.demo.model import DigitsNet


def train(*, width: int, epochs: int, batch: int, flops: float, accumulate: int, precision: str) -> tgfx.Finished:
    accelerator = Accelerator(gradient_accumulation_steps=accumulate, mixed_precision=precision, cpu=True)
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(*data.load(0).train), batch_size=batch, shuffle=True, drop_last=True)
    gated = tgfx.transform(DigitsNet(width), torch.zeros(1, 1, 8, 8)).train()
    optimizer = torch.optim.SGD(tgfx.param_groups(gated, lr=0.05, weight_decay=5e-4), lr=0.05, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(gated, optimizer, loader)
    gated = accelerator.unwrap_model(model)  # the same object as before, out of DDP
    steps = epochs * -(-len(loader) // accumulate)
    for _ in range(epochs):
        for images, labels in loader:
            with accelerator.accumulate(model):
                task = cross_entropy(model(images), labels)
                accelerator.backward(task + gated.budget_loss(flops=flops, steps=steps))
                optimizer.step()
                optimizer.zero_grad()
    accelerator.wait_for_everyone()
    gated = accelerator.unwrap_model(model, keep_fp32_wrapper=False)  # what it computes outside of mixed precision
    return tgfx.finish(gated, flops=flops)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--flops", type=float, default=0.5, help="share of the FLOPs that may stay")
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--quick", action="store_true", help="a small network, one epoch")
    given = parser.parse_args()
    width, epochs = (8, 1) if given.quick else (20, given.epochs)
    result = train(
        width=width,
        epochs=epochs,
        batch=32,
        flops=given.flops,
        accumulate=given.accumulate,
        precision=given.precision,
    )
    print(result)


if __name__ == "__main__":
    main()
