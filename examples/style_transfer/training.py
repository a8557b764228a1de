"""One model of the table: trained (to a budget of channels, or whole), cut, and written as files."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tgfx
from examples.finished import check_finished
from examples.style_transfer.data import Crops, Pictures, as_floats
from examples.style_transfer.losses import StyleLoss
from examples.style_transfer.model import StyleNet

EVALUATED = 10  # images at once


@dataclass(frozen=True)
class Protocol:
    """All that a run depends on, apart from pictures and features."""

    steps: int  # of the first training
    more: int  # of each training that goes on from there
    side: int  # of a crop
    batch: int
    width: int = 32
    blocks: int = 5
    lr: float = 2e-3
    table_lr: float = 1e-2  # of the scales and shifts of a style: Adam moves by the rate, and they have far to go
    compact_every: int = 50
    seed: int = 0
    bf16: bool = False  # train in bfloat16 (autocast); what is reported is of float32

    def net(self, styles: int) -> StyleNet:
        torch.manual_seed(self.seed)
        return StyleNet(styles, self.width, self.blocks)


@dataclass(frozen=True)
class Model:
    """`share`: of the channels to keep; None trains the whole net. `begins`: the model whose weights it begins with."""

    name: str
    share: float | None
    begins: str | None


def train(model: Model, protocol: Protocol, pictures: Pictures, loss: StyleLoss, out: Path, quiet: bool) -> None:
    """Writes model.safetensors, model.onnx and result.json to out/name; goes on where it was stopped."""
    folder = out / model.name
    if (folder / "result.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    began = time.time()
    net = protocol.net(len(pictures.styles))
    if model.begins is not None:
        net.load_state_dict(load_file(out / model.begins / "model.safetensors"))
    example = as_floats(pictures.test[0]).unsqueeze(0), torch.zeros(1, dtype=torch.int64)
    gated = tgfx.transform(net, example)
    steps = protocol.steps if model.begins is None else protocol.more
    before = evaluate(gated, pictures, loss) if model.begins is None else result_of(out, model.begins)["test"]
    result = tgfx.fit(
        gated,
        Crops(pictures.train, len(pictures.styles), side=protocol.side, batch=protocol.batch, seed=protocol.seed),
        training_step=loss.step,
        budget=None if model.share is None else {"channels": model.share},
        steps=steps,
        optimizer=torch.optim.Adam(_param_groups(gated, protocol)),
        amp=torch.bfloat16 if protocol.bf16 else None,
        compact_every=None if model.share is None else protocol.compact_every,
        checkpoint=folder / "checkpoint.pt",
        checkpoint_every=50,
        log=folder / "log",
        log_every=10,
        progress=not quiet,
        seed=protocol.seed + (model.begins is not None),  # other crops than those of the first training
    )
    check_finished(result)
    gated.eval()
    compact = tgfx.shrink(gated) if model.share is None else tgfx.finish(gated, channels=model.share).model
    compact.eval()
    save_file(compact.state_dict(), folder / "model.safetensors")
    exported = tgfx.export_onnx(compact, folder / "model.onnx", example, measure=False)
    report = {
        "model": model.name,
        "budget": model.share,
        "begins": model.begins,
        "steps": result.steps,
        "batch": protocol.batch,
        "side": protocol.side,
        "lr": protocol.lr,
        "bf16": protocol.bf16,
        "seed": protocol.seed,
        "channels": gated.ratio("channels").item(),
        "flops": gated.cost("flops").item(),
        "params": gated.cost("params").item(),
        "onnx bytes": (folder / "model.onnx").stat().st_size,
        "safetensors bytes": (folder / "model.safetensors").stat().st_size,
        "gated - compact": _difference(gated, compact, pictures),
        "torch - onnx": max(exported.max_delta.values()),
        "before": before,
        "test": evaluate(compact, pictures, loss),
        "gates": gates_of(gated),
        "seconds": round(result.seconds),
        "wall": round(time.time() - began),
    }
    (folder / "result.json").write_text(json.dumps(report, indent=1))


def _param_groups(gated: tgfx.GatedModule, protocol: Protocol) -> list[dict[str, Any]]:
    weights, *gates = tgfx.param_groups(gated, lr=protocol.lr)
    of_styles = {id(p) for name, p in gated.named_parameters() if name.endswith((".scale.weight", ".shift.weight"))}
    tables = [p for p in weights["params"] if id(p) in of_styles]
    others = [p for p in weights["params"] if id(p) not in of_styles]
    return [
        {**weights, "params": others},
        {**weights, "params": tables, "lr": protocol.table_lr, "name": "tables"},
        *gates,
    ]


def result_of(out: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / name / "result.json").read_text())
    return found


@torch.no_grad()
def evaluate(model: nn.Module, pictures: Pictures, loss: StyleLoss) -> dict[str, float]:
    """The loss on the test photographs, each in one of the styles, and its parts."""
    was = model.training
    model.eval()
    sums: dict[str, float] = {"loss": 0.0, "content": 0.0, "style": 0.0}
    count = len(pictures.test)
    for start in range(0, count, EVALUATED):
        images = as_floats(torch.stack(pictures.test[start : start + EVALUATED]))
        style = torch.arange(start, start + len(images)) % len(pictures.styles)
        parts = loss.parts(model(images, style), images, style)
        for name, value in (("loss", parts.total), ("content", parts.content), ("style", parts.style)):
            sums[name] += value.item() * len(images) / count
    model.train(was)
    return sums


def gates_of(gated: tgfx.GatedModule) -> list[dict[str, Any]]:
    """Open channels per gate, with the convolutions whose outputs it is for."""
    found = []
    for group in gated.groups:
        if group.frozen:
            continue
        outputs = [m.name.removesuffix(".conv.weight") for m in group.members if _is_output(m)]
        found.append({"layers": outputs, "open": gated.gates[group.name].open_count(), "size": group.size})
    return found


def _is_output(member: Any) -> bool:
    return bool(member.name.endswith(".conv.weight") and member.axis == 0)


@torch.no_grad()
def _difference(gated: nn.Module, compact: nn.Module, pictures: Pictures) -> float:
    images = as_floats(torch.stack(pictures.test[:2]))
    style: Tensor = torch.arange(2) % len(pictures.styles)
    return float((gated(images, style) - compact(images, style)).abs().max())
