"""Functions back to the layers they came from.

    F.batch_norm(x, bn.running_mean, ...)        ->  bn(x)
    aten.linear(x, fc.weight, fc.bias)           ->  fc(x)
    aten.dropout(x, p, False)                    ->  nn.Dropout(p)(x)

torch.export (and fx, inside a subclass of a torch layer) leaves function calls with the mode baked in. As layers they
follow train() and eval() again, and the compact model is made of torch's own modules. Only calls that are, in both
modes and in every setting, what the layer would do become layers; others stay functions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from tgfx.capture.layer_calls import BATCH_NORM, bound_norm, counts_batches, is_tensor_of, layer_called
from tgfx.capture.modes import owner_of
from tgfx.ir.dead_code import eliminate_dead_code
from tgfx.ir.tree import has_module, put_module
from tgfx.ops.modules import has_hooks
from tgfx.ops.naming import op_name

_LAYERS: dict[str, tuple[type, ...]] = {
    "linear": (nn.Linear,),
    "conv1d": (nn.Conv1d,),
    "conv2d": (nn.Conv2d,),
    "conv3d": (nn.Conv3d,),
    "conv_transpose1d": (nn.ConvTranspose1d,),
    "conv_transpose2d": (nn.ConvTranspose2d,),
    "conv_transpose3d": (nn.ConvTranspose3d,),
    "layer_norm": (nn.LayerNorm,),
    "group_norm": (nn.GroupNorm,),
    "embedding": (nn.Embedding,),
    "rms_norm": (nn.RMSNorm,),
}


def raise_layers(module: fx.GraphModule, model: nn.Module) -> None:
    """Rewrite `module`'s graph in place (it is our own copy); `model` has the layers it was captured from."""
    _bring_layers(module, model)
    for node in module.graph.nodes:
        node.type = None  # annotations of the user's code; as strings they could not be pickled
        owner = owner_of(node)
        if owner and has_module(model, owner):
            module.add_submodule(owner, model.get_submodule(owner))
    graph = module.graph
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        name = op_name(node)
        if name in ("batch_norm", "instance_norm"):
            _raise_norm(module, node)
        elif name in ("feature_dropout", "alpha_dropout", "rrelu") and (owner := owner_of(node)):
            if not has_hooks(module.get_submodule(owner)):
                _replace(node, owner, node.args[0])
        elif name in _LAYERS:
            _raise_layer(module, node, _LAYERS[name])
        elif name == "dropout":
            _raise_dropout(module, node)
        elif name in _MAKERS:
            _raise_maker(module, node)
    _drop_batch_counters(graph)
    eliminate_dead_code(module)


def _bring_layers(module: fx.GraphModule, model: nn.Module) -> None:
    """Layers of which the graph only names tensors: have the layer itself there, under its name."""
    called = {layer_called(node) for node in module.graph.nodes}
    for node in module.graph.nodes:
        path = str(node.target).rpartition(".")[0]
        if node.op != "get_attr" or not path or not has_module(model, path):
            continue
        layer = model.get_submodule(path)
        if type(layer) is nn.modules.linear.NonDynamicallyQuantizableLinear:  # attention's name for a plain Linear
            layer = _as_plain(layer, nn.Linear)
        if type(layer).__module__.startswith("torch.nn.") or path in called:
            module.add_submodule(path, layer)


def _as_plain(layer: nn.Module, kind: type[nn.Module]) -> nn.Module:
    """torch's own class around the very same tensors and settings."""
    plain = kind.__new__(kind)
    plain.__dict__.update(layer.__dict__)
    return plain


def _owner(module: nn.Module, arg: Any, attribute: str) -> str | None:
    """The path of the layer whose `attribute` this argument is."""
    if not isinstance(arg, fx.Node) or arg.op != "get_attr":
        return None
    path, _, last = str(arg.target).rpartition(".")
    return path if last == attribute and path else None


def _raise_layer(module: fx.GraphModule, node: fx.Node, kinds: tuple[type, ...]) -> None:
    bound = _bind(node)
    weight, x = bound.get("weight"), bound.get("input")
    if op_name(node) == "embedding" and isinstance(node.target, torch._ops.OpOverload):
        names = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
        bound = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        weight, x = bound["weight"], bound.get("input", bound.get("indices"))
        bound["padding_idx"] = None if bound.get("padding_idx", -1) == -1 else bound["padding_idx"]
    path = _owner(module, weight, "weight")
    if path is None or not has_module(module, path):
        return
    layer = module.get_submodule(path)
    if type(layer) not in kinds or has_hooks(layer) or not _same_settings(layer, bound, op_name(node), path):
        return
    _replace(node, path, x)


def _same_settings(layer: nn.Module, bound: dict[str, Any], name: str, path: str) -> bool:
    bias = bound.get("bias")
    own_bias = getattr(layer, "bias", None)
    if (bias is None) != (own_bias is None):
        return False
    if bias is not None and str(bias.target) != f"{path}.bias":
        return False
    if name.startswith("conv"):
        return layer.padding_mode == "zeros" and all(
            _tuple(bound.get(key, default)) == _tuple(getattr(layer, key))
            for key, default in _CONV_SETTINGS
            if not (key == "output_padding" and "transpose" not in name)
            and not _broadcasts(bound.get(key, default), getattr(layer, key))
        )
    if name in ("layer_norm", "rms_norm"):
        return tuple(bound.get("normalized_shape", ())) == tuple(layer.normalized_shape) and (
            bound.get("eps", 1e-5 if name == "layer_norm" else None) == layer.eps
        )
    if name == "group_norm":
        return bound.get("num_groups") == layer.num_groups and bound.get("eps", 1e-5) == layer.eps
    if name == "embedding":
        return _same_look_up(layer, bound)
    return True


def _same_look_up(layer: nn.Embedding, bound: dict[str, Any]) -> bool:
    """Also in what gradients it gives: none for the row that pads, and sparse or scaled ones."""
    padding = bound.get("padding_idx")
    if isinstance(padding, int) and padding < 0:
        padding += layer.num_embeddings
    asked = (padding, bound.get("max_norm"), bool(bound.get("scale_grad_by_freq")), bool(bound.get("sparse")))
    return asked == (layer.padding_idx, None, layer.scale_grad_by_freq, layer.sparse) and layer.max_norm is None


_CONV_SETTINGS = (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1), ("output_padding", 0))


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list | tuple) else value


def _broadcasts(given: Any, own: Any) -> bool:
    return isinstance(own, tuple) and isinstance(given, int) and set(own) == {given}


_SIGNATURES = {
    "linear": ("input", "weight", "bias"),
    "conv1d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv2d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    "conv3d": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
    **{
        f"conv_transpose{d}d": ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
        for d in (1, 2, 3)
    },
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
    "embedding": ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    "dropout": ("input", "p", "training", "inplace"),
}


def _bind(node: fx.Node) -> dict[str, Any]:
    bound = dict(zip(_SIGNATURES[op_name(node)], node.args, strict=False))
    bound.update(node.kwargs)
    if "train" in bound:
        bound["training"] = bound.pop("train")
    return bound


def _raise_norm(module: fx.GraphModule, node: fx.Node) -> None:
    """F.batch_norm and F.instance_norm that a layer made, or that do what the layer would do in both modes."""
    path = layer_called(node) or _made_by_own_layer(module, node)
    if path is None or not has_module(module, path):
        return
    layer = module.get_submodule(path)
    if has_hooks(layer):
        return  # torch.export has written out what they do
    if isinstance(layer, BATCH_NORM) and type(layer) not in BATCH_NORM:
        put_module(module, path, _plain_batch_norm(layer))
    _replace(node, path, bound_norm(node)["input"])


def _made_by_own_layer(module: fx.GraphModule, node: fx.Node) -> str | None:
    """The layer whose tensors this uses, if the call is in the forward of that very layer of torch's."""
    bound = bound_norm(node)
    owner, path = owner_of(node), _owner(module, bound["running_mean"], "running_mean")
    if owner is None or path is None or not (has_module(module, owner) and has_module(module, path)):
        return None
    layer = module.get_submodule(path)
    own = all(is_tensor_of(layer, path, name, bound[name]) for name in ("weight", "bias"))
    return path if own and module.get_submodule(owner) is layer else None


def _plain_batch_norm(layer: nn.modules.batchnorm._BatchNorm) -> nn.Module:
    """torch's own layer around the very same tensors (a subclass may add an activation: it stays a child)."""
    base = next(k for k in type(layer).__mro__ if k in BATCH_NORM)
    plain = base(1, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
    plain._parameters, plain._buffers = layer._parameters, layer._buffers
    plain._modules, plain.num_features = layer._modules, layer.num_features
    plain.training = layer.training
    return plain


def _raise_dropout(module: fx.GraphModule, node: fx.Node) -> None:
    """Dropout that torch's own layer made; a call of the user's stays one, be it always on or always off."""
    owner = owner_of(node)
    layer = module.get_submodule(owner) if owner and has_module(module, owner) else None
    if owner is None or type(layer) is not nn.Dropout or has_hooks(layer):
        return
    _replace(node, owner, _bind(node)["input"])


_MAKERS = {"zeros": "new_zeros", "ones": "new_ones", "full": "new_full", "empty": "new_empty"}


def _raise_maker(module: fx.GraphModule, node: fx.Node) -> None:
    """aten.zeros([n, size]) -> x.new_zeros([n, size]): unpickling traces anew, and sees sizes only through a tensor."""
    anchor = next((n for n in module.graph.nodes if n.op == "placeholder"), None)
    if not isinstance(node.target, torch._ops.OpOverload) or anchor is None or not node.all_input_nodes:
        return
    kwargs = {k: v for k, v in node.kwargs.items() if k in ("dtype", "device")}
    if kwargs.get("dtype") is None and op_name(node) != "full":
        kwargs["dtype"] = torch.get_default_dtype()
    elif kwargs.get("dtype") is None:
        return
    with module.graph.inserting_before(node):
        call = module.graph.call_method(_MAKERS[op_name(node)], (anchor, *node.args), kwargs)
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call, propagate_meta=False)
    module.graph.erase_node(node)


def _replace(node: fx.Node, path: str, x: Any) -> None:
    with node.graph.inserting_before(node):
        call = node.graph.call_module(path, (x,))
    call.meta = dict(node.meta)
    node.replace_all_uses_with(call, propagate_meta=False)
    node.graph.erase_node(node)


def _drop_batch_counters(graph: fx.Graph) -> None:
    """num_batches_tracked += 1 is the layer's own business again."""
    called = {str(node.target) for node in graph.nodes if node.op == "call_module"}
    for node in reversed(list(graph.nodes)):
        if counts_batches(node) and str(node.args[0].target).rpartition(".")[0] in called:
            graph.erase_node(node)
