"""Constants made inside the graph: each axis starts with ids of its own, so a constant can be sliced like a weight."""

from __future__ import annotations

import torch

from tgfx.ops.registry import Call, register

MAKERS = (
    "zeros", "ones", "full", "empty", "arange", "linspace", "logspace", "eye", "rand", "randn", "randint",
    "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_empty", "empty_strided", "new_empty_strided",
    "tril_indices", "randperm", "triu_indices", "hann_window", "hamming_window", "bartlett_window", "kaiser_window",
    "blackman_window", "empty_permuted",
)  # fmt: skip
LONGEST = 1 << 20  # a longer axis is surely not one of channels


@register(*MAKERS)
def make(call: Call) -> None:
    rec, out = call.rec, call.out
    layers: list[torch.Tensor] = []
    for axis, size in enumerate(out.shape):
        if 1 < size <= LONGEST:
            line = [1] * out.ndim
            line[axis] = -1
            layers.append(rec.fresh(size, "const", axis).reshape(line))
    rec.give(out, layers)
