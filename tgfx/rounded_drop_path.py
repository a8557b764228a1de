"""Drop path as DeiT's and Hugging Face's code has it: x / keep * floor(keep + uniform()).

Rounded uniform numbers are others than any layer of torch draws from the same random state. So the gated model keeps
such a layer, and draws what the model draws; the cut model gets torch's own layer, which drops as often.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from tgfx.capture.drop_path import (
    FEATURE_DROPOUT,
    SAMPLES,
    noise_shape,
    per_sample,
    recognised,
    train_calls,
    watch_ranks,
)
from tgfx.ir.buffers import buffers_restored
from tgfx.ir.tree import named_modules, put_module
from tgfx.verify import eval_mode


def replace_rounded_drop_paths(compact: fx.GraphModule, inputs: list[Any]) -> None:
    """Swap layers of a cut model in place that round uniform numbers. `inputs`: one value for each placeholder."""
    ranks, handles = watch_ranks(compact)
    if not handles:
        return
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]), buffers_restored(compact), eval_mode(compact):
            fx.Interpreter(compact).run(*inputs, enable_io_processing=False)
    except Exception:
        return  # whoever verifies the model says what is wrong with it
    finally:
        for handle in handles:
            handle.remove()
    for path, rank, probability in recognised(compact, ranks, rounded_drop_probability):
        old = compact.get_submodule(path)
        new = FEATURE_DROPOUT[rank](probability).train(old.training)
        for name in [name for name, module in named_modules(compact, repeat=True) if module is old]:
            put_module(compact, name, new)
            _write_calls(compact.graph, name, rank)
    compact.recompile()


def _write_calls(graph: fx.Graph, path: str, rank: int) -> None:
    for node in list(graph.nodes):
        if node.op == "call_module" and node.target == path:
            with graph.inserting_before(node):
                out = per_sample(graph, node.all_input_nodes[0], path, rank)
            out.meta = dict(node.meta)
            node.replace_all_uses_with(out, propagate_meta=False)
            graph.erase_node(node)


def rounded_drop_probability(layer: nn.Module, rank: int) -> float | None:
    """p if the layer, in train mode, is x / (1 - p) * floor(1 - p + uniform) with one draw per sample."""
    seen = train_calls(layer, rank) or []
    names = [{"add_": "add", "floor_": "floor"}.get(name, name) for name, _ in seen]  # but x itself stays as it is
    if sorted(names) != ["add", "div", "floor", "mul", "rand"]:
        return None
    size, keep = seen[names.index("rand")][1][0], seen[names.index("add")][1][-1]
    if tuple(size) != noise_shape(SAMPLES, rank) or not isinstance(keep, float) or not 0 < keep < 1:
        return None
    return 1.0 - keep if _rounds(layer, rank, keep) else None


def _rounds(layer: nn.Module, rank: int, keep: float) -> bool:
    """Whether it gives these very numbers: the names of operators do not tell what goes where."""
    x = torch.linspace(-1, 1, 64 * 2 ** (rank - 1)).reshape((64,) + (2,) * (rank - 1))
    with torch.random.fork_rng(devices=[]):
        state = torch.get_rng_state()
        expected = x.div(keep) * torch.rand(noise_shape(64, rank)).add(keep).floor()
        torch.set_rng_state(state)
        was = layer.training
        try:
            with torch.no_grad():
                return torch.allclose(layer.train()(x), expected, rtol=1e-6, atol=0)
        finally:
            layer.train(was)
