"""torch.nn layers: which can be cut, how they read as functions, and how a smaller one is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, fx, nn

_CONV: dict[type, Callable] = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_DECONV: dict[type, Callable] = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}
_BATCH_NORM = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_INSTANCE_NORM = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
_CUTTABLE = (
    *_CONV, *_DECONV, nn.Linear, *_BATCH_NORM, *_INSTANCE_NORM, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.Embedding,
    nn.PReLU,
)  # fmt: skip

# what _update_sizes sets; all other attributes of a layer are the user's
SIZES = (
    "groups", "in_channels", "out_channels", "in_features", "out_features", "num_features", "normalized_shape",
    "num_channels", "num_groups", "num_embeddings", "embedding_dim", "num_parameters",
)  # fmt: skip


def is_batch_norm(module: nn.Module) -> bool:
    return type(module) in _BATCH_NORM


def is_instance_norm(module: nn.Module) -> bool:
    return type(module) in _INSTANCE_NORM


def has_hooks(module: nn.Module) -> bool:
    """Hooks run when the layer is called: it must stay a layer, and what they do to channels is not known."""
    tables = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(tables)


def is_lowerable(module: nn.Module) -> bool:
    """Whether a call of this module can be written as a function of its own weight."""
    return type(module) in _CONV or type(module) in _DECONV or type(module) is nn.Linear


def reads_as_function(module: nn.Module, node: fx.Node) -> bool:
    """Whether this very call can be: not with more than its input (the output_size of a transposed convolution)."""
    return is_lowerable(module) and len(node.args) + len(node.kwargs) == 1


def is_resizable_module(module: nn.Module) -> bool:
    """Layers we know how to cut, and torch's own layers that hold no tensor at all."""
    if type(module) in _CUTTABLE:
        return True
    return type(module).__module__.startswith("torch.nn.") and not has_state(module)


def has_state(module: nn.Module) -> bool:
    """Whether the module, or one inside it, holds a parameter or a buffer."""
    if any(t is not None for t in module._parameters.values()) or any(t is not None for t in module._buffers.values()):
        return True
    return any(child is not None and has_state(child) for child in module._modules.values())


def lower(graph: fx.Graph, node: fx.Node, module: nn.Module, gated: dict[str, fx.Node]) -> fx.Node:
    """Write `module(x)` as a function call; `gated` replaces parameters by nodes. Insert before `node`."""

    def tensor(name: str) -> Any:
        if name in gated:
            return gated[name]
        return graph.get_attr(f"{node.target}.{name}") if getattr(module, name) is not None else None

    x = node.args[0] if node.args else node.kwargs["input"]
    weight, bias = tensor("weight"), tensor("bias")
    if type(module) is nn.Linear:
        return graph.call_function(F.linear, (x, weight, bias))
    if type(module) in _CONV:
        padding = module.padding
        if module.padding_mode != "zeros":
            x = graph.call_function(F.pad, (x, module._reversed_padding_repeated_twice, module.padding_mode))
            padding = (0,) * len(module.kernel_size)
        args = (x, weight, bias, module.stride, padding, module.dilation, module.groups)
        return graph.call_function(_CONV[type(module)], args)
    if type(module) in _DECONV:
        args = (
            x,
            weight,
            bias,
            module.stride,
            module.padding,
            module.output_padding,
            module.groups,
            module.dilation,
        )
        return graph.call_function(_DECONV[type(module)], args)
    raise AssertionError(f"{type(module).__name__} is not lowerable")


def cut_module(
    module: nn.Module, tensors: dict[str, Tensor], groups: int | None, shape: tuple[int, ...] | None
) -> nn.Module:
    """A copy of a leaf layer that holds these tensors, its size attributes brought up to date.

    groups and shape: of the call in the cut model (groups that are left, shape of the input), where it is known.
    """
    smaller = copy.copy(module)
    smaller._parameters = dict(module._parameters)
    smaller._buffers = dict(module._buffers)
    for name, tensor in tensors.items():
        table = smaller._parameters if name in smaller._parameters else smaller._buffers
        table[name] = tensor
    _update_sizes(smaller, groups, shape)
    return smaller


def _update_sizes(module: nn.Module, groups: int | None, shape: tuple[int, ...] | None) -> None:
    weight = getattr(module, "weight", None)
    kind = type(module)
    if kind in _CONV or kind in _DECONV:
        module.groups = groups if groups is not None else module.groups
        first, second = weight.shape[0], weight.shape[1] * module.groups
        module.out_channels, module.in_channels = (first, second) if kind in _CONV else (second, first)
    elif kind is nn.Linear:
        module.out_features, module.in_features = weight.shape
    elif kind in _BATCH_NORM or kind in _INSTANCE_NORM:
        vector = weight if weight is not None else module.running_mean
        if vector is not None:
            module.num_features = vector.shape[0]
        elif shape is not None:
            module.num_features = shape[1 if len(shape) == len(_spatial_axes(kind)) + 2 else 0]
    elif kind in (nn.LayerNorm, nn.RMSNorm):
        if weight is not None:
            module.normalized_shape = tuple(weight.shape)
        elif shape is not None:
            module.normalized_shape = tuple(shape[len(shape) - len(module.normalized_shape) :])
    elif kind is nn.GroupNorm:
        if weight is not None or shape is not None:
            module.num_channels = weight.shape[0] if weight is not None else shape[1]
        module.num_groups = groups if groups is not None else module.num_groups
    elif kind is nn.Embedding:
        module.num_embeddings, module.embedding_dim = weight.shape
    elif kind is nn.PReLU:
        module.num_parameters = weight.numel()


def _spatial_axes(kind: type) -> range:
    """Axes after batch and channels that this norm works over, by the digit in its name."""
    return range(int(kind.__name__[-2]) if kind.__name__[-2].isdigit() else 1)
