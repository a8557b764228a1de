"""The export front end: torch.export captures what plain fx cannot follow (shape-dependent Python, Hugging Face)."""

from __future__ import annotations

import inspect
import io
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, export

from tgfx.capture.sizes import widened
from tgfx.ir.lazy_module import LazyGraphModule
from tgfx.ir.tree import find, named_tensors


def export_graph(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.GraphModule:
    """A GraphModule over the model's own parameters, with batch and other free sizes kept free."""
    examples = [(args, kwargs)]
    if _has_batch_of_one(args, kwargs):
        examples.insert(0, widened(args, kwargs))
    for attempt, example in enumerate(examples):
        try:
            with _quiet():
                program = export(model, example[0], example[1], dynamic_shapes=_free(model, *example), strict=False)
            break
        except Exception:
            if attempt + 1 == len(examples):
                raise
    with _quiet():
        module = program.module(check_guards=False)
    graph = module.graph
    _bring_constants(module, model)
    own = LazyGraphModule(model, graph, class_name=type(model).__name__)
    for node in list(graph.nodes):
        if node.op == "call_module" and str(node.target).startswith("_guards"):
            graph.erase_node(node)
        elif node.op == "call_function" and node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)  # would forbid .double() and other devices
    return own


@contextmanager
def _quiet() -> Iterator[None]:
    """A failed attempt is not the user's business: torch would print its whole half-made graph."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        logging.disable(logging.ERROR)
        try:
            yield
        finally:
            logging.disable(before)


def _bring_constants(module: fx.GraphModule, model: nn.Module) -> None:
    """Constants that torch.export lifted out of the code become buffers of our copy of the model."""
    known = dict(named_tensors(model))
    for node in module.graph.nodes:
        if node.op != "get_attr" or str(node.target) in known:
            continue
        value = find(module, str(node.target))
        if isinstance(value, torch.Tensor):
            name, count = "lifted_constant_0", 0
            while hasattr(model, name):
                count += 1
                name = f"lifted_constant_{count}"
            model.register_buffer(name, value.detach(), persistent=False)
            node.target = name


def _has_batch_of_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A batch of one is taken for a constant by torch.export: repeat it, if all inputs share it."""
    tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    return bool(tensors) and all(t.ndim > 0 and t.shape[0] == 1 for t in tensors)


def _free(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch and sequence length may vary; torch.export narrows down what the code fixes.

    Height and width of images stay as in the example: what needs this front end has windows or position tables of a
    fixed size as a rule, and symbolic extents make capturing it ten times slower.
    """

    def spec(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return None
        return {axis: Dim.AUTO for axis in range(value.ndim if value.ndim < 4 else 1)}

    bound = inspect.signature(model.forward).bind(*args, **kwargs)
    return {name: torch.utils._pytree.tree_map(spec, value) for name, value in bound.arguments.items()}
