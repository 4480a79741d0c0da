"""RoPE in Triton, fused with the QK norm before it and the store of keys and values into pages behind it.

Contract:
- heads are ordered as in a fused projection: queries, keys, values. A token's heads are contiguous, any stride between
  tokens. They are in the model's dtype, or partial sums of the projection, [num_splits, ...] float32, which are added
  in order.
- cos_sin: [max_len, rotary_dim] float32, a position's cosines and then its sines; rotary_dim is even and at most
  head_dim. Element i rotates with element i + rotary_dim / 2; elements from rotary_dim on are unchanged.
- computed in float32 and rounded once. Values are neither normalised nor rotated.
- head sizes are at least 2, not only powers of two. Offsets into caches and tokens are 64 bits wide.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.norm import add_up, load_parts
from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options


@triton.jit
def _rope_kernel(
    heads,
    positions,
    cos_sin,
    weights,
    slot_mapping,
    q_out,
    k_out,  # a page holds BLOCK_SIZE tokens
    v_out,
    split_stride,
    token_stride,
    q_stride,  # between tokens
    k_stride,  # between pages
    v_stride,
    line_stride,  # between the tokens of a page
    head_stride,  # between the heads of a token in a page
    eps,
    NUM_SPLITS: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_SLOTS: tl.constexpr,  # else token t's page is t
    PDL: tl.constexpr,
):
    """One program: some query, key or value heads of one token, as two rotated halves and an unrotated rest.

    Works in place without a barrier: no element is loaded by two warps.
    """
    HALF: tl.constexpr = ROTARY_DIM // 2
    REST: tl.constexpr = HEAD_DIM - ROTARY_DIM
    FIRST_KEY: tl.constexpr = (NUM_Q_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS  # chunk of heads
    FIRST_VALUE: tl.constexpr = FIRST_KEY + (NUM_KV_HEADS + BLOCK_HEADS - 1) // BLOCK_HEADS
    token = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    is_query = chunk < FIRST_KEY
    is_value = chunk >= FIRST_VALUE
    first_chunk = tl.where(is_query, 0, tl.where(is_value, FIRST_VALUE, FIRST_KEY))
    before = tl.where(is_query, 0, tl.where(is_value, NUM_Q_HEADS + NUM_KV_HEADS, NUM_Q_HEADS))
    head = (chunk - first_chunk) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)[:, None]
    num_heads = tl.where(is_query, NUM_Q_HEADS, NUM_KV_HEADS)
    num_rotated = tl.where(is_value, 0, num_heads)
    # Weights and angles have the tile's shape too: a later broadcast would go through shared memory.
    half = head * 0 + tl.arange(0, HALF_PADDED)[None, :]
    rest = head * 0 + tl.arange(0, REST_PADDED)[None, :]
    mask = (head < num_heads) & (half < HALF)
    rest_mask = (head < num_heads) & (rest < REST)
    rotated_mask = (head < num_rotated) & (half < HALF)
    if HAS_NORM:
        by = weights + tl.where(is_query, 0, HEAD_DIM)
        first_by = tl.load(by + half, mask=rotated_mask)
        second_by = tl.load(by + HALF + half, mask=rotated_mask)
        if REST:
            rest_by = tl.load(by + ROTARY_DIM + rest, mask=(head < num_rotated) & (rest < REST))
    if PDL:
        gdc_wait()

    page = token
    line = 0
    if HAS_SLOTS:
        slot = tl.load(slot_mapping + token)
        page = (slot // BLOCK_SIZE).to(tl.int64)
        line = slot % BLOCK_SIZE * line_stride
    if HAS_ROPE:
        angles = cos_sin + tl.load(positions + token).to(tl.int64) * ROTARY_DIM + half
    heads += token * token_stride + before * HEAD_DIM
    first = load_parts(heads + head * HEAD_DIM + half, mask, split_stride, NUM_SPLITS)
    second = load_parts(heads + head * HEAD_DIM + HALF + half, mask, split_stride, NUM_SPLITS)
    if REST:
        third = load_parts(heads + head * HEAD_DIM + ROTARY_DIM + rest, rest_mask, split_stride, NUM_SPLITS)
    if HAS_ROPE:
        cos = tl.load(angles, mask=rotated_mask)
        sin = tl.load(angles + HALF, mask=rotated_mask)
    if PDL:  # reading is most of the work; this also keeps ptxas from moving loads behind the sums
        gdc_launch_dependents()

    first = add_up(first)
    second = add_up(second)
    if REST:
        third = add_up(third)
    if HAS_NORM:
        squares = tl.sum(first * first + second * second, 1)
        if REST:
            squares += tl.sum(third * third, 1)
        rescale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        first = tl.where(is_value, first, first * rescale * first_by)
        second = tl.where(is_value, second, second * rescale * second_by)
        if REST:
            third = tl.where(is_value, third, third * rescale * rest_by)
    if HAS_ROPE:
        rotated = tl.where(is_value, first, first * cos - second * sin)
        second = tl.where(is_value, second, second * cos + first * sin)
        first = rotated

    out = q_out + token * q_stride
    if chunk >= FIRST_KEY:
        out = k_out + page * k_stride + line
    if chunk >= FIRST_VALUE:
        out = v_out + page * v_stride + line
    out += head * tl.where(is_query, HEAD_DIM, head_stride)
    tl.store(out + half, first.to(out.dtype.element_ty), mask=mask)
    tl.store(out + HALF + half, second.to(out.dtype.element_ty), mask=mask)
    if REST:
        tl.store(out + ROTARY_DIM + rest, third.to(out.dtype.element_ty), mask=rest_mask)


def qk_norm_rope(
    qk: Tensor,  # [num_tokens, num_heads + num_kv_heads, head_dim], changed in place
    num_heads: int,
    positions: Tensor,  # [num_tokens] int32 or int64
    cos_sin: Tensor | None,  # [max_len, rotary_dim] float32; None: no rotation
    weights: Tensor | None,  # [2, head_dim] float32, of query heads and of key heads; None: no norm
    eps: float,
) -> None:
    """Normalise each head (RMS), then rotate it by its token's position."""
    if cos_sin is None and weights is None:
        return
    assert qk.stride(2) == 1 and qk.stride(1) == qk.shape[2]
    keys = qk[:, num_heads:]
    _launch(qk.flatten(1), positions, cos_sin, weights, eps, qk[:, :num_heads], keys.unsqueeze(1), None, None)


def rope_and_store(
    qkv: Tensor,  # [num_tokens, num_columns], or its parts [num_splits, num_tokens, num_columns] float32
    num_heads: int,
    num_kv_heads: int,  # num_columns = (num_heads + 2 * num_kv_heads) * head_dim
    positions: Tensor,  # [num_tokens] int32 or int64
    cos_sin: Tensor | None,  # [max_len, rotary_dim] float32; None: no rotation
    weights: Tensor | None,  # [2, head_dim] float32, of query heads and of key heads; None: no norm
    eps: float,
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], heads contiguous, any other stride
    v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim], the same but between blocks
    slot_mapping: Tensor,  # [num_tokens] int32: block * block_size + offset
) -> Tensor:
    """Normalise query and key heads (RMS), rotate them by position, and store keys and values in their pages.

    Returns the queries, [num_tokens, num_heads, head_dim] in the caches' dtype.
    """
    assert qkv.stride(-1) == k_cache.stride(-1) == 1 and k_cache.stride()[1:] == v_cache.stride()[1:]
    q = k_cache.new_empty(qkv.shape[-2], num_heads, k_cache.shape[3])
    assert k_cache.shape == v_cache.shape and qkv.shape[-1] == (num_heads + 2 * num_kv_heads) * q.shape[2]
    _launch(qkv, positions, cos_sin, weights, eps, q, k_cache, v_cache, slot_mapping)
    return q


def _launch(
    heads: Tensor,  # [num_tokens, num_columns] or [num_splits, num_tokens, num_columns]
    positions: Tensor,
    cos_sin: Tensor | None,
    weights: Tensor | None,
    eps: float,
    q: Tensor,  # [num_tokens, num_heads, head_dim]
    k_pages: Tensor,  # [num_pages, block_size, num_kv_heads, head_dim]
    v_pages: Tensor | None,  # None: ``heads`` has no values
    slot_mapping: Tensor | None,  # None: token t's page is t
) -> None:
    num_tokens, num_heads, head_dim = q.shape
    if not num_tokens:
        return
    block_size, num_kv_heads = k_pages.shape[1:3]
    # Without RoPE, an odd head size is two halves and one element: GPT-2 has learned positions and any head size.
    rotary_dim = head_dim // 2 * 2 if cos_sin is None else cos_sin.shape[1]
    half_padded = triton.next_power_of_2(rotary_dim // 2)
    rest_padded = triton.next_power_of_2(head_dim - rotary_dim) if rotary_dim < head_dim else half_padded
    # 512 elements on 64 threads are 16 bytes per thread in 16 bits: six programs per token of 48 heads of 128. No more
    # threads than the narrower tile has elements: else a second warp would load an element after its store in place.
    block_heads = min(triton.next_power_of_2(num_heads), max(1, 512 // max(half_padded, rest_padded)))
    num_warps = max(1, block_heads * min(half_padded, rest_padded) // 256)
    num_chunks = triton.cdiv(num_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads) * (
        1 + (v_pages is not None)
    )
    _rope_kernel[(num_tokens, num_chunks)](
        heads,
        positions,
        heads if cos_sin is None else cos_sin,
        heads if weights is None else weights,
        positions if slot_mapping is None else slot_mapping,
        q,
        k_pages,
        k_pages if v_pages is None else v_pages,
        heads.stride(0),  # between splits, if there are any
        heads.stride(-2),
        q.stride(0),
        k_pages.stride(0),
        k_pages.stride(0) if v_pages is None else v_pages.stride(0),
        k_pages.stride(1),
        k_pages.stride(2),
        eps,
        NUM_SPLITS=heads.shape[0] if heads.dim() == 3 else 1,
        NUM_Q_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary_dim,
        BLOCK_SIZE=block_size,
        BLOCK_HEADS=block_heads,
        HALF_PADDED=half_padded,
        REST_PADDED=rest_padded,
        HAS_NORM=weights is not None,
        HAS_ROPE=cos_sin is not None,
        HAS_SLOTS=slot_mapping is not None,
        num_warps=num_warps,
        **launch_options(heads.device),
    )
