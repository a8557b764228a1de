"""Does half the latency on paper halve the time in ONNX Runtime, and does a FLOPs budget do as well?"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnxruntime
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tests.support.torchvision_ops  # noqa: F401  (before anything imports torchvision)
import tgfx
from examples.benchmarks.tables import Table, cpu_seconds, met
from examples.demo import data, measure

SIZE = 224  # of the images whose time is measured
SMALL = 32  # of those that are learned from: what a channel is worth shows there too
BUDGET, WITHIN = 0.5, 0.1
EQUAL = 0.02  # accuracies that count as the same
BATCH, PRETRAIN, GATED, AFTER = 32, 3, 2, 1  # epochs
RATE = 0.02
TURNS = 31
NETS = ("resnet18", "mobilenet_v2")


@dataclass(frozen=True)
class Cut:
    """One budget: shares of the uncut model's time (measured, and by the table) and FLOPs, and accuracy on held-out."""

    label: str
    measured: float
    predicted: float
    flops: float
    accuracy: float


def latency() -> Table:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    digits = _digits()
    rows: list[tuple[str, ...]] = []
    found: dict[str, list[Cut]] = {}
    whole, steps = {}, []
    for name in NETS:
        found[name], whole[name], step = _compare(name, digits)
        steps.append(step)
        for cut in found[name]:
            ratios = (f"{ratio:.3f}" for ratio in (cut.measured, cut.predicted, cut.flops))
            rows.append((f"{name}, {cut.label}", *ratios, f"{cut.accuracy:.2%}"))
            print(*rows[-1], sep="\t", flush=True)
    torch.set_num_threads(threads)
    firsts = {name: cuts[0] for name, cuts in found.items()}
    seconds = {name: cuts[1] for name, cuts in found.items()}
    exact = all(abs(cut.measured - BUDGET) <= WITHIN * BUDGET for cut in firsts.values())
    better = all(firsts[name].measured < seconds[name].measured for name in NETS)
    equal = all(firsts[name].accuracy >= seconds[name].accuracy - EQUAL for name in NETS)
    return Table(
        "Latency",
        f"torchvision's {' and '.join(NETS)} with ten classes, trained for {PRETRAIN} epochs on scikit-learn's digits "
        f"at {SMALL}x{SMALL} ({', '.join(f'{own:.2%} ({name})' for name, own in whole.items())} on 450 held out). "
        f"`tgfx.latency.measure` times their layers at 1x3x{SIZE}x{SIZE} ({'; '.join(steps)}). For each budget a copy "
        f"is gated, trained on with `tgfx.fit` for {GATED} epochs, cut with `tgfx.finish`, and trained for {AFTER} "
        "more as it is. FLOPs budgets are the kept FLOPs of the latency budget. All are exported whole "
        f"(`torch.onnx.export`) and run in ONNX Runtime {onnxruntime.__version__} in turns, one thread, {TURNS} "
        "times; the least processor time over that of the uncut model.",
        ("net, budget", "measured time", "predicted by the table", "FLOPs kept", "accuracy"),
        rows,
        f"A latency budget of {BUDGET} gives {_list(firsts)} of the time (target {BUDGET} within {WITHIN:.0%}: "
        f"{met(exact)}); a FLOPs budget at the same kept FLOPs {_list(seconds)} (target: more, {met(better)}), and is "
        f"no more accurate (within {EQUAL:.0%}: {met(equal)}).",
    )


def _list(cuts: dict[str, Cut]) -> str:
    return " and ".join(f"{cut.measured:.3f} ({name})" for name, cut in cuts.items())


def _digits() -> data.Digits:
    """As large as these nets halve five times, and in three colours."""
    small = data.load(0)

    def shaped(images: Tensor) -> Tensor:
        return F.interpolate(images, size=SMALL, mode="bilinear").repeat(1, 3, 1, 1)

    return data.Digits((shaped(small.train[0]), small.train[1]), (shaped(small.held_out[0]), small.held_out[1]))


def _compare(name: str, digits: data.Digits) -> tuple[list[Cut], float, str]:
    """The cuts of one net, the accuracy of the whole one, and how the table has steps."""
    import torchvision.models

    torch.manual_seed(0)
    model = getattr(torchvision.models, name)(num_classes=10)
    _train(model, digits, PRETRAIN)
    example = torch.randn(1, 3, SIZE, SIZE)
    table = tgfx.latency.measure(tgfx.transform(model.eval(), example), cache=False)
    models, figures = [_exported(model)], []

    def trained(kind: str, share: float) -> tgfx.GatedModule:
        gated = tgfx.transform(model, example)
        gated.use_latency(table)
        loader = digits.loader(BATCH)
        tgfx.fit(gated, loader, F.cross_entropy, budget={kind: share}, epochs=GATED, lr=RATE, progress=False, seed=0)
        return gated

    def cut(label: str, gated: tgfx.GatedModule, kind: str, share: float, round_to: int | None = None) -> float:
        finished = tgfx.finish(gated, {kind: share}, round_to=round_to)
        _train(finished.model, digits, AFTER)
        models.append(_exported(finished.model))
        accuracy = measure.accuracy(finished.model, *digits.held_out)
        figures.append((label, finished.ratio("latency"), finished.ratio("flops"), accuracy))
        return finished.ratio("flops")

    flops = cut(f"latency {BUDGET}", trained("latency", BUDGET), "latency", BUDGET)
    gated = trained("flops", flops)
    again = copy.deepcopy(gated)
    again.use_latency(table)
    cut("the same FLOPs", gated, "flops", flops)
    cut("the same FLOPs, in multiples of 8", again, "flops", flops, round_to=8)
    measured = _ratios(models)[1:]
    cuts = [Cut(label, ratio, *rest) for (label, *rest), ratio in zip(figures, measured, strict=True)]
    return cuts, measure.accuracy(model, *digits.held_out), _step(name, table)


def _train(model: nn.Module, digits: data.Digits, epochs: int) -> None:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.9, weight_decay=5e-4)
    loader = digits.loader(BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * len(loader))
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()


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
