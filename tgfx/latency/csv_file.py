"""Latency tables as CSV: one row per layer and pair of channel counts.

    op,channels_in,channels_out,batch,space,kernel,stride,padding,dilation,output_padding,groups,grouping,dtype,in,out,ms
    conv,64,128,1,56x56,3x3,2x2,1x1,1x1,,1,,float32,64,96,1.12
    model,,,,,,,,,,,,,,,12.5
    scale,,,,,,,,,,,,,,,0.95

op: conv, conv_transpose or linear; channels_in ... dtype: the layer in the whole model (space: its input's height and
width, batch: samples, or rows of a linear; grouping: within, if whole groups go, as in depthwise layers, else across);
in, out: the numbers of channels it was timed with, and ms the time. Every layer needs the row with all its channels.
The last two rows may be left out: op "model" has the time of the whole model before any cut, op "scale" what layers
cost in it over what they cost alone (no time, but in the same column).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from tgfx.errors import InputError
from tgfx.ir.layer_shape import LayerShape
from tgfx.whole_file import whole_file

MODEL, SCALE = "model", "scale"
SHAPE = tuple(item.name for item in fields(LayerShape))
TUPLES = ("space", "kernel", "stride", "padding", "dilation", "output_padding")
NUMBERS = ("channels_in", "channels_out", "batch", "groups")
COLUMNS = (
    "op", "channels_in", "channels_out", "batch", "space", "kernel", "stride", "padding", "dilation",
    "output_padding", "groups", "grouping", "dtype", "in", "out", "ms",
)  # fmt: skip
ALLOWED = {"op": ("conv", "conv_transpose", "linear"), "grouping": ("", "within", "across")}

Times = dict[LayerShape, dict[tuple[int, int], float]]


def write(
    path: Path,
    points: Mapping[LayerShape, Mapping[tuple[int, int], float]],
    whole: float | None,
    scale: float,
    *,
    blank: bool = False,
    files: Mapping[tuple[LayerShape, tuple[int, int]], str] | None = None,
) -> Path:
    """`files`: names for a last column, "file", which nobody reads."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as aside, open(aside, "w", newline="", encoding="utf-8") as file:
        rows = csv.DictWriter(file, (*COLUMNS, "file") if files else COLUMNS)
        rows.writeheader()
        for shape, times in points.items():
            own = {name: _text(getattr(shape, name)) for name in SHAPE}
            for (ins, outs), time in sorted(times.items()):
                row = {**own, "in": ins, "out": outs, "ms": "" if blank else repr(float(time))}
                rows.writerow({**row, "file": files[shape, (ins, outs)]} if files else row)
        if blank or whole is not None:
            rows.writerow({"op": MODEL, "ms": "" if blank else repr(whole)})
        if not blank and scale != 1.0:
            rows.writerow({"op": SCALE, "ms": repr(scale)})
    return path


def read(path: Path) -> tuple[Times, float | None, float]:
    points: Times = {}
    extra: dict[str, float] = {}
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise _bad(path, 1, f"the columns {', '.join(COLUMNS)}", f"no column {', '.join(missing)}")
            for row in rows:
                line = rows.line_num
                time = _time(path, line, row["ms"])
                if row["op"] in (MODEL, SCALE):
                    extra[row["op"]] = time
                    continue
                shape = _shape(path, line, row)
                counts = tuple(_number(path, line, name, row[name]) for name in ("in", "out"))
                _check_counts(path, line, shape, *counts)
                times = points.setdefault(shape, {})
                if counts in times:
                    raise _bad(path, line, "each pair of counts once per layer", f"{counts[0]}->{counts[1]} again")
                times[counts] = time  # type: ignore[index]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            "the latency table cannot be read",
            expected="a CSV file, as LatencyTable.to_csv writes it",
            found=f"{type(error).__name__}: {error}",
            where=str(path),
        ) from error
    if not points:
        raise _bad(path, 1, "at least one layer", "none")
    return points, extra.get(MODEL), extra.get(SCALE, 1.0)


def _shape(path: Path, line: int, row: Mapping[str, Any]) -> LayerShape:
    values: dict[str, Any] = {}
    for name in SHAPE:
        text = (row[name] or "").strip()
        if name in TUPLES:
            values[name] = tuple(_number(path, line, name, part, least=0) for part in text.split("x") if text)
        elif name in NUMBERS:
            values[name] = _number(path, line, name, text)
        elif name in ALLOWED and text not in ALLOWED[name]:
            allowed = " or ".join(repr(one) for one in (*ALLOWED[name], *((MODEL, SCALE) if name == "op" else ())))
            raise _bad(path, line, f"{name}: {allowed}", repr(text))
        else:
            values[name] = text
    shape = LayerShape(**values)
    if (shape.groups > 1) != bool(shape.grouping):
        found = f"groups={shape.groups}, grouping={shape.grouping!r}"
        raise _bad(path, line, "a grouping where there are groups, and only there", found)
    if shape.channels_in % shape.groups or shape.channels_out % shape.groups:
        found = f"{shape.channels_in} and {shape.channels_out} in {shape.groups} groups"
        raise _bad(path, line, "channels that the groups divide", found)
    windows = (shape.kernel, shape.stride, shape.padding, shape.dilation)
    if any(len(one) != len(shape.space) for one in windows) or (shape.op == "linear") == bool(shape.space):
        raise _bad(path, line, "space, kernel, stride, padding, dilation of one length, none for linear", repr(windows))
    return shape


def _check_counts(path: Path, line: int, shape: LayerShape, ins: int, outs: int) -> None:
    if ins > shape.channels_in or outs > shape.channels_out or ins % shape.unit_in or outs % shape.unit_out:
        expected = f"up to {shape.channels_in} input and {shape.channels_out} output channels, in steps of "
        raise _bad(path, line, expected + f"{shape.unit_in} and {shape.unit_out}", f"{ins} and {outs}")
    if shape.grouping == "within" and ins // shape.unit_in != outs // shape.unit_out:
        raise _bad(path, line, "input and output channels of the same groups", f"{ins} and {outs}")


def _number(path: Path, line: int, name: str, text: str | None, least: int = 1) -> int:
    try:
        value = int((text or "").strip())
    except ValueError:
        value = least - 1
    if value < least:
        raise _bad(path, line, f"{name}: a whole number, at least {least}", repr(text))
    return value


def _time(path: Path, line: int, text: str | None) -> float:
    try:
        value = float((text or "").strip())
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise _bad(path, line, "ms: a number above 0", repr(text))
    return value


def _bad(path: Path, line: int, expected: str, found: str) -> InputError:
    return InputError("the latency table has a bad row", expected=expected, found=found, where=f"{path}, line {line}")


def _text(value: Any) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value)
