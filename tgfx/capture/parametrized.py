"""Parametrised tensors (torch.nn.utils.parametrize): taken for plain ones by the analysis, and trained as they are.

    conv.weight = g * v / |v|      analysis, cost and compact model see   conv.weight
                                   the gated model still trains           g and v

The compact model holds the tensors that the parametrization gives: cutting g and v themselves would change the norm.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from tgfx.errors import InputError
from tgfx.ir.tree import named_modules

Parametrizations = dict[str, nn.ModuleDict]  # by the path of the layer

# hooks that write a tensor before each forward; torch has no way to evaluate or copy them apart from running the layer
_OLD_HOOKS: dict[type, tuple[str, str]] = {
    WeightNorm: (
        "nn.utils.weight_norm",
        "nn.utils.parametrizations.weight_norm instead, or nn.utils.remove_weight_norm(layer) first",
    ),
    SpectralNorm: (
        "nn.utils.spectral_norm",
        "nn.utils.parametrizations.spectral_norm instead, or nn.utils.remove_spectral_norm(layer) first",
    ),
    prune.BasePruningMethod: ("nn.utils.prune", 'nn.utils.prune.remove(layer, "weight") first'),
}


def refuse_what_rewrites_weights(model: nn.Module) -> None:
    """The old way to parametrise is refused: the layer's weight is no parameter and would be cut as it was once."""
    if parametrize.is_parametrized(model):
        raise InputError(
            "tensors of the model itself are parametrised",
            expected="parametrizations on layers",
            found=", ".join(_tensors_of(model)),
            fix="move the tensor into a submodule, or torch.nn.utils.parametrize.remove_parametrizations first",
        )
    for kind, (name, fix) in _OLD_HOOKS.items():
        layers = [
            path
            for path, module in named_modules(model)
            if any(isinstance(hook, kind) for hook in module._forward_pre_hooks.values())
        ]
        if layers:
            raise InputError(
                f"{name} rewrites weights in a hook, where tgfx cannot follow them",
                expected="weights that are parameters, or torch.nn.utils.parametrize",
                found=f"{name} on {', '.join(layers[:4])}" + (f" and {len(layers) - 4} more" * (len(layers) > 4)),
                fix=f"use {fix}",
            )


def take_parametrizations(model: nn.Module) -> Parametrizations:
    """Make the parametrised tensors of `model` (our copy, in eval mode) plain ones, of the value that they have."""
    taken: Parametrizations = {}
    plain: dict[int, nn.ModuleDict] = {}
    for path, module in named_modules(model, repeat=True):
        if id(module) in plain:
            taken[path] = plain[id(module)]
        elif parametrize.is_parametrized(module):
            taken[path] = plain[id(module)] = _take(module)
    return taken


def _take(module: nn.Module) -> nn.ModuleDict:
    values = {name: getattr(module, name).detach().clone() for name in _tensors_of(module)}
    own = module._modules.pop("parametrizations")
    assert isinstance(own, nn.ModuleDict)
    module.__class__ = type(module).__bases__[0]
    for name, value in values.items():
        originals = [p for p in own[name].parameters(recurse=False)]
        if originals:
            setattr(module, name, nn.Parameter(value, requires_grad=any(p.requires_grad for p in originals)))
        else:
            module.register_buffer(name, value)
    return own


def _tensors_of(module: nn.Module) -> list[str]:
    return list(module._modules["parametrizations"]._modules)  # type: ignore[union-attr]


def put_back(root: nn.Module, taken: Parametrizations) -> None:
    """Parametrise the layers of `root` again. Layers on the way are copied: the captured source shares them."""
    done: dict[int, nn.Module] = {}
    for path, parametrizations in taken.items():
        parent = root
        *way, last = path.split(".")
        for part in way:
            child = parent._modules[part]
            assert child is not None
            parent._modules[part] = _with_own_tables(child)
            parent = parent._modules[part]  # type: ignore[assignment]
        if id(parametrizations) not in done:
            layer = parent._modules[last]
            assert layer is not None
            done[id(parametrizations)] = _parametrised(layer, parametrizations)
        parent._modules[last] = done[id(parametrizations)]


def _with_own_tables(module: nn.Module) -> nn.Module:
    twin = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        setattr(twin, table, dict(getattr(module, table)))
    return twin


def _parametrised(layer: nn.Module, parametrizations: nn.ModuleDict) -> nn.Module:
    twin = _with_own_tables(layer)
    parametrize._inject_new_class(twin)
    twin._modules["parametrizations"] = parametrizations
    for name in parametrizations:
        twin._parameters.pop(name, None)
        twin._buffers.pop(name, None)
        parametrize._inject_property(twin, name)
    return twin


@contextmanager
def parametrizations_at_rest(model: nn.Module) -> Iterator[None]:
    """In train mode, a look at a spectral norm moves it; not in here."""
    parts = [
        part for _, m in named_modules(model) if parametrize.is_parametrized(m) for part in m.parametrizations.modules()
    ]
    modes = [(part, part.training) for part in parts]
    try:
        for part in parts:
            part.training = False
        yield
    finally:
        for part, training in modes:
            part.training = training


def parametrised_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors that parametrizations give, by the name they have for the layer."""
    found: dict[str, Tensor] = {}
    with parametrizations_at_rest(model), torch.no_grad():
        for path, module in model.named_modules(remove_duplicate=False):
            for name in _tensors_of(module) if parametrize.is_parametrized(module) else ():
                originals = list(module.parametrizations[name].parameters(recurse=False))  # type: ignore[index]
                tensor = getattr(module, name)
                trained = any(p.requires_grad for p in originals)
                found[f"{path}.{name}"] = nn.Parameter(tensor, requires_grad=trained) if originals else tensor
    return found
