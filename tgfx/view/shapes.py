"""Shapes of every node's value: as captured, and with the gates as they are."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx

from tgfx.ir.rng import untouched_rng
from tgfx.ir.source import tensors_in
from tgfx.passes.survivors import Survivors
from tgfx.verify import eval_mode
from tgfx.view.subject import Subject

Shape = list[int] | None


def shapes_before(subject: Subject) -> list[Shape]:
    """Per node the shape of its (first) tensor, None where it gives none."""
    if subject.channels is None:
        return run_shapes(subject.source.module, subject.source.flat_inputs())
    found: list[Shape] = []
    for node in subject.nodes:
        known = subject.channels.nodes.get(node.name)
        ids = known.tensors[0] if known is not None and known.tensors else None
        found.append(None if ids is None else list(ids.shape))
    return _with_outputs(subject, found)


def _with_outputs(subject: Subject, shapes: list[Shape]) -> list[Shape]:
    """The analysis looks at operators; what the model returns has the shape of what is handed to it."""
    index = {node.name: i for i, node in enumerate(subject.nodes)}
    for i, node in enumerate(subject.nodes):
        if node.op == "output" and shapes[i] is None and node.all_input_nodes:
            shapes[i] = shapes[index[node.all_input_nodes[0].name]]
    return shapes


def shapes_now(subject: Subject, before: list[Shape], survivors: Survivors | None) -> list[Shape]:
    """The same in the model that `tgfx.shrink` would give; None also where survivors have no shape (in a shuffle)."""
    if survivors is None or subject.channels is None:
        return before
    found: list[Shape] = []
    for node, shape in zip(subject.nodes, before, strict=True):
        known = subject.channels.nodes.get(node.name)
        ids = known.tensors[0] if known is not None and known.tensors else None
        if shape is None or ids is None or not survivors.is_rectangular(ids):
            found.append(None)
            continue
        kept = survivors.kept(ids)
        found.append([size if left is None else len(left) for size, left in zip(shape, kept, strict=True)])
    return _with_outputs(subject, found)


class _Shapes(fx.Interpreter):
    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.shapes: dict[str, Shape] = {}

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        tensors = tensors_in(result)
        self.shapes[n.name] = list(tensors[0].shape) if tensors else None
        return result


def run_shapes(module: fx.GraphModule, inputs: list[Any]) -> list[Shape]:
    """Run a graph once, in eval mode, and look."""
    recorder = _Shapes(module)
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    with untouched_rng(), torch.no_grad(), eval_mode(module):
        recorder.run(*copy.deepcopy(inputs), enable_io_processing=False)
        for buffer, before in buffers:
            buffer.copy_(before)
    return [recorder.shapes.get(node.name) for node in module.graph.nodes]
