"""Train a small network, give it half of its FLOPs, train on, cut it: the whole of tgfx in one run.

make demo                          (or, from the repository: python -m examples.demo.demo)
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from examples.demo import data, measure
from examples.demo.model import DigitsNet

SEED = 0
BATCH = 64
BUDGET = 0.5  # share of the FLOPs that may stay
FLOPS_NOTE = "FLOPs = 2 x multiply-adds per sample, in convolutions and fully-connected layers"

PRETRAIN_EPOCHS = 15
JOINT_EPOCHS = 24  # weights and gates
HOLD_EPOCHS = 8  # the gates stay as they are; weights and batch norm settle
WEIGHT_RATE, GATE_RATE = 0.05, 0.4
BUDGET_WEIGHT = 4.0  # the paper's lambda, fixed

Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]
console = Console()


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # layers this small only wait for one another on several cores
    digits = data.load(SEED)

    model = DigitsNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=WEIGHT_RATE, momentum=0.9, weight_decay=5e-4)
    with progress() as bar:
        train("train", model, optimizer, digits, PRETRAIN_EPOCHS, criterion, lambda epoch: None, bar)

    gated = tgfx.transform(model, digits.train[0][:1], gate=tgfx.GateSpec(init="random"))
    optimizer = joint_optimizer(gated)
    with progress() as bar:
        epochs = JOINT_EPOCHS + HOLD_EPOCHS
        train("train with gates", gated, optimizer, digits, epochs, budgeted, anneal(optimizer), bar)

    compact = tgfx.shrink(gated)
    gated.eval()  # prices at exactly 0 or 1; in training they follow the trainable gate, which is 1e-5 off
    print(gated.report())
    console.print(before_and_after(model, gated, compact, digits))
    print(f"{FLOPS_NOTE}.\nMilliseconds: batch of {BATCH}, one thread, taking turns.")


def criterion(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(model(images), labels)


def budgeted(gated: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """The one line that a training loop gains."""
    return criterion(gated, images, labels) + gated.budget_loss(flops=BUDGET, weight=BUDGET_WEIGHT)


def joint_optimizer(gated: tgfx.GatedModule) -> torch.optim.SGD:
    """Gates get a rate of their own and no weight decay, which would pull them all to the edge of closing."""
    gates = [gate.weight for gate in gated.gates.values()]
    known = {id(weight) for weight in gates}
    weights = [parameter for parameter in gated.parameters() if id(parameter) not in known]
    return torch.optim.SGD(
        [
            {"params": weights, "lr": WEIGHT_RATE, "momentum": 0.9, "weight_decay": 5e-4},
            {"params": gates, "lr": GATE_RATE, "momentum": 0.0, "weight_decay": 0.0},
        ]
    )


def anneal(optimizer: torch.optim.SGD) -> Callable[[int], None]:
    """Cosine for both; the gates reach 0 earlier and so stay as they are in the last epochs."""

    def set_rates(epoch: int) -> None:
        weights, gates = optimizer.param_groups
        weights["lr"] = WEIGHT_RATE * cosine(epoch / (JOINT_EPOCHS + HOLD_EPOCHS))
        gates["lr"] = GATE_RATE * cosine(min(1.0, epoch / JOINT_EPOCHS))

    return set_rates


def cosine(done: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * done))


def train(
    title: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    digits: data.Digits,
    epochs: int,
    loss_of: Loss,
    before_epoch: Callable[[int], None],
    bar: Progress,
) -> None:
    """An ordinary training loop: nothing in it is special to gates."""
    task = bar.add_task(title, total=epochs, status="")
    for epoch in range(epochs):
        before_epoch(epoch)
        model.train()
        for images, labels in digits.batches(BATCH):
            optimizer.zero_grad()
            loss = loss_of(model, images, labels)
            loss.backward()
            optimizer.step()
        bar.update(task, advance=1, status=status(model, loss, digits))


def status(model: nn.Module, loss: Tensor, digits: data.Digits) -> str:
    text = f"loss {loss.item():.4f}  accuracy {measure.accuracy(model, *digits.held_out):.1%}"
    if isinstance(model, tgfx.GatedModule):
        text += f"  FLOPs {model.ratio('flops').item():.3f}"
    return text


def progress() -> Progress:
    columns = (
        TextColumn("{task.description:>16}"),
        BarColumn(bar_width=12),
        TextColumn("{task.completed}/{task.total}"),
    )
    return Progress(*columns, TextColumn("{task.fields[status]}"), TimeElapsedColumn(), console=console)


def before_and_after(model: nn.Module, gated: tgfx.GatedModule, compact: nn.Module, digits: data.Digits) -> Table:
    images, labels = digits.held_out
    was, now = measure.alternating_milliseconds([model, compact], images[:BATCH])
    counts = {
        "parameters": (measure.parameters(model), measure.parameters(compact)),
        "FLOPs": (gated.total("flops"), gated.cost("flops").item()),
        "channels": (gated.total("channels"), gated.cost("channels").item()),
    }
    table = Table(title=f"Digits, FLOPs budget {BUDGET:.0%}")
    table.add_column("")
    for header in ("before", "after", "after / before"):
        table.add_column(header, justify="right")
    for name, (a, b) in counts.items():
        table.add_row(name, f"{a:,.0f}", f"{b:,.0f}", f"{b / a:.3f}")
    scores = [measure.accuracy(each, images, labels) for each in (model, compact)]
    table.add_row(f"accuracy on {len(labels)} held out", *(f"{score:.2%}" for score in scores), "")
    table.add_row("ms per batch", f"{was:.2f}", f"{now:.2f}", f"{now / was:.3f}")
    table.add_row("max |gated - compact|", "", f"{measure.largest_difference(gated, compact, images):.1e}", "")
    return table


if __name__ == "__main__":
    main()
