"""Where an ONNX graph parts from torch: the first node whose output is not what the exported program computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from tgfx.onnx_export.inner_values import inner_values
from tgfx.onnx_export.parity import delta, tolerance_for
from tgfx.onnx_export.session import Feeds, as_numpy
from tgfx.onnx_export.tracing import Traced


def first_difference(model: Any, traced: Traced, values: list[Any], feeds: Feeds) -> str:
    """`Conv 'node_conv2d_1' -> conv2d_1 (model.py:12)`. Values keep torch's names on the way into ONNX, which is how
    the two are matched; nodes that exist on one side only are skipped."""
    expected = _torch_values(traced, values)
    try:
        found = inner_values(model, feeds)
    except Exception as error:
        return f"the graph does not run node by node: {(str(error).splitlines() or [''])[0]}"
    for node in model.graph.node:
        for output in node.output:
            ours, theirs = expected.get(output), found.get(output)
            if ours is None or theirs is None or ours.dtype != theirs.dtype:
                continue
            gap = delta(ours, theirs)
            if not gap.within(tolerance_for(ours)):
                line = f" ({traced.sources[output]})" if output in traced.sources else ""
                apart = f"shape {theirs.shape}, expected {ours.shape}" if ours.shape != theirs.shape else ""
                return f"{node.op_type} '{node.name}' -> {output}{line}: {apart or f'off by {gap.largest:.3g}'}"
    return "at the outputs only: every node that both sides have agrees, so it is ONNX Runtime's own optimisation"


class _Recorder(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: dict[str, np.ndarray] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if isinstance(result, Tensor) and result.layout is torch.strided:
            self.values[n.name] = as_numpy(result).copy()
        return result


def _torch_values(traced: Traced, values: list[Any]) -> dict[str, np.ndarray]:
    program = traced.program.exported_program
    recorder = _Recorder(program.graph_module)
    given = iter(values)
    tensors = {**program.state_dict, **program.constants}
    signature = program.graph_signature
    lifted = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    lifted.update(signature.inputs_to_lifted_tensor_constants)
    arguments = []
    for node in program.graph.nodes:
        if node.op == "placeholder":
            arguments.append(tensors[lifted[node.name]] if node.name in lifted else next(given))
    with torch.no_grad():
        recorder.run(*arguments, enable_io_processing=False)
    ends = next(node for node in program.graph.nodes if node.op == "output").args[0]
    for node, name in zip(ends, traced.outputs, strict=True):
        recorder.values[name] = recorder.values[node.name]
    return recorder.values
