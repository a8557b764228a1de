"""`tgfx demo`: a small network on made-up images, from training to the cut and the page, in well under a minute."""

from __future__ import annotations

import json
import webbrowser
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

from tgfx.cli.options import AsJson
from tgfx.shrinking import shrink
from tgfx.training.fit import fit
from tgfx.transforming import transform
from tgfx.view.visualize import visualize

CLASSES, SIDE, BATCH, BUDGET = 4, 12, 32, 0.4

Output = Annotated[Path, typer.Option("--output", "-o", help="the page")]
Steps = Annotated[int, typer.Option(help="optimizer steps", min=20)]
Live = Annotated[Path | None, typer.Option(help="a folder to be followed with `tgfx view FOLDER` meanwhile")]
Open = Annotated[bool, typer.Option("--open/--no-open", help="show the page in the browser")]


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


def network(width: int = 16) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), Block(width), nn.MaxPool2d(2),
        Block(width), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES),
    )  # fmt: skip


def stripes(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Waves in one of four directions under noise: which direction?"""
    labels = torch.randint(CLASSES, (count,), generator=generator)
    angle = labels * torch.pi / CLASSES
    axis = torch.linspace(-1, 1, SIDE)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    phase = 2 * torch.pi * torch.rand(count, 1, 1, generator=generator)
    along = angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y
    noise = torch.randn(count, SIDE, SIDE, generator=generator)
    return (torch.sin(6 * along + phase) + 0.8 * noise)[:, None], labels


def demo_command(
    output: Output = Path("tgfx-demo.html"), steps: Steps = 400, live: Live = None, open: Open = True,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train a small network to 40% of its FLOPs, cut it, and write the page about it."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    batches = [stripes(BATCH, generator) for _ in range(64)]
    held_out = stripes(512, generator)
    gated = transform(network(), held_out[0][:1])
    progress: Any = False if as_json else Console(stderr=True)
    result = fit(
        gated, batches, F.cross_entropy, budget={"flops": BUDGET}, steps=steps, lr=0.1, live=live, progress=progress,
        val=lambda model: {"accuracy": accuracy(model, held_out)}, val_every=max(1, steps // 8),
    )  # fmt: skip
    gated.eval()
    compact = shrink(gated).eval()
    visualize(gated, output, compact=compact, history=result)
    with torch.no_grad():
        apart = float((gated(held_out[0]) - compact(held_out[0])).abs().max())
    figures = {
        "steps": result.steps,
        "flops": [gated.total("flops"), float(gated.cost("flops"))],
        "params": [gated.total("params"), sum(p.numel() for p in compact.parameters())],
        "accuracy": accuracy(compact, held_out),
        "largest_difference": apart,
        "page": str(output),
    }
    if as_json:
        typer.echo(json.dumps(figures))
    else:
        typer.echo(str(gated.report()))
        typer.echo(
            f"accuracy on {len(held_out[0])} held out: {figures['accuracy']:.1%}; max |gated - compact| {apart:.1e}"
        )
        typer.echo(f"written: {output}")
    if open and not as_json:
        webbrowser.open(output.resolve().as_uri())


@torch.no_grad()
def accuracy(model: nn.Module, data: tuple[Tensor, Tensor]) -> float:
    model.eval()
    return float((model(data[0]).argmax(1) == data[1]).float().mean())
