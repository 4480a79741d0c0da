"""Rotary positions in Triton, with the norm of query and key heads that some families put before. In place.

Contract:
- qk: [num_tokens, num_heads + num_kv_heads, head_dim], query heads first: a slice of a fused QKV projection. A token's
  heads are contiguous, any stride between tokens.
- cos_sin: [max_len, rotary_dim] float32, a position's cosines and then its sines; rotary_dim is even and at most
  head_dim. Element i turns with element i + rotary_dim / 2; what lies beyond rotary_dim stays.
- computed in float32 and rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

FMA = {"enable_fp_fusion": True}  # said at every launch: Triton 3.9 warns where it is left to the default


@triton.jit
def _qk_norm_rope_kernel(
    qk,
    positions,
    cos_sin,
    weights,
    token_stride,
    eps,
    NUM_Q_HEADS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
):
    """One program: a few heads of one token, as two halves that turn and a rest that does not.

    Each thread stores what it has loaded and nothing else, so working in place needs no barrier.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    half = tl.arange(0, HALF_PADDED)[None, :]
    mask = (heads < NUM_HEADS) & (half < HALF)
    first_at = qk + token * token_stride + heads * HEAD_DIM + half
    second_at = first_at + HALF
    first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 1)
        which = tl.where(heads < NUM_Q_HEADS, 0, HEAD_DIM)  # the weights of queries or of keys
        if REST:
            rest = tl.arange(0, REST_PADDED)[None, :]
            rest_mask = (heads < NUM_HEADS) & (rest < REST)
            rest_at = qk + token * token_stride + heads * HEAD_DIM + ROTARY_DIM + rest
            third = tl.load(rest_at, mask=rest_mask, other=0.0).to(tl.float32)
            squares += tl.sum(third * third, 1)
        rescale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = first * rescale * tl.load(weights + which + half, mask=mask, other=0.0)
        second = second * rescale * tl.load(weights + which + HALF + half, mask=mask, other=0.0)
        if REST:
            third = third * rescale * tl.load(weights + which + ROTARY_DIM + rest, mask=rest_mask, other=0.0)
            tl.store(rest_at, third.to(qk.dtype.element_ty), mask=rest_mask)
    if HAS_ROPE:
        angles = cos_sin + tl.load(positions + token).to(tl.int64) * ROTARY_DIM + half
        cos = tl.load(angles, mask=half < HALF, other=0.0)
        sin = tl.load(angles + HALF, mask=half < HALF, other=0.0)
        turned = first * cos - second * sin
        second = second * cos + first * sin
        first = turned
    tl.store(first_at, first.to(qk.dtype.element_ty), mask=mask)
    tl.store(second_at, second.to(qk.dtype.element_ty), mask=mask)


def qk_norm_rope(
    qk: Tensor,  # [num_tokens, num_heads + num_kv_heads, head_dim], changed in place
    num_heads: int,
    positions: Tensor,  # [num_tokens] int64
    cos_sin: Tensor | None,  # [max_len, rotary_dim] float32; None: nothing turns
    weights: Tensor | None,  # [2, head_dim] float32, of query heads and of key heads; None: no norm
    eps: float,
) -> None:
    """Normalise each head (RMS), then turn it by its token's position."""
    num_tokens, all_heads, head_dim = qk.shape
    if not num_tokens or (cos_sin is None and weights is None):
        return
    assert qk.stride(2) == 1 and qk.stride(1) == head_dim
    rotary_dim = head_dim if cos_sin is None else cos_sin.shape[1]
    half_padded = triton.next_power_of_2(rotary_dim // 2)
    block_heads = min(triton.next_power_of_2(all_heads), max(1, 512 // half_padded))
    _qk_norm_rope_kernel[(num_tokens, triton.cdiv(all_heads, block_heads))](
        qk,
        positions,
        qk if cos_sin is None else cos_sin,
        qk if weights is None else weights,
        qk.stride(0),
        eps,
        NUM_Q_HEADS=num_heads,
        NUM_HEADS=all_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_HEADS=block_heads,
        HALF_PADDED=half_padded,
        REST_PADDED=triton.next_power_of_2(max(1, head_dim - rotary_dim)),
        HAS_NORM=weights is not None,
        HAS_ROPE=cos_sin is not None,
        num_warps=min(4, max(1, block_heads * half_padded // 128)),
        **FMA,
    )
