"""Time of a whole model, to know what its layers do not explain."""

from __future__ import annotations

import copy
import hashlib
import logging
import warnings

import numpy as np
import torch

from tgfx.gated import GatedModule
from tgfx.ir.source import tensors_in
from tgfx.latency.clock import Timed, median_times
from tgfx.plan import fingerprint
from tgfx.shrinking import cut_to
from tgfx.training.selection import all_open
from tgfx.verify import eval_mode

CALLS = 30
log = logging.getLogger(__name__)


def whole_key(gated: GatedModule) -> str:
    """The model as it is exported: architecture, graph, example sizes, and what is open at most."""
    sizes = [tuple(tensor.shape) for tensor in gated.facts.source.example_tensors()]
    parts = (fingerprint(gated), str(gated.facts.source.module.graph), sizes, all_open(gated).tolist())
    return "model|" + hashlib.sha256(repr(parts).encode()).hexdigest()


def whole_time(gated: GatedModule, threads: int) -> float | None:
    """ms of the model with all gates open; None, with a warning, if it cannot be exported or run."""
    try:
        model, inputs = _exported(gated)
        return float(median_times([Timed(model, threads, inputs)], CALLS)[0])
    except Exception as error:  # exporters and runtimes raise what they like
        first = (str(error).splitlines() or [""])[0]
        warnings.warn(
            f"the whole model could not be timed ({type(error).__name__}: {first}): only its layers count as latency",
            stacklevel=4,
        )
        return None


def _exported(gated: GatedModule) -> tuple[bytes, dict[str, np.ndarray]]:
    source = gated.facts.source
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # of the exporter, and of a model that has another path in train mode
        compact = cut_to(gated, all_open(gated).numpy(), verify=False)
        with eval_mode(compact):
            args, kwargs = copy.deepcopy((source.args, source.kwargs))
            program = torch.onnx.export(compact, args, kwargs=kwargs, dynamo=True, opset_version=18, verbose=False)
    if program is None:
        raise RuntimeError("the exporter gave nothing")
    proto = program.model_proto
    values = [tensor.detach().cpu().numpy() for tensor in tensors_in((args, kwargs))]
    names = [value.name for value in proto.graph.input]
    return proto.SerializeToString(), dict(zip(names, values, strict=True))
