"""Example inputs: what the user gave, what the ecosystem says, or what the first layers want."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tgfx.errors import InputError
from tgfx.ir.writes import has_memory, memory_of

Example = tuple[tuple[Any, ...], dict[str, Any]]


def example_inputs_for(model: nn.Module, given: Any) -> Example:
    """(args, kwargs) to call the model with."""
    if given is None:
        given = _declared(model)
    if given is None:
        given = _inferred(model)
    if isinstance(given, torch.Tensor):
        return (given,), {}
    if isinstance(given, dict):
        return unshared((), dict(given))
    if isinstance(given, tuple | list):
        return unshared(tuple(given), {})
    raise InputError(
        "example_inputs cannot be used",
        expected="a tensor, a tuple of arguments, or a dict of keyword arguments",
        found=type(given).__name__,
        fix="tgfx.transform(model, torch.randn(1, 3, 224, 224)) or transform(model, {'input_ids': ids})",
    )


def unshared(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example:
    """The same example with memory of its own for every tensor.

    Two arguments that are one tensor, or views of one, are one value to whoever records what is done with tensors, and
    the graph would read the first of them for both.
    """
    seen: set[Any] = set()

    def apart(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        place = memory_of(value) if has_memory(value) else ("without memory", id(value))
        if place in seen:
            return value.detach().clone().requires_grad_(value.requires_grad)
        seen.add(place)
        return value

    return torch.utils._pytree.tree_map(apart, (args, kwargs))


def told_apart(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Example | None:
    """The example with other numbers where two tensors hold the same; None if none do, or nothing else is known."""
    seen: list[torch.Tensor] = []
    changed = False

    def turned(value: Any) -> Any:
        nonlocal changed
        if not isinstance(value, torch.Tensor):
            return value
        twin = any(_equal(value, other) for other in seen)
        seen.append(value)
        if not twin or not value.ndim:
            return value
        other = value.roll(len(seen) - 1, -1)  # of the numbers that the example has, which the model surely takes
        changed = changed or not _equal(other, value)
        return other

    example = torch.utils._pytree.tree_map(turned, (args, kwargs))
    return example if changed else None


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


def _declared(model: nn.Module) -> Any:
    """Lightning's example_input_array, timm's pretrained_cfg, Hugging Face's dummy_inputs."""
    array = getattr(model, "example_input_array", None)
    if array is not None:
        return array
    cfg = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    size = cfg.get("input_size") if isinstance(cfg, dict) else getattr(cfg, "input_size", None)
    if size is not None:
        return _random(1, *size)
    dummy = getattr(model, "dummy_inputs", None)
    return dict(dummy) if isinstance(dummy, dict) else dummy


def _inferred(model: nn.Module) -> Any:
    """One tensor for the first layer that says what it reads; of usual image sizes the first that runs."""
    required = [
        p for p in inspect.signature(model.forward).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    for candidate in _candidates(model) if len(required) <= 1 else ():
        if _runs(model, candidate):
            return candidate
    raise InputError(
        "cannot guess what this model takes",
        expected="example_inputs, since the first layers do not say",
        found=f"{type(model).__name__}.forward{inspect.signature(model.forward)}",
        fix="pass one call's arguments: tgfx.transform(model, (x, y)) or tgfx.transform(model, {'x': x, 'y': y})",
    )


def _candidates(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            dims = len(module.kernel_size)
            named = [getattr(model, a, None) for a in ("image_size", "img_size")]
            usual = {
                1: (256, 1024, 16000),
                2: (224, 64, 32, 299) if module.in_channels > 1 else (28, 32, 64, 224),
                3: (32, 64),
            }
            for extent in (*(n for n in named if isinstance(n, int)), *usual[dims]):
                yield _random(1, module.in_channels, *(extent,) * dims)
            return
        if isinstance(module, nn.Linear):
            yield _random(1, module.in_features)
            yield _random(1, 4, module.in_features)
            return
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            yield torch.zeros(1, min(8, module.num_embeddings), dtype=torch.long)
            return


def _runs(model: nn.Module, example: torch.Tensor) -> bool:
    """Tried on a copy: a failed guess must leave no trace in the model."""
    trial = copy.deepcopy(model).eval()
    try:
        with torch.no_grad():
            trial(example)
    except Exception:
        return False
    return True


def _random(*size: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(0))
