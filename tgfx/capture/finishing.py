"""What a captured graph needs before passes look at it: all of the model's layers and tensors, by their old names."""

from __future__ import annotations

from torch import nn

from tgfx.capture.arguments import put_by_position
from tgfx.capture.out_arguments import write_out_arguments
from tgfx.capture.raising import raise_layers
from tgfx.ir.source import Source
from tgfx.ir.tree import named_modules, named_tensors, put_in_order, put_tensor


def finished(model: nn.Module, source: Source) -> Source:
    """Everything the model holds is there under its old name, also what the graph does not use."""
    module = source.module
    module.train(model.training)
    write_out_arguments(module)
    put_by_position(module)
    raise_layers(module, model)
    have = dict(named_modules(module, repeat=True))
    for name, child in named_modules(model, repeat=True):
        if name and name not in have and _leaf(child):
            module.add_submodule(name, child)
    named = {name for name, _ in named_tensors(module)}
    for name, tensor in named_tensors(model):
        if name not in named:
            put_tensor(module, name, tensor, model)
    have = dict(named_modules(module, repeat=True))
    for name, child in named_modules(model, repeat=True):
        if name in have:
            have[name].training = child.training
            have[name]._non_persistent_buffers_set |= child._non_persistent_buffers_set
    put_in_order(module, model)
    return source


def _leaf(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.") and not list(module.children())
