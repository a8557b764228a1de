"""The export front end: torch.export captures what plain fx cannot follow (shape-dependent Python, Hugging Face)."""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim, ExportedProgram, export
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from tgfx.capture.assumed import AssumedSizes
from tgfx.capture.quiet import quiet
from tgfx.capture.regions import unwrap_regions
from tgfx.capture.transforms import write_out_transforms
from tgfx.capture.uniform_draws import UniformDraws
from tgfx.ir.containers import CannotBuildError, building, is_container_type
from tgfx.ir.lazy_module import LazyGraphModule
from tgfx.ir.tree import find, named_tensors

WRITTEN_OUT = "tgfx_written_out"  # in the meta of a graph that transforms of torch.func were written out in


def export_graph(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, widen: bool = True
) -> fx.GraphModule:
    """A GraphModule over the model's own parameters, with batch and other free sizes kept free.

    widen: free a batch of one as well, by capturing a batch of two.
    """
    program = _program(model, args, kwargs, widen)
    with quiet():
        module = program.module(check_guards=False)  # it would be a module of torch's own making, which cannot be cut
        transformed = write_out_transforms(module)
    graph = module.graph
    unwrap_regions(module)
    _bring_constants(module, model)
    own = LazyGraphModule(model, graph, class_name=type(model).__name__)
    for node in list(graph.nodes):
        if node.op == "call_function" and node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.erase_node(node)  # would forbid .double() and other devices
        elif node.op == "call_function" and node.target is torch.ops.aten._assert_scalar.default:
            node.target = torch._assert  # what was assumed of sizes that numbers decide; this one is not taken for dead
    AssumedSizes(graph).check()
    _put_output_together(graph)
    own.meta[WRITTEN_OUT] = transformed
    return own


def _put_output_together(graph: fx.Graph) -> None:
    """By nodes of the graph, not by a note beside it: pickle loses types there, and each mode may give its own."""
    codegen = graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen) or codegen.pytree_info.out_spec is None:
        return
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    try:
        value = pytree.tree_unflatten(list(output.args[0]), codegen.pytree_info.out_spec)  # type: ignore[arg-type]
        with graph.inserting_before(output):
            output.args = ([_as_argument(graph, value)],)
    except Exception:
        return  # a class of its own that wants tensors, such as a cache: only the note knows how to make it
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=pytree.tree_structure(None))


def _as_argument(graph: fx.Graph, value: Any) -> Any:
    if is_container_type(type(value)):
        kind, args, kwargs = building(value)
        node = graph.call_function(kind, _as_argument(graph, args), _as_argument(graph, kwargs))
        node.meta["is_wrapped"] = True
        return node
    if isinstance(value, tuple | list):
        return type(value)(_as_argument(graph, item) for item in value)
    if isinstance(value, dict):
        return {key: _as_argument(graph, item) for key, item in value.items()}
    if value is not None and not isinstance(value, fx.Node | bool | int | float | str):
        raise CannotBuildError(type(value).__name__)
    return value


def _program(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], widen: bool) -> ExportedProgram:
    if widen and has_batch_of_one(args, kwargs):
        wider = pytree.tree_map(lambda v: torch.cat([v, v]) if _is_one(v) else v, (args, kwargs))
        try:
            program = _export(model, *wider)
            if _keeps_batch_free(program):
                return program
        except Exception as error:
            logging.getLogger(__name__).debug("a wider batch could not be exported: %s", error)
    return _export(model, args, kwargs)


def _export(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ExportedProgram:
    def taken() -> ExportedProgram:
        with UniformDraws():
            return export(model, args, kwargs, dynamic_shapes=_free(model, args, kwargs), strict=False)

    with quiet():
        try:
            with torch.enable_grad():  # where it is off already, no region without it would be seen
                return taken()
        except RuntimeError:
            with torch.no_grad():  # `out=` has no gradients: what runs without them only has none to lose
                return taken()


def _keeps_batch_free(program: ExportedProgram) -> bool:
    """A batch that the code fixes has to be the example's own, and not the wider one."""
    graph = program.module(check_guards=False).graph
    return not any(axis.axis == 0 and axis.size == 2 for axis in AssumedSizes(graph).axes)


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


def has_batch_of_one(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """A batch of one is taken for a constant by torch.export."""
    return any(map(_is_one, pytree.tree_leaves((args, kwargs))))


def _is_one(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim > 0 and value.shape[0] == 1


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
    return {name: pytree.tree_map(spec, value) for name, value in bound.arguments.items()}
