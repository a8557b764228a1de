"""From gated weights to a plain model whose closed weights are exactly zero."""

from __future__ import annotations

import copy
import warnings

import torch
from torch import Tensor, fx, nn

from tgfx.errors import GranularityError, VerificationError
from tgfx.gates import Elementwise
from tgfx.ir.autocast_switch import refuse_autocast
from tgfx.ir.pickled_code import guard_pickle
from tgfx.ir.portable import make_portable
from tgfx.ir.rng import untouched_rng
from tgfx.ops.weight_gate import row_blocks
from tgfx.passes.insert_gates import BANK
from tgfx.rounded_drop_path import replace_rounded_drop_paths
from tgfx.verify import as_model_takes, compared, eval_mode
from tgfx.weight.gated import WeightGatedModule

_TABLES = ("_modules", "_parameters", "_buffers")


def shrink_weights(gated: WeightGatedModule, *, round_to: int | None, verify: bool) -> fx.GraphModule:
    """What `tgfx.shrink(gated)` does where single weights are gated."""
    if round_to is not None:
        raise GranularityError(
            "round_to rounds numbers of channels; here single weights are gated",
            expected="round_to=None",
            found=repr(round_to),
            fix="leave round_to out",
        )
    facts = gated.facts
    if facts.source.training is not None:
        warnings.warn(
            f"{facts.model_name} takes another path in train mode (an auxiliary output, say); "
            "the sparse model keeps the eval path in both modes",
            stacklevel=3,
        )
    with untouched_rng(), torch.no_grad():
        sparse = _plain(gated)
        if verify:
            _verify(gated, sparse)
    guard_pickle(sparse)
    return sparse


def _plain(gated: WeightGatedModule) -> fx.GraphModule:
    """The graph from before the gates, over copies of the layers as they are now."""
    parameters = dict(gated.named_parameters())
    memo: dict[int, object] = {}
    for name, gate in gated.gates.items():
        old = parameters[name]
        memo[id(old)] = nn.Parameter(_without_closed(old, gate.weight, gate.settings.binary_value), old.requires_grad)
    holder = nn.Module()
    for table in _TABLES:
        holder.__dict__[table] = {name: value for name, value in gated.__dict__[table].items() if name != BANK}
    holder._non_persistent_buffers_set = set(gated._non_persistent_buffers_set)
    root = copy.deepcopy(holder, memo)
    source = gated.facts.source.module
    graph = fx.Graph()  # not of our own tracer, which pickle would note
    graph.output(graph.graph_copy(source.graph, {}))
    graph._codegen = source.graph._codegen
    sparse = fx.GraphModule(root, graph, class_name=type(source).__name__)
    for table in _TABLES:  # also what the graph does not use, in the model's own order
        getattr(sparse, table).clear()
        getattr(sparse, table).update(getattr(root, table))
    sparse._non_persistent_buffers_set = set(root._non_persistent_buffers_set)
    sparse.training = gated.training
    inputs = as_model_takes(gated.facts.source.flat_inputs(), gated)
    replace_rounded_drop_paths(sparse, inputs)
    refuse_autocast(sparse)
    make_portable(sparse, inputs)
    return sparse


def _without_closed(weight: Tensor, latent: Tensor, binary: Elementwise) -> Tensor:
    """Chosen, not multiplied: closed entries are +0.0, of any weight."""
    out = torch.empty_like(weight)
    for rows in row_blocks(weight.shape):
        out[rows] = weight[rows].where(binary(latent[rows]) != 0, 0)
    return out


def _verify(gated: WeightGatedModule, sparse: fx.GraphModule) -> None:
    """Run both on the example; a model with another output is never handed out."""
    source = gated.facts.source
    with eval_mode(gated), eval_mode(sparse):
        result = compared(gated, sparse, *as_model_takes((source.args, source.kwargs), gated))
    if not result.same:
        raise VerificationError(
            "the sparse model does not compute what the gated one does; it is not handed out",
            expected="equal outputs on the example",
            found="different ones",
            fix=result.fix,
        ) from result.cause
