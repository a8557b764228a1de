"""Before and after: the model that was transformed beside the compact one, both counted and not computed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from tgfx.capture.parametrized import parametrizations_at_rest
from tgfx.errors import InputError
from tgfx.ir.rng import untouched_rng
from tgfx.verify import as_model_takes, eval_mode
from tgfx.view.shapes import Shape, run_shapes
from tgfx.view.subject import Subject


def comparison(subject: Subject, compact: nn.Module | None, shapes: list[Shape]) -> dict[str, Any] | None:
    if compact is None:
        return None
    if not isinstance(compact, fx.GraphModule):
        raise InputError(
            "compact is not a compact model", expected="what tgfx.shrink returned", found=type(compact).__name__
        )
    inputs = _inputs(subject, compact)
    try:
        after_shapes = run_shapes(compact, inputs)
    except Exception as error:
        raise InputError(
            "the compact model does not run on the example of the other one",
            expected="the model that tgfx.shrink made of this one",
            found=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
        ) from error
    after = dict(zip((node.name for node in compact.graph.nodes), after_shapes, strict=True))
    return {
        "layers": _layers(subject, compact, shapes, after),
        "after": [after.get(node.name) for node in subject.nodes],
        "parameters": [_parameters(subject), sum(p.numel() for p in compact.parameters())],
        "bytes": [_bytes(subject), sum(t.numel() * t.element_size() for t in compact.parameters())],
        "flops": [_total(subject, "flops_all"), _counted(compact, inputs)],
        "nodes": [len(subject.nodes), len(list(compact.graph.nodes))],
    }


def _inputs(subject: Subject, compact: nn.Module) -> list[Any]:
    return as_model_takes(subject.source.flat_inputs(), compact)


def _layers(
    subject: Subject, compact: fx.GraphModule, shapes: list[Shape], after: dict[str, Shape]
) -> list[dict[str, Any]]:
    """Every layer with parameters: its weight before and after, in the order of the graph."""
    found = []
    present = dict(compact.named_parameters(remove_duplicate=False))
    known = _original_sizes(subject)
    seen: set[str] = set()
    for index, node in enumerate(subject.nodes):
        if node.op != "call_module" or str(node.target) in seen:
            continue
        seen.add(str(node.target))
        own = {name: size for name, size in known.items() if name.rpartition(".")[0] == str(node.target)}
        if not own:
            continue
        left = {name: list(present[name].shape) for name in own if name in present}
        found.append(
            {
                "node": index,
                "layer": str(node.target),
                "before": next(iter(own.values())),
                "after": next(iter(left.values())) if left else None,
                "params": [_product(own), _product(left)],
                "output": [shapes[index], after.get(node.name)],
            }
        )
    return found


def _original_sizes(subject: Subject) -> dict[str, list[int]]:
    if subject.channels is not None:
        return {name: list(ids.shape) for name, ids in subject.channels.params.items()}
    return {name: list(p.shape) for name, p in subject.source.module.named_parameters(remove_duplicate=False)}


def _product(sizes: dict[str, list[int]]) -> int:
    return sum(int(torch.Size(size).numel()) for size in sizes.values())


def _total(subject: Subject, kind: str) -> float:
    return subject.cost.total(kind)


def _parameters(subject: Subject) -> float:
    return subject.cost.total("params")


def _bytes(subject: Subject) -> float:
    first = next(subject.source.module.parameters(), torch.zeros(()))
    return subject.cost.total("params") * first.element_size()


def _counted(compact: fx.GraphModule, inputs: list[Any]) -> float:
    """All FLOPs per sample, by torch's own counter."""
    counter = FlopCounterMode(display=False)
    tensors = [value for value in inputs if isinstance(value, torch.Tensor)]
    with untouched_rng(), torch.no_grad(), eval_mode(compact), parametrizations_at_rest(compact), counter:
        fx.Interpreter(compact).run(*copy.deepcopy(inputs), enable_io_processing=False)
    batch = tensors[0].shape[0] if tensors and tensors[0].ndim else 1
    return counter.get_total_flops() / max(batch, 1)
