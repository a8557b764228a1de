"""Every value inside of an ONNX graph, not only its outputs."""

from __future__ import annotations

from typing import Any

import numpy as np

from tgfx.onnx_export.session import Feeds, open_session, run
from tgfx.optional_packages import needed


def inner_values(model: Any, feeds: Feeds) -> dict[str, np.ndarray]:
    """Name -> value, as ONNX Runtime computes them without optimisations. model: with its weights in memory."""
    onnx = needed("onnx")
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    present = {value.name for value in shown.graph.output}
    inner = [name for node in shown.graph.node for name in node.output if name and name not in present]
    shown.graph.output.extend(onnx.ValueInfoProto(name=name) for name in inner)
    return run(open_session(shown, optimise=False), feeds)
