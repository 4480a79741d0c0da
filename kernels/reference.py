"""What the kernels must compute, in plain torch: attention row by row and slowly, the rest as a CPU runs it.

Any device; tests compare against it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor


def write_kv(
    k: Tensor,  # [num_tokens, num_kv_heads, k_head_dim]
    v: Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, v_head_dim]
    slot_mapping: Tensor,  # [num_tokens] int32: block * block_size + offset
) -> None:
    """Put token t's K and V at slot_mapping[t]. Block 0 is the dummy: what padding writes there is never read."""
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        block, offset = divmod(slot, block_size)
        k_cache[block, offset] = k[token]
        v_cache[block, offset] = v[token]


def paged_attention(
    q: Tensor,  # [num_tokens, num_heads, k_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, v_head_dim]
    block_tables: Tensor,  # [num_slots, max_blocks] int32
    row_slots: Tensor,  # [num_rows] int32
    cu_seqlens_q: Tensor,  # [num_rows + 1] int32
    context_lens: Tensor,  # [num_rows] int32
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,  # [num_heads]
) -> Tensor:
    """Return [num_tokens, num_heads, v_head_dim] in q's dtype, computed in float32 (float64 for float64 inputs).

    Only the context_lens[r] tokens of a row are taken out of its pages, so what else lies there, NaN included, cannot
    reach it. Rows with context 0, and tokens of no row, are zeros.
    """
    block_size, num_kv_heads = k_cache.shape[1:3]
    num_heads = q.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape[0], num_heads, v_cache.shape[3])
    starts, slots = cu_seqlens_q.tolist(), row_slots.tolist()
    for row, context_len in enumerate(context_lens.tolist()):
        start, end = starts[row], starts[row + 1]
        if context_len == 0 or start == end:
            continue
        num_blocks = -(-context_len // block_size)
        blocks = block_tables[slots[row], :num_blocks].long()
        # [context_len, num_heads, head_dim]: each KV head serves a run of query heads
        keys = k_cache[blocks].flatten(0, 1)[:context_len].to(dtype).repeat_interleave(num_heads // num_kv_heads, 1)
        values = v_cache[blocks].flatten(0, 1)[:context_len].to(dtype).repeat_interleave(num_heads // num_kv_heads, 1)

        scores = torch.einsum("qhd,khd->hqk", q[start:end].to(dtype), keys) * scale
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        query_positions = torch.arange(context_len - (end - start), context_len, device=q.device)[:, None]
        key_positions = torch.arange(context_len, device=q.device)[None, :]
        visible = key_positions <= query_positions
        if window:
            visible &= query_positions - key_positions < window
        scores = scores.masked_fill(~visible, float("-inf"))
        if sinks is not None:  # one more column, which takes its share of the softmax and brings no value
            column = sinks.to(dtype)[:, None, None].expand(-1, end - start, 1)
            scores = torch.cat([scores, column], dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., :context_len]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
    return out


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32; weight is float32."""
    normed = F.rms_norm(x.float(), x.shape[-1:], weight, eps).to(x.dtype)
    return normed if out is None else out.copy_(normed)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension, in float32."""
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, eps).to(x.dtype)


def add_rms_norm(
    x: Tensor,  # [num_rows, num_columns]
    residual: Tensor,  # [num_rows, num_columns]
    weight: Tensor | None,  # [num_columns] float32; None: no norm behind the sum
    eps: float,
    *,
    scale: float = 1.0,
    post_weight: Tensor | None = None,  # [num_columns] float32: x is normalised too, before it is added
    rows: Tensor | None = None,  # [num_out] int64: compute these rows alone
) -> tuple[Tensor, Tensor]:
    """(rms_norm(total), total) where total = residual + scale * x, rounded to x's dtype."""
    total = _residual_sum(x, residual, eps, scale, post_weight, rows)
    return (total if weight is None else rms_norm(total, weight, eps)), total


def add_layer_norm(
    x: Tensor,  # [num_rows, num_columns]
    residual: Tensor,  # [num_rows, num_columns]
    weight: Tensor,  # [num_columns] float32
    bias: Tensor | None,  # [num_columns] float32
    eps: float,
    *,
    scale: float = 1.0,
    rows: Tensor | None = None,  # [num_out] int64: compute these rows alone
) -> tuple[Tensor, Tensor]:
    """(layer_norm(total), total) where total = residual + scale * x, rounded to x's dtype."""
    total = _residual_sum(x, residual, eps, scale, None, rows)
    return layer_norm(total, weight, bias, eps), total


def _residual_sum(
    x: Tensor, residual: Tensor, eps: float, scale: float, post_weight: Tensor | None, rows: Tensor | None
) -> Tensor:
    if rows is not None:
        x, residual = x[rows], residual[rows]
    value = x.float() if post_weight is None else F.rms_norm(x.float(), x.shape[-1:], post_weight, eps)
    return torch.add(residual.float(), value, alpha=scale).to(x.dtype)


def qk_norm_rope(
    qk: Tensor,  # [num_tokens, num_heads + num_kv_heads, head_dim], changed in place
    num_heads: int,
    positions: Tensor,  # [num_tokens] int64
    cos_sin: Tensor | None,  # [max_len, rotary_dim] float32, a position's cosines and then its sines
    weights: Tensor | None,  # [2, head_dim] float32, of query heads and of key heads
    eps: float,
) -> None:
    """Normalise each head (RMS), then turn elements i and i + rotary_dim / 2 together by the token's position."""
    heads = qk.float()
    if weights is not None:
        q, k = heads[:, :num_heads], heads[:, num_heads:]
        shape = qk.shape[2:]
        heads = torch.cat([F.rms_norm(q, shape, weights[0], eps), F.rms_norm(k, shape, weights[1], eps)], dim=1)
    if cos_sin is not None:
        rotary_dim = cos_sin.shape[1]
        cos, sin = cos_sin.index_select(0, positions)[:, None].chunk(2, dim=-1)
        first, second = heads[..., :rotary_dim].chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        heads = torch.cat([*turned, heads[..., rotary_dim:]], dim=-1)
    qk.copy_(heads)


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}


def activate(x: Tensor, act: str) -> Tensor:
    """act(x), in float32."""
    return ACTIVATIONS[act](x.float()).to(x.dtype)


def act_and_mul(x: Tensor, act: str) -> Tensor:
    """act(gate) * up, in float32, where x [num_rows, 2 * num_columns] is the gate and then up."""
    gate, up = x.float().chunk(2, dim=-1)
    return (ACTIVATIONS[act](gate) * up).to(x.dtype)
