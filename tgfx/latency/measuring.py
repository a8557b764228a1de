"""Measure the layers of a model on this machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from tgfx.errors import InputError
from tgfx.gated import GatedModule
from tgfx.ir.layer_shape import LayerShape
from tgfx.latency import csv_file
from tgfx.latency.cache import Cache, folder_for, machine
from tgfx.latency.clock import Clock
from tgfx.latency.needs import Need, check_covers, needs
from tgfx.latency.onnx_layer import around, bare_model, copies, layer_model
from tgfx.latency.packages import onnx, onnxruntime
from tgfx.latency.profile import PERIOD
from tgfx.latency.table import LatencyTable, read_csv
from tgfx.latency.whole import calibrated, model_key

TURNS = 15
TOGETHER, BYTES = 64, 2**28  # models that take turns: so many at most, with weights of so many bytes
LEAST, SHARE = 1e-3, 0.1  # ms, and of the model it is timed in: the least that a layer is taken to need
REFERENCE = "reference"
log = logging.getLogger(__name__)


def measure(
    gated: GatedModule,
    runtime: str = "onnxruntime",
    *,
    threads: int = 1,
    cache: str | os.PathLike[str] | Literal[False] | None = None,
    device_table: str | os.PathLike[str] | None = None,
    turns: int = TURNS,
    whole: bool = True,
) -> LatencyTable:
    """A table of layer times against channel counts, in ONNX Runtime on this machine: `gated.use_latency(table)`.

    Every distinct layer (kernel, stride, groups, padding, input size of the example) is timed at some tens of
    channel counts between two small ones (tgfx.latency.onnx_layer), in turns and beside a reference
    (tgfx.latency.clock), so that other jobs on the machine matter little. Times for other counts
    follow from these (tgfx.latency.surface says what is assumed). threads: as the runtime will have. cache: a
    folder (default $TGFX_CACHE, or tgfx in the user's cache folder), or False for none. device_table: a CSV file
    measured elsewhere (tgfx.latency.template writes one to fill in) instead of measuring. whole: time the whole
    model too, at two widths, to know what its layers do not explain (needs onnxscript).
    """
    wanted = needs(gated)
    if device_table is not None:
        table = read_csv(device_table)
        check_covers(gated, table)
        return table
    if runtime != "onnxruntime":
        raise InputError(
            f"no way to measure in {runtime!r}",
            expected='runtime="onnxruntime"',
            found=repr(runtime),
            fix="measure there by hand: tgfx.latency.template, then device_table=...",
        )
    _check_whole("threads", threads)
    _check_whole("turns", turns)
    onnx()
    about = {
        "runtime": "onnxruntime",
        "version": onnxruntime().__version__,
        "threads": str(threads),
        "machine": machine(),
    }
    store = Cache(None if cache is False else folder_for(cache), about)
    clock = _clock(store, threads)
    for need in wanted:
        if _measure_layer(need, store, clock, turns):
            store.save()  # what is measured stays, even if the rest is interrupted
    points = {n.shape: {counts: store.times[_key(n.shape, *counts)] for counts in n.points()} for n in wanted}
    table = LatencyTable(points, about=about)
    return _with_whole(gated, table, store, clock) if whole else table


def _clock(store: Cache, threads: int) -> Clock:
    """With the reference's time as it was when the cache was begun: all times in it are multiples of that."""
    clock = Clock(threads, store.times.get(REFERENCE))
    store.times[REFERENCE] = clock.quiet
    return clock


def _with_whole(gated: GatedModule, table: LatencyTable, store: Cache, clock: Clock) -> LatencyTable:
    key = model_key(gated)
    if f"{key}|scale" not in store.times:
        found = calibrated(gated, table, clock)
        if found is None:
            return table
        store.times[f"{key}|whole"], store.times[f"{key}|scale"] = found.whole, found.scale
        store.save()
    return replace(table, whole=store.times[f"{key}|whole"], scale=store.times[f"{key}|scale"])


def template(gated: GatedModule, path: str | os.PathLike[str], *, models: str | os.PathLike[str] | None = None) -> Path:
    """A CSV file without times, to be filled in on another device and read with `measure(device_table=...)`.

    models: a folder for the layers as ONNX files; the column "file" then says which row is which.
    """
    wanted = needs(gated)
    points = {need.shape: dict.fromkeys(need.points(), 1.0) for need in wanted}
    files: dict[tuple[LayerShape, tuple[int, int]], str] = {}
    if models is not None:
        Path(models).mkdir(parents=True, exist_ok=True)
        for index, need in enumerate(wanted):
            for counts in need.points():
                name = f"{index:03d}-{need.shape.op}-{counts[0]}-{counts[1]}.onnx"
                (Path(models) / name).write_bytes(bare_model(need.shape, *counts))
                files[need.shape, counts] = name
    return csv_file.write(Path(path), points, None, 1.0, blank=True, files=files)


def _measure_layer(need: Need, store: Cache, clock: Clock, turns: int) -> bool:
    """Time what the cache does not have; whether there was anything."""
    shape = need.shape
    missing = [counts for counts in need.points() if _key(shape, *counts) not in store.times]
    if missing:
        log.info("timing %s at %d channel counts", shape, len(missing))
    for batch in _batches(shape, missing):
        frames = _frames(batch)
        models = [layer_model(shape, *counts) for counts in batch] + [around(shape, count) for count in frames]
        times = clock.times(list(models), turns)
        own, frame = times[: len(batch)], times[len(batch) :]
        for counts, time in zip(batch, own, strict=True):
            rest = float(time - np.interp(counts[0], frames, frame))
            least = max(LEAST, SHARE * float(time))  # below, it is lost in the noise of the others
            store.times[_key(shape, *counts)] = max(least, rest) / copies(shape, *counts)
    return bool(missing)


def _frames(batch: list[tuple[int, int]], most: int = 6) -> list[int]:
    """Input channels at which the surroundings are timed: whole blocks, which cost no conversion; linear between."""
    block = PERIOD // 2
    counts = sorted({-(-ins // block) * block for ins, _ in batch})
    return sorted({counts[round(index * (len(counts) - 1) / (most - 1))] for index in range(most)})


def _batches(shape: LayerShape, points: list[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
    """Points that are timed together, neighbours spread over the batches: not too many weights at once."""
    window = int(np.prod(shape.kernel)) if shape.kernel else 1
    weights = [4 * ins * outs // shape.groups_with(ins) * window for ins, outs in points]
    count = max(-(-len(points) // TOGETHER), -(-sum(weights) // BYTES))
    for start in range(min(count, len(points))):
        yield points[start::count]


def _key(shape: LayerShape, channels_in: int, channels_out: int) -> str:
    """What the runtime sees: equal layers of different models share their times."""
    sizes = (shape.space, shape.kernel, shape.stride, shape.padding, shape.dilation, shape.output_padding)
    parts = (shape.op, shape.batch, *sizes, shape.groups_with(channels_in), shape.dtype, channels_in, channels_out)
    return "|".join("x".join(map(str, part)) if isinstance(part, tuple) else str(part) for part in parts)


def _check_whole(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise InputError(f"{name} is out of range", expected="a whole number, at least 1", found=repr(value))
