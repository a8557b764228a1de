"""Probabilistic and deterministic selection (the paper's Figure 2): which of 20 sine nodes does it take to learn sin?

python -m examples.sine.run --out FOLDER        20 seeds, a figure and a table
python -m examples.sine.run --quick
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tgfx
from examples.mistakes import without_traceback
from examples.options import count, positive
from examples.stage import Stage, write_json

NODES = 20
NOTICEABLE = 0.05  # share of the largest decision weight from which on a node counts as used
ONE_NODE = 2 / (NODES + 1)  # of all channels, the model's own output included


class SineNet(nn.Module):
    """y = sum of c_i sin(w_i x)."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(1, NODES, bias=False), nn.Linear(NODES, 1, bias=False)
        nn.init.normal_(self.inner.weight)
        nn.init.normal_(self.outer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.sin(self.inner(x)))


class SoftmaxNet(SineNet):
    """The same with a weighted mean over the nodes, weights by softmax (as DARTS relaxes a choice)."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(1e-3 * torch.randn(NODES))

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.sin(self.inner(x)) * self.logits.softmax(0))


@dataclass
class Found:
    """One run: decision weights, w and c of every node, mean squared error in eval mode, nodes in use."""

    method: str
    seed: int
    decision: list[float]
    w: list[float]
    c: list[float]
    error: float
    used: int


def softmax(seed: int, steps: int) -> Found:
    torch.manual_seed(seed)
    net = SoftmaxNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    x, y = _samples()
    for _ in range(steps):
        optimizer.zero_grad()
        F.mse_loss(net(x), y).backward()
        optimizer.step()
    return _found("softmax", seed, net, net.logits.detach().softmax(0), F.mse_loss(net(x), y).item())


def gates(seed: int, steps: int, weight: float | None) -> Found:
    """The library's own steps: transform, train with a budget of one node, shrink. `weight`: the paper's lambda."""
    torch.manual_seed(seed)
    x, y = _samples()
    gated = tgfx.transform(SineNet(), x[:2])
    optimizer = torch.optim.Adam(tgfx.param_groups(gated, lr=0.02))
    for _ in range(steps):
        optimizer.zero_grad()
        budget = (
            gated.budget_loss(channels=ONE_NODE, steps=steps)
            if weight is None
            else gated.budget_loss(channels=ONE_NODE, weight=weight)
        )
        (F.mse_loss(gated(x), y) + budget).backward()
        optimizer.step()
    (gate,) = gated.gates.values()
    open_nodes = gate.is_open()
    found = _found("gates", seed, gated, open_nodes.float(), 0.0)
    compact = tgfx.shrink(gated.eval())
    found.error = F.mse_loss(compact(x), y).item()
    assert compact.inner.out_features == found.used
    return found


def _samples() -> tuple[Tensor, Tensor]:
    x = torch.linspace(-math.pi, math.pi, 256).unsqueeze(1)
    return x, x.sin()


def _found(method: str, seed: int, net: nn.Module, decision: Tensor, error: float) -> Found:
    used = int((decision >= NOTICEABLE * decision.max()).sum())
    inner, outer = net.get_submodule("inner"), net.get_submodule("outer")
    w, c = (part.weight.detach().flatten().tolist() for part in (inner, outer))
    return Found(method, seed, decision.tolist(), w, c, error, used)


def both(seed: int, steps: int, weight: float | None, out: Path | None) -> list[Found]:
    """A seed that is done is read back from its file in `out`, so that a run that was stopped goes on."""
    if out is None:
        return [softmax(seed, steps), gates(seed, steps, weight)]
    stage = Stage(out / f"seed-{seed}", {"steps": steps, "weight": weight, "seed": seed})
    done = stage.begin()
    if done is None:
        done = stage.write({"runs": [asdict(one) for one in both(seed, steps, weight, None)]})
    return [Found(**one) for one in done["runs"]]


def figure(one: Found, other: Found, path: Path) -> None:
    """Decision weights of both as bars, with w and c under each, as the paper shows them."""
    rows = [(0, one, "softmax: decision weight of each node"), (1, other, "trainable gates: open or closed")]
    width, height = 44, 120
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{NODES * width + 20}" height="{2 * height + 120}" '
        'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>'
    ]
    for row, found, title in rows:
        top = 20 + row * (height + 55)
        parts.append(f'<text x="10" y="{top - 6}" font-size="12">{title} (seed {found.seed})</text>')
        largest = max(found.decision)
        for node, (share, w, c) in enumerate(zip(found.decision, found.w, found.c, strict=True)):
            tall = height * share / largest
            x, y = 10 + node * width, top + height - tall
            colour = "#2a6fbb" if share >= NOTICEABLE * largest else "#c8d4e3"
            parts.append(f'<rect x="{x}" y="{y:.1f}" width="{width - 8}" height="{tall:.1f}" fill="{colour}"/>')
            parts.append(f'<text x="{x}" y="{top + height + 12}">w {w:.2f}</text>')
            parts.append(f'<text x="{x}" y="{top + height + 24}">c {c:.2f}</text>')
    path.write_text("\n".join([*parts, "</svg>"]))


@without_traceback()
def main(arguments: Sequence[str] | None = None) -> list[Found]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=count, default=20)
    parser.add_argument("--steps", type=count, default=2000)
    parser.add_argument("--weight", type=positive, help="train the gates by the paper's rule with this lambda")
    parser.add_argument("--out", type=Path, help="default: runs/sine; with --quick, nothing is kept unless it is given")
    parser.add_argument("--quick", action="store_true", help="3 seeds, 600 steps")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seeds, options.steps = 3, 600
    elif options.out is None:
        options.out = Path("runs/sine")
    torch.set_num_threads(1)
    began, found = time.time(), []
    for seed in range(options.seeds):
        found += both(seed, options.steps, options.weight, options.out)
        print(seed, *(f"{one.method}: {one.used} used, error {one.error:.1e}" for one in found[-2:]), sep="   ")
    for method in ("softmax", "gates"):
        own = [one for one in found if one.method == method]
        single = sum(one.used == 1 for one in own)
        print(f"{method}: exactly one node in {single} of {len(own)}; {time.time() - began:.0f} s in this call")
    if options.out is not None:
        figure(found[0], found[1], options.out / "sine.svg")
        write_json(options.out / "sine.json", [asdict(one) for one in found])
    return found


if __name__ == "__main__":
    main()
