"""What the kernels must compute, in plain torch, row by row and slowly. Any device; tests compare against it."""

from __future__ import annotations

import torch
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
