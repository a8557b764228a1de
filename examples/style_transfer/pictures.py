"""The two figures: stylised photographs side by side, and how many channels every layer kept."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from examples.style_transfer.data import Pictures, as_floats
from examples.style_transfer.measure import open_file, stylise

TILE, GAP, LABEL = 150, 4, 14
OWN, SHARED, WHOLE = "#2a6fbb", "#c8702a", "#e4e8ee"


def side_by_side(
    files: dict[str, Path], pictures: Pictures, shown: list[int], path: Path, *, photographs: bool
) -> None:
    """The paintings on top; below, for each photograph, a row of stylised images per model. All from ONNX Runtime.

    photographs: put them into the first column, if they may be passed on.
    """
    from PIL import Image, ImageDraw

    step = TILE + GAP
    rows = 1 + len(shown) * len(files)
    sheet = Image.new("RGB", (step * (1 + len(pictures.styles)), (step + LABEL) * rows), "white")
    draw = ImageDraw.Draw(sheet)

    def put(row: int, column: int, picture: Tensor, text: str = "") -> None:
        x, y = column * step, row * (step + LABEL)
        draw.text((x, y), text, fill="black")
        sheet.paste(Image.fromarray(_tile(picture)), (x, y + LABEL))

    for column, (style, name) in enumerate(zip(pictures.styles, pictures.names, strict=True)):
        put(0, column + 1, as_floats(style), name)
    for place, photograph in enumerate(shown):
        image = as_floats(pictures.test[photograph])
        for row, (name, file) in enumerate(files.items(), start=1 + place * len(files)):
            session = open_file(file)
            put(row, 0, image if photographs else torch.ones_like(image), name)
            for column in range(len(pictures.styles)):
                put(row, column + 1, stylise(session, image.unsqueeze(0), column)[0])
    sheet.save(path, quality=85)


def retained(results: list[dict[str, Any]], path: Path) -> None:
    """Bars of the open channels of every gated convolution, a row per model; what shares a gate has its own colour."""
    bar, height, left = 44, 110, 10
    layers = _layers(results[0])
    wide = left * 2 + bar * len(layers)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{len(results) * (height + 60) + 24}" '
        'font-family="sans-serif" font-size="10"><rect width="100%" height="100%" fill="white"/>'
    ]
    tallest = max(size for _, size, _ in layers.values())
    for row, result in enumerate(results):
        top = 24 + row * (height + 60)
        by = "" if result["lambda"] is None else f" with λ = {result['lambda']:g}"
        title = f"channels kept, budget {result['budget']:g}{by}: {result['channels']:.3f} of all"
        parts.append(f'<text x="{left}" y="{top - 8}" font-size="12">{title}</text>')
        for place, (name, (kept, size, shared)) in enumerate(_layers(result).items()):
            x, tall, whole = left + place * bar, height * kept / tallest, height * size / tallest
            for y, colour in ((whole, WHOLE), (tall, SHARED if shared else OWN)):
                parts.append(
                    f'<rect x="{x}" y="{top + height - y:.1f}" width="{bar - 8}" height="{y:.1f}" fill="{colour}"/>'
                )
            parts.append(f'<text x="{x}" y="{top + height + 12}">{name}</text>')
            parts.append(f'<text x="{x}" y="{top + height + 24}">{kept}/{size}</text>')
    shared_by = ", ".join(name for name, (_, _, shared) in layers.items() if shared)
    legend = f"one shared gate over the residual trunk: {shared_by}"
    parts.append(f'<text x="{left}" y="{len(results) * (height + 60) + 14}" fill="{SHARED}">{legend}</text>')
    path.write_text("\n".join([*parts, "</svg>"]))


def _layers(result: dict[str, Any]) -> dict[str, tuple[int, int, bool]]:
    """Paper's name of a layer -> (kept, of how many, whether it shares its gate), in the order of the net."""
    found = {
        _paper_name(layer): (gate["open"], gate["size"], len(gate["layers"]) > 1)
        for gate in result["gates"]
        for layer in gate["layers"]
    }
    return {name: found[name] for name in sorted(found, key=_order)}


def _paper_name(layer: str) -> str:
    inner = re.fullmatch(r"residuals\.(\d+)\.conv(\d+)", layer)
    return f"res{int(inner[1]) + 1}-{inner[2]}" if inner else layer


def _order(name: str) -> tuple[int, str]:
    return (("conv", "res", "up").index(name.rstrip("-0123456789")), name)


def _tile(picture: Tensor) -> Any:
    """A square from the middle, as bytes (side, side, 3)."""
    side = min(picture.shape[1:])
    top, left = ((length - side) // 2 for length in picture.shape[1:])
    square = picture[:, top : top + side, left : left + side].unsqueeze(0)
    small = F.interpolate(square, (TILE, TILE), mode="bilinear", antialias=True, align_corners=False)[0]
    return small.mul(255).round().clamp(0, 255).permute(1, 2, 0).to(torch.uint8).numpy()
