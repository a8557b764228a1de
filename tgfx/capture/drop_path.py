"""Drop path (stochastic depth) of any library as torch's own layers, recognised by what it does.

    drop_path(x)  ->  nn.Dropout3d(p)(x[None])[0]      one random number per sample, the same draw
    drop_path(x)  ->  x                                where it never drops

A layer without tensors that asks for the mode is run once in train mode; if all it does is to multiply by scaled
Bernoulli noise of one entry per sample, the equal torch layer takes its place. Otherwise it stays as it is (but see
rounded_drop_path.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tgfx.capture.tracer import acts_on_mode
from tgfx.ir.tree import named_modules, put_module
from tgfx.ops.modules import has_hooks

FEATURE_DROPOUT = {2: nn.Dropout1d, 3: nn.Dropout2d, 4: nn.Dropout3d, 5: nn.Dropout3d}
SAMPLES = 3


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.seen.append((func._schema.name.removeprefix("aten::"), args))
        return func(*args, **(kwargs or {}))


def watch_ranks(model: nn.Module) -> tuple[dict[str, set[int]], list[Any]]:
    """Hooks that note how many axes the input of each mode-dependent layer has; remove them after the run."""
    ranks: dict[str, set[int]] = {}
    handles = []
    for path, layer in named_modules(model):
        if path and acts_on_mode(layer):

            def note(_: nn.Module, args: tuple, kwargs: dict, path: str = path) -> None:
                known = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)
                ranks.setdefault(path, set()).add(args[0].ndim if known else -1)

            handles.append(layer.register_forward_pre_hook(note, with_kwargs=True))
    return ranks, handles


def replace_drop_paths(model: nn.Module, ranks: dict[str, set[int]]) -> None:
    """Swap layers of `model` (our own copy) in place that draw as torch's own do; what is not recognised stays."""
    for path, rank, probability in recognised(model, ranks, drop_probability):
        new = nn.Identity() if probability == 0 else _per_sample_dropout(rank, probability)
        new.train(model.get_submodule(path).training)
        put_module(model, path, new)


def recognised(
    model: nn.Module, ranks: dict[str, set[int]], probability_of: Callable[[nn.Module, int], float | None]
) -> list[tuple[str, int, float]]:
    """Path, rank of the input and probability of each layer that `probability_of` knows."""
    found = []
    for path, seen in ranks.items():
        layer, rank = model.get_submodule(path), next(iter(seen))
        if len(seen) != 1 or rank not in FEATURE_DROPOUT or has_hooks(layer):
            continue
        probability = probability_of(layer, rank)
        if probability is not None:
            found.append((path, rank, probability))
    return found


def _per_sample_dropout(rank: int, probability: float) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(per_sample(graph, graph.placeholder("x"), "per_sample", rank))
    return fx.GraphModule({"per_sample": FEATURE_DROPOUT[rank](probability)}, graph, class_name="DropPath")


def per_sample(graph: fx.Graph, x: fx.Node, path: str, rank: int) -> fx.Node:
    """Samples as the channels of a batch of one. Two axes become one where torch has no layer for that many."""
    flat = graph.call_method("flatten", (x, 2, 3)) if rank == 5 else x  # neither batch nor channels, first or last
    wide = graph.call_method("unsqueeze", (flat, 0))
    narrow = graph.call_method("squeeze", (graph.call_module(path, (wide,)), 0))
    return graph.call_method("reshape_as", (narrow, x)) if rank == 5 else narrow


def drop_probability(layer: nn.Module, rank: int) -> float | None:
    """p if the layer, in train mode, is x * bernoulli(1 - p) / (1 - p) with one draw per sample; None otherwise."""
    seen = train_calls(layer, rank)
    if seen is None:
        return None
    if not seen:
        return 0.0
    names = [name for name, _ in seen]
    if names[1:] != ["bernoulli_", "div_", "mul"] or names[0] not in ("new_empty", "empty"):
        return None
    noise, divisor = seen[1][1][0], seen[2][1][1]
    keep = seen[1][1][1] if len(seen[1][1]) > 1 else 0.5  # arguments at their default are not passed on
    is_per_sample = tuple(noise.shape) == noise_shape(SAMPLES, rank)
    divided = float(divisor) if not isinstance(divisor, torch.Tensor) else float(divisor.item())
    if not is_per_sample or abs(divided - keep) > 1e-12:
        return None
    return 1.0 - keep


def train_calls(layer: nn.Module, rank: int) -> list[tuple[str, tuple]] | None:
    """The operators that the layer calls in train mode; None if it does not run."""
    x = torch.ones((SAMPLES,) + (2,) * (rank - 1))
    was = layer.training
    layer.train()
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad(), _Ops() as ops:
            layer(x)
    except Exception:
        return None
    finally:
        layer.train(was)
    return [(name, args) for name, args in ops.seen if name not in ("detach", "alias", "detach_")]


def noise_shape(samples: int, rank: int) -> tuple[int, ...]:
    """One entry per sample."""
    return (samples,) + (1,) * (rank - 1)
