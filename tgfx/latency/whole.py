"""From times of layers to the time of a model: the whole model, exported and timed at two widths.

    model = scale * sum of its layers + constant

In a network a layer finds other caches than alone, and additions and activations between layers are partly fused and
partly not. Both are about in proportion to the layers; the rest is taken as a constant.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from tgfx.gated import GatedModule
from tgfx.ir.source import tensors_in
from tgfx.latency.attaching import KIND
from tgfx.latency.clock import Clock
from tgfx.latency.table import LatencyTable
from tgfx.plan import fingerprint
from tgfx.shrinking import cut_to
from tgfx.training.selection import all_open
from tgfx.training.stops import fast_stops
from tgfx.verify import eval_mode

TURNS = 21
SCALES = (0.5, 2.0)  # outside, a fault in the measurement is more likely than such a network
NARROW = 0.5  # of every group, at the nearest fast count


@dataclass(frozen=True)
class Calibration:
    """ms of the whole model, and what its layers cost there over what they cost alone."""

    whole: float
    scale: float


def model_key(gated: GatedModule) -> str:
    """The model as it is exported: architecture, graph, example sizes, and what is open at most."""
    sizes = [tuple(tensor.shape) for tensor in gated.facts.source.example_tensors()]
    parts = (fingerprint(gated), str(gated.facts.source.module.graph), sizes, all_open(gated).tolist())
    return "model|" + hashlib.sha256(repr(parts).encode()).hexdigest()


def calibrated(gated: GatedModule, table: LatencyTable, clock: Clock) -> Calibration | None:
    """None, with a warning, if the model cannot be exported or run."""
    try:
        return _calibrated(gated, replace(table, whole=None, scale=1.0), clock)
    except Exception as error:  # exporters and runtimes raise what they like
        first = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"the whole model could not be timed ({type(error).__name__}: {first}): only its layers count as latency",
            stacklevel=3,
        )
        return None


def _calibrated(gated: GatedModule, table: LatencyTable, clock: Clock) -> Calibration:
    opened = all_open(gated)
    narrow, sums = _narrow(gated, table, opened)
    whole, half = clock.times([_exported(gated, one) for one in (opened, narrow)], TURNS).tolist()
    if sums[0] <= sums[1] or whole <= half:  # nothing to cut, or lost in the noise
        return Calibration(whole, 1.0)
    scale = float(np.clip((whole - half) / (sums[0] - sums[1]), *SCALES))
    return Calibration(whole, min(scale, max(SCALES[0], whole / sums[0])))


def _narrow(gated: GatedModule, table: LatencyTable, opened: Tensor) -> tuple[Tensor, tuple[float, float]]:
    """About half of every group, and the sums of layer times with all and with these gates."""
    cost, before = gated.facts.cost, dict(gated.facts.cost.measured)
    try:
        cost.measure_by(KIND, table)
        stops = fast_stops(gated, (KIND,)) or {}
        narrow = opened.clone()
        for group in gated.facts.coupling.groups:
            if group.name in stops and not group.is_switch:
                own = torch.from_numpy(gated.gate_slots(group.name))
                count = min(stops[group.name], key=lambda n: abs(n - NARROW * len(own)))
                narrow[own[count:]] = False
        sums = tuple(
            float(cost.evaluate(KIND, torch.cat([one.double(), torch.ones(1, dtype=torch.float64)])))
            for one in (opened, narrow)
        )
    finally:
        cost.measured = before
    return narrow, sums  # type: ignore[return-value]


def _exported(gated: GatedModule, opened: Tensor) -> tuple[bytes, dict[str, np.ndarray]]:
    source = gated.facts.source
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter, and of a model that has another path in train mode
        compact = cut_to(gated, opened.numpy(), verify=False)
        with eval_mode(compact):
            args, kwargs = copy.deepcopy((source.args, source.kwargs))
            program = torch.onnx.export(compact, args, kwargs=kwargs, dynamo=True, opset_version=18, verbose=False)
    if program is None:
        raise RuntimeError("the exporter gave nothing")
    proto = program.model_proto
    values = [tensor.detach().cpu().numpy() for tensor in tensors_in((args, kwargs))]
    names = [value.name for value in proto.graph.input]
    return proto.SerializeToString(), dict(zip(names, values, strict=True))
