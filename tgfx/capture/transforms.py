"""torch.vmap and torch.func.jvp in an exported graph, written out as the operators that they come to.

    _vmap_increment_nesting(batch)
    _add_batch_dim(h, 0, 1)                    unsqueeze(h, 1)
    linear(.., weight, bias)           ->      matmul(.., t(weight)), add(.., bias)
    _remove_batch_dim(.., 1, batch, 0)         squeeze(.., 1)
    _vmap_decrement_nesting()

torch.export writes down the calls that open and close a transform. Between them tensors have other axes than they show,
and no pass could look at them, so this part of the graph is run once more on the sizes that export found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.autograd import forward_ad
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from tgfx.ir.tree import find

_MODULE = "torch._functorch.predispatch"
_ASIDE = "lazy_load_decompositions"


class TransformNotClosedError(Exception):
    """The graph leaves a transform otherwise than by its end."""


def write_out_transforms(module: fx.GraphModule) -> bool:
    """In place; whether there were any."""
    regions = _regions(module.graph)
    for region in regions:
        _write_out(module, region)
    return bool(regions)


def _regions(graph: fx.Graph) -> list[list[fx.Node]]:
    """The nodes of each outermost transform, in order; tensors of the model that are named there are left out."""
    found: list[list[fx.Node]] = []
    depth = 0
    for node in list(graph.nodes):
        name = _transform_call(node)
        if name == _ASIDE:
            graph.erase_node(node)
            continue
        opens = name is not None and name.endswith("_increment_nesting")
        if opens and not depth:
            found.append([])
        depth += opens
        if depth and node.op != "get_attr":
            found[-1].append(node)
        elif name is not None:
            raise TransformNotClosedError(f"{name} outside of its transform")
        depth -= name is not None and name.endswith("_decrement_nesting")
    if depth:
        raise TransformNotClosedError("a transform without an end")
    return found


def _transform_call(node: fx.Node) -> str | None:
    inside = node.op == "call_function" and getattr(node.target, "__module__", None) == _MODULE
    return str(getattr(node.target, "__name__", "")) if inside else None


def _write_out(module: fx.GraphModule, region: list[fx.Node]) -> None:
    graph, inside = module.graph, set(region)
    given = list(dict.fromkeys(arg for node in region for arg in node.all_input_nodes if arg not in inside))
    results = [node for node in region if any(user not in inside for user in node.users)]
    values = _values(module, given)
    with _left_as_before():
        once = make_fx(_run_of(region, given, results))(*values)
    written = make_fx(functionalize(once))(*values)  # vmap's own rules write in place; levels are counted from none
    where = dict(zip([n for n in written.graph.nodes if n.op == "placeholder"], given, strict=True))
    for node in written.graph.nodes:
        if node.op == "get_attr":  # a constant that the transform made
            name = f"transform_{len(list(module.named_buffers()))}_{node.target}"
            module.register_buffer(name, getattr(written, str(node.target)), persistent=False)
            node.target = name
        elif node.op == "call_function":
            node.meta.pop("nn_module_stack", None)
            node.meta["stack_trace"] = region[0].meta.get("stack_trace")
    with graph.inserting_before(region[-1].next):
        outputs: Any = graph.graph_copy(written.graph, where)
    for node, new in zip(results, outputs, strict=True):
        node.replace_all_uses_with(new, delete_user_cb=lambda user: user not in inside, propagate_meta=False)
    for node in reversed(region):
        graph.erase_node(node)


@contextmanager
def _left_as_before() -> Iterator[None]:
    """A run that breaks off leaves its transforms open, and whatever runs next would be inside of them."""
    depth, level = torch._C._functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    try:
        yield
    finally:
        if torch._C._functorch.get_dynamic_layer_stack_depth() > depth:
            torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while forward_ad._current_level > level:
            forward_ad.exit_dual_level()


def _run_of(region: list[fx.Node], given: list[fx.Node], results: list[fx.Node]) -> Any:
    graph = fx.Graph()
    known = {node: graph.placeholder(node.name) for node in given}
    for node in region:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.output([known[node] for node in results])
    return fx.Interpreter(fx.GraphModule({}, graph)).run


def _values(module: fx.GraphModule, nodes: list[fx.Node]) -> list[Any]:
    """As fake as those of torch.export: sizes that are free stay free."""
    known = [node.meta.get("val") for node in nodes]
    fake = detect_fake_mode(known)
    if fake is None:
        raise TransformNotClosedError("a transform of nothing that is known")
    return [
        fake.from_tensor(find(module, str(node.target)), static_shapes=True)
        if node.op == "get_attr" and not isinstance(value, torch.Tensor)
        else value
        for node, value in zip(nodes, known, strict=True)
    ]
