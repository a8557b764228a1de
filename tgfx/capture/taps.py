"""Convolutions whose windows can be gated entry by entry: taps.

    y[o] = sum over c, k of  w[o, c, k] · x[c, shifted by k]        a tap is one pair (c, k)

A tap is what all filters of a layer read of one channel at one place of the window. Taps belong to the weight, so it
must be seen in all of its uses: as the weight of convolutions that are called as layers, and nothing else.
"""

from __future__ import annotations

from collections import Counter

from torch import nn

from tgfx.ir.source import Source
from tgfx.ir.tree import named_parameters
from tgfx.ops.modules import has_hooks

TAPPED = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def find_taps(source: Source) -> tuple[str, ...]:
    """Names of the weights of such convolutions, in the order of the graph."""
    graphs = [source, *([source.training] if source.training is not None else [])]
    named = [(one, node) for one in graphs for node in one.module.graph.nodes]
    called = [str(node.target) for _, node in named if node.op == "call_module"]
    read = {str(node.target) for _, node in named if node.op == "get_attr"}
    holders = Counter(id(parameter) for _, parameter in named_parameters(source.module))
    found = []
    for path in dict.fromkeys(called):
        module, name = source.module.get_submodule(path), f"{path}.weight"
        alone = _is_tapped(module) and holders[id(module.weight)] == 1 and name not in read
        if alone and path not in source.opaque and not has_hooks(module):
            found.append(name)
    return tuple(found)


def _is_tapped(module: nn.Module) -> bool:
    """Windows of more than one entry, over all channels; at the border, zeros."""
    return (
        isinstance(module, TAPPED)
        and type(module) in TAPPED
        and module.groups == 1
        and module.padding_mode == "zeros"
        and module.weight.is_floating_point()
        and module.weight.shape[2:].numel() > 1
    )
