"""Train a small network, give it half of its FLOPs, train on, cut it, export it, show it: the whole of tgfx in one run.

make demo                          (or, from the repository: python -m examples.demo.demo)
"""

from __future__ import annotations

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.nn import functional as F

import tgfx
from examples.demo import data, measure, onnx_step
from examples.demo.model import DigitsNet

SEED = 0
BATCH = 64
BUDGET = 0.5  # share of the FLOPs that may stay
FLOPS_NOTE = "FLOPs = 2 x multiply-adds per sample, in convolutions and fully-connected layers"

PRETRAIN_EPOCHS, GATED_EPOCHS = 15, 32
RATE = 0.05

FOLDER = Path("build")

console = Console()


def main() -> None:
    torch.manual_seed(SEED)
    torch.set_num_threads(1)  # layers this small only wait for one another on several cores
    digits = data.load(SEED)

    model = DigitsNet()
    pretrain(model, digits)

    gated = tgfx.transform(model, digits.train[0][:1])
    result = tgfx.fit(
        gated,
        digits.loader(BATCH),
        F.cross_entropy,
        budget={"flops": BUDGET},
        epochs=GATED_EPOCHS,
        lr=RATE,
        val=lambda own: {"accuracy": measure.accuracy(own, *digits.held_out)},
        progress=console,
    )
    print(result)

    compact = tgfx.shrink(gated)
    gated.eval()  # prices at exactly 0 or 1; in training they follow the trainable gate, which is 1e-5 off
    print(gated.report())
    console.print(before_and_after(model, gated, compact, digits))
    print(f"{FLOPS_NOTE}.\nMilliseconds: batch of {BATCH}, one thread, taking turns.\n")

    page = FOLDER / "demo.html"
    FOLDER.mkdir(exist_ok=True)
    tgfx.visualize(gated, page, compact=compact, history=result, budget={"flops": BUDGET})
    reports = onnx_step.export_both(gated, BUDGET, digits.held_out[0][:BATCH], FOLDER)
    console.print(onnx_step.side_by_side(reports, digits.held_out))
    print(f"Files are in {FOLDER}/; parity at {', '.join(reports[0].checked)}. Odd channel counts can be slow;")
    print(f"the second file has multiples of {onnx_step.MULTIPLE} within the same budget. x: against the original,")
    print("which took turns with each file.\n")
    print(reports[1])
    print(f"What is tied to what, what the gates learned and what it costs: open {page} in a browser.")


def pretrain(model: nn.Module, digits: data.Digits) -> None:
    """An ordinary training loop, to have a trained network to begin with."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, PRETRAIN_EPOCHS)
    with progress() as bar:
        task = bar.add_task("pretrain", total=PRETRAIN_EPOCHS, status="")
        for _ in range(PRETRAIN_EPOCHS):
            for images, labels in digits.loader(BATCH):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
            rates.step()
            score = measure.accuracy(model, *digits.held_out)
            bar.update(task, advance=1, status=f"loss {loss.item():.4f}  accuracy {score:.1%}")


def progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
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
