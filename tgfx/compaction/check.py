"""What can be compacted, asked before anything is touched."""

from __future__ import annotations

from typing import Any

import torch

from tgfx.capture.parametrized import parametrised_tensors
from tgfx.errors import GranularityError, InputError
from tgfx.gated import GatedModule
from tgfx.gated_check import check_gated
from tgfx.weight.gated import WeightGatedModule


def check_compactable(gated: Any) -> None:
    """Raise the reason why `compact_` cannot cut this model, if there is one."""
    check_gated(gated, "can be compacted")
    if gated._compiled_call_impl is not None:
        raise InputError(
            "the model was compiled in place",
            expected="a plain module, compiled apart: compiled = torch.compile(gated)",
            found="gated.compile() was called",
            fix="compile apart, and again after each compaction",
        )
    if isinstance(gated, WeightGatedModule):
        raise GranularityError(
            "single weights leave holes in a tensor, which cannot be cut out",
            expected="a model whose channels, heads or layers are gated",
            found='granularity="weight"',
            fix="train it to the end and tgfx.shrink it, or gate channels",
        )
    if gated.facts.source.training is not None:
        raise InputError(
            f"{gated.facts.model_name} takes another path in train mode, which cannot be compacted",
            expected="one structure for train and eval mode",
            found="two (an auxiliary output, say)",
            fix="train it to the end and tgfx.shrink it, or turn the auxiliary output off before tgfx.transform",
        )
    _check_tensors(gated)


def check_patience(patience: Any) -> None:
    if not isinstance(patience, int) or isinstance(patience, bool) or patience < 0:
        raise InputError("patience is a number of calls", expected="0, 1, 2, ...", found=repr(patience))


def _check_tensors(gated: GatedModule) -> None:
    computed = list(parametrised_tensors(gated))
    if computed:
        more = f" and {len(computed) - 4} more" if len(computed) > 4 else ""
        raise InputError(
            "tensors that a parametrization computes cannot be cut in the middle of training",
            expected="weights that are parameters themselves",
            found=f"parametrised: {', '.join(computed[:4])}{more}",
            fix="train it to the end and tgfx.shrink it, or torch.nn.utils.parametrize.remove_parametrizations "
            "before tgfx.transform",
        )
    odd = next((name for name, p in gated.named_parameters() if type(p.data) is not torch.Tensor), None)
    if odd is not None:
        raise InputError(
            "a parameter is not a plain tensor",
            expected="plain tensors (not those of FSDP or another wrapper)",
            found=type(gated.get_parameter(odd).data).__name__,
            where=odd,
            fix="compact before sharding, and shard again afterwards",
        )
