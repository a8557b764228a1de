"""Does half the latency on paper halve the time in ONNX Runtime, and does a FLOPs budget do as well?"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import numpy as np
import onnxruntime
import torch
from torch import nn

import tgfx
from examples.benchmarks.tables import Table, cpu_seconds, met
from examples.zoo.loading import models as zoo_models

SIZE = 224
BUDGET, WITHIN = 0.5, 0.1
TURNS = 31
NETS = ("resnet18", "mobilenet_v2")


def latency() -> Table:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    rows: list[tuple[str, ...]] = []
    reached, beaten, steps = {}, {}, []
    for name in NETS:
        own, step = _compare(name)
        times = {label: ratio for label, ratio, *_ in own}
        by_latency, by_flops, _ = times.values()
        reached[name], beaten[name] = by_latency, by_flops
        steps.append(step)
        for label, ratio, predicted, flops, kept in own:
            rows.append((f"{name}, {label}", f"{ratio:.3f}", f"{predicted:.3f}", f"{flops:.3f}", f"{kept:.3f}"))
            print(*rows[-1], sep="\t", flush=True)
    torch.set_num_threads(threads)
    exact = all(abs(ratio - BUDGET) <= WITHIN * BUDGET for ratio in reached.values())
    better = all(reached[name] < beaten[name] for name in NETS)
    return Table(
        "Latency",
        f"torchvision's {' and '.join(NETS)}, 1x3x{SIZE}x{SIZE}. `tgfx.latency.measure` times their layers "
        f"({'; '.join(steps)}). Gates have random importance (log-normal, the same for all budgets) in place of "
        "training's; latent weights are importance by price, as the controller's, and `tgfx.finish` lands on the "
        "budget. FLOPs budgets are the kept FLOPs of the latency budget. All are exported whole "
        f"(`torch.onnx.export`) and run in ONNX Runtime {onnxruntime.__version__} in turns, one thread, {TURNS} "
        "times; the least processor time over that of the uncut model.",
        ("net, budget", "measured time", "predicted by the table", "FLOPs kept", "importance kept"),
        rows,
        f"A latency budget of {BUDGET} gives {_list(reached)} of the time (target {BUDGET} within {WITHIN:.0%}: "
        f"{met(exact)}); a FLOPs budget at the same kept FLOPs {_list(beaten)} (target: more, {met(better)}).",
    )


def _list(ratios: dict[str, float]) -> str:
    return " and ".join(f"{ratio:.3f} ({name})" for name, ratio in ratios.items())


def _compare(name: str) -> tuple[list[tuple[str, float, float, float, float]], str]:
    """Per budget: label, measured ratio, predicted ratio, FLOPs kept, importance kept; and how the table has steps."""
    torch.manual_seed(0)
    gated = tgfx.transform(zoo_models()[f"torchvision/{name}"]()[0], torch.randn(1, 3, SIZE, SIZE)).eval()
    table = tgfx.latency.measure(gated, cache=False)
    gated.use_latency(table)
    generator = torch.Generator().manual_seed(1)
    importance = {n: torch.randn(g.weight.shape, generator=generator).exp() for n, g in gated.gates.items()}
    models, figures = [_exported(tgfx.shrink(gated))], []

    def cut(label: str, kind: str, share: float, round_to: int | None = None) -> float:
        _set_scores(gated, importance, kind)
        models.append(_exported(tgfx.finish(gated, {kind: share}, round_to=round_to).model))
        kept = sum(float(importance[n][g.is_open()].sum()) for n, g in gated.gates.items())
        whole = sum(float(own.sum()) for own in importance.values())
        flops = gated.ratio("flops").item()
        figures.append((label, gated.ratio("latency").item(), flops, kept / whole))
        return flops

    flops = cut(f"latency {BUDGET}", "latency", BUDGET)
    cut("the same FLOPs", "flops", flops)
    cut("the same FLOPs, in multiples of 8", "flops", flops, round_to=8)
    measured = _ratios(models)[1:]
    rows = [(label, ratio, *rest) for (label, *rest), ratio in zip(figures, measured, strict=True)]
    return rows, _step(name, table)  # type: ignore[return-value]


def _set_scores(gated: tgfx.GatedModule, importance: dict[str, torch.Tensor], kind: str) -> None:
    """All gates open, in the order of importance by price (the price with all of them open)."""
    for gate in gated.gates.values():
        gate.set_open_(torch.ones_like(gate.weight, dtype=torch.bool))
    prices = gated.marginal(kind)
    with torch.no_grad():
        for name, gate in gated.gates.items():
            gate.weight.copy_(importance[name] / prices[name])
        scale = torch.cat([gate.weight.flatten() for gate in gated.gates.values()]).median()
        for gate in gated.gates.values():
            gate.weight.div_(scale).clamp_(min=1e-6)


def _step(name: str, table: tgfx.latency.LatencyTable) -> str:
    """What one channel less than a whole number of blocks costs, in the layer that takes longest."""
    shape = max(table.points, key=lambda s: table.points[s][s.channels_in, s.channels_out])
    shape = next((s for s in table.points if s.grouping == "within"), shape)
    half = shape.channels_in // 2
    ratio = table.lookup(shape, half - 1, half - 1) / table.lookup(shape, half, half)
    return f"{name}: {shape} takes {ratio:.2f} times as long with {half - 1} channels as with {half}"


def _exported(model: nn.Module) -> Callable[[], object]:
    """A call of the model in ONNX Runtime."""
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(model.eval(), (torch.randn(1, 3, SIZE, SIZE),), dynamo=True, verbose=False)
    assert program is not None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    model_bytes = program.model_proto.SerializeToString()
    session = onnxruntime.InferenceSession(model_bytes, options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((1, 3, SIZE, SIZE), dtype=np.float32)
    feed = {session.get_inputs()[0].name: x}
    return lambda: session.run(None, feed)


def _ratios(calls: list[Callable[[], object]]) -> list[float]:
    """The fastest run of each over that of the first: other jobs only ever add to a time."""
    found = np.zeros((TURNS, len(calls)))
    for call in calls:
        call()
    for turn in range(TURNS):
        for index in range(len(calls))[:: 1 if turn % 2 else -1]:  # nobody always goes first
            found[turn, index] = cpu_seconds(calls[index])
    fastest = found.min(axis=0)
    return (fastest / fastest[0]).tolist()
