"""One model of the table: trained (to a budget of channels, or whole), cut, and written as files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import tgfx
from examples.stage import Stage, digest, read_json
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
    gate_lr: float = 1e-2  # by the rule of the paper: Adam as well, and as far to go
    compact_every: int = 50
    seed: int = 0
    bf16: bool = False  # train in bfloat16 (autocast); what is reported is of float32

    def net(self, styles: int) -> StyleNet:
        torch.manual_seed(self.seed)
        return StyleNet(styles, self.width, self.blocks)


@dataclass(frozen=True)
class Model:
    """`share`: of the channels to keep; None trains the whole net. `begins`: the model whose weights it begins with.

    `weight`: the λ of the paper's equation 7, which then takes the place of the library's own rule and ends where it
    ends.
    """

    name: str
    share: float | None
    begins: str | None
    weight: float | None = None

    @property
    def lands(self) -> bool:
        """On its share, to the channel."""
        return self.share is not None and self.weight is None


def train(model: Model, protocol: Protocol, pictures: Pictures, loss: StyleLoss, out: Path, quiet: bool) -> None:
    """Writes model.safetensors, model.onnx and result.json to out/name; goes on where it was stopped."""
    net = protocol.net(len(pictures.styles))
    if model.begins is not None:
        net.load_state_dict(load_file(_weights(out, model.begins)))
    begins = {"weights": digest(net), "pictures": pictures.digest, "features": digest(loss.features)}
    asked = {**_asked(model, protocol), **begins}
    stage = Stage(out / model.name, asked, later=["features"])
    folder = stage.folder
    if stage.begin() is not None:
        return
    example = as_floats(pictures.test[0]).unsqueeze(0), torch.zeros(1, dtype=torch.int64)
    gated = tgfx.transform(net, example, gate=None if model.weight is None else tgfx.GateSpec(init="random"))
    before = evaluate(gated, pictures, loss) if model.begins is None else result_of(out, model.begins)["test"]
    result = tgfx.fit(
        gated,
        Crops(pictures.train, len(pictures.styles), side=protocol.side, batch=protocol.batch, seed=protocol.seed),
        training_step=loss.step,
        budget=None if model.share is None else {"channels": model.share},
        rule="default" if model.weight is None else "paper",
        weight=model.weight,
        steps=asked["steps"],
        optimizer=torch.optim.Adam(_param_groups(gated, protocol, by_adam=model.weight is not None)),
        amp=torch.bfloat16 if protocol.bf16 else None,
        # by the rule of the paper a channel that is closed may come back, so it has to be there
        compact_every=protocol.compact_every if model.lands else None,
        checkpoint=stage.checkpoint,
        checkpoint_every=50,
        log=folder / "log",
        log_every=10,
        progress=not quiet,
        seed=protocol.seed + (model.begins is not None),  # other crops than those of the first training
    )
    stage.trained(result)
    gated.eval()
    compact = tgfx.finish(gated, channels=model.share).model if model.lands else tgfx.shrink(gated)
    compact.eval()
    save_file(compact.state_dict(), folder / "model.safetensors")
    exported = tgfx.export_onnx(compact, folder / "model.onnx", example, measure=False)
    report = {
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
    }
    stage.write(report)


def _asked(model: Model, protocol: Protocol) -> dict[str, Any]:
    same = ["batch", "side", "width", "blocks", "lr", "table_lr", "bf16", "seed"]
    same += ["gate_lr"] if model.weight is not None else []
    same += ["compact_every"] if model.lands else []
    return {
        "model": model.name,
        "budget": model.share,
        "begins": model.begins,
        "lambda": model.weight,
        "steps": protocol.steps if model.begins is None else protocol.more,
        **{name: getattr(protocol, name) for name in same},
    }


def _param_groups(gated: tgfx.GatedModule, protocol: Protocol, *, by_adam: bool) -> list[dict[str, Any]]:
    """by_adam: the gates too, by steps of their own rate; else they take plain steps, as the library has it."""
    weights, *gates = tgfx.param_groups(gated, lr=protocol.lr, gate_lr=protocol.gate_lr)
    if by_adam:
        gates = [{**group, "eps": 1e-8} for group in gates]
    of_styles = {id(p) for name, p in gated.named_parameters() if name.endswith((".scale.weight", ".shift.weight"))}
    tables = [p for p in weights["params"] if id(p) in of_styles]
    others = [p for p in weights["params"] if id(p) not in of_styles]
    return [
        {**weights, "params": others},
        {**weights, "params": tables, "lr": protocol.table_lr, "name": "tables"},
        *gates,
    ]


def result_of(out: Path, name: str) -> dict[str, Any]:
    return read_json(out / name / "result.json")


def _weights(out: Path, name: str) -> Path:
    file = out / name / "model.safetensors"
    if not file.is_file():
        raise SystemExit(f"{file} is missing: run --only {name} with the same --out first")
    return file


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
