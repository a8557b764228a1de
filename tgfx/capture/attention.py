"""nn.MultiheadAttention as plain operators.

The module insists on embed_dim == heads * head_dim and hides everything behind a fused eval path; written out,
its projections are ordinary linear layers whose channels can be followed. Parameter names stay.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def is_plain_attention(module: nn.Module) -> bool:
    """Attention layers that `multihead_attention` writes out in full."""
    return type(module) is nn.MultiheadAttention


def multihead_attention(module: nn.MultiheadAttention, dropout: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """What `module(query, key, value, ...)` computes; `dropout` is applied to the attention weights."""
    names = (
        "query",
        "key",
        "value",
        "key_padding_mask",
        "need_weights",
        "attn_mask",
        "average_attn_weights",
        "is_causal",
    )
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = given["query"], given["key"], given["value"]
    need_weights = given.get("need_weights", True)
    same_kv = key is value
    if module.batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
        value = key if same_kv else value.transpose(0, 1)
    q, k, v = _projections(module, query, key, value)
    length, batch = query.shape[0], query.shape[1]
    if module.bias_k is not None:  # one more key and value, the same for all
        k = torch.cat([k, module.bias_k.repeat(1, batch, 1)])
        v = torch.cat([v, module.bias_v.repeat(1, batch, 1)])
    heads, size = module.num_heads, module.head_dim
    q = q.reshape(length, batch, heads, size).permute(1, 2, 0, 3)
    k = k.reshape(k.shape[0], batch, heads, size).permute(1, 2, 0, 3)
    v = v.reshape(v.shape[0], batch, heads, size).permute(1, 2, 0, 3)
    if module.add_zero_attn:
        k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
    mask = _mask(module, given, batch)
    weights = None
    if need_weights or module.dropout > 0:
        scores = torch.matmul(q * size**-0.5, k.transpose(-2, -1))
        scores = scores if mask is None else scores + mask
        attention = dropout(torch.softmax(scores, dim=-1))
        mixed = torch.matmul(attention, v)
        if need_weights:
            weights = attention.mean(dim=1) if given.get("average_attn_weights", True) else attention
    else:
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=size**-0.5)
    mixed = mixed.permute(2, 0, 1, 3).reshape(length, batch, heads * size)
    out = F.linear(mixed, module.out_proj.weight, module.out_proj.bias)
    return (out.transpose(0, 1) if module.batch_first else out), weights


def _projections(module: nn.MultiheadAttention, query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    size = module.embed_dim
    if module._qkv_same_embed_dim:
        weights = [module.in_proj_weight[i * size : (i + 1) * size] for i in range(3)]
    else:
        weights = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    if module.in_proj_bias is None:
        biases: list[Any] = [None] * 3
    else:
        biases = [module.in_proj_bias[i * size : (i + 1) * size] for i in range(3)]
    return tuple(F.linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))  # type: ignore[return-value]


def _mask(module: nn.MultiheadAttention, given: dict[str, Any], batch: Any) -> Any:
    """Attention mask and padding mask as one additive float mask over [batch, heads, rows, columns]."""
    mask, padding = given.get("attn_mask"), given.get("key_padding_mask")
    if mask is None and padding is None:
        return None
    raise NotImplementedError("attention masks are left to torch.export")
