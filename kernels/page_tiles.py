"""Online softmax over pages, tile by tile, for decode and prefill, in Triton. Contract in ``paged_attention``."""

from __future__ import annotations

import triton
import triton.language as tl

ROWS = tl.constexpr(128)  # rows that a program reads at once, one per thread


@triton.jit
def _blocks(
    block_table,  # at this row
    tile,  # its first token
    end,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The blocks of a tile of keys: a scalar if the tile lies in one page, else one per token."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(block_table + tile // BLOCK_SIZE, mask=tile < end, other=0)
    else:
        tokens = tile + tl.arange(0, BLOCK_N)
        return tl.load(block_table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)


@triton.jit
def attend_pages(
    top,  # [M] float32: max score so far, in log2 units
    total,  # [M] float32: sum of the weights
    acc,  # [M, V_PADDED] float32: sum of the weighted values
    query,  # [M, K_PADDED]
    positions,  # [M] int32
    k_cache,  # at this KV head
    v_cache,
    block_table,  # at this row
    start,  # first key, a multiple of BLOCK_N
    end,  # one past the last key
    lower,  # first key that any query sees: keys before it may have lost their page to the window
    window,
    scale,
    softcap,
    k_block_stride,
    k_line_stride,
    v_block_stride,
    v_line_stride,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,  # False: end is a multiple of BLOCK_N too, and every query sees every key
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Continue an online softmax over keys start to end. Returns top, total and acc.

    Hidden keys score -1e30, not -inf, so that a tile without a visible key gives no NaN. The first visible key erases
    such a tile's contribution, as it rescales by 2^(-1e30 - score) = 0; every query sees at least its own position.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    k_dims = tl.arange(0, K_PADDED)
    v_dims = tl.arange(0, V_PADDED)
    k_fits = tl.full((1, K_PADDED), True, tl.int1)  # a constant: free
    if K_DIM != K_PADDED:
        k_fits = (k_dims < K_DIM)[None, :]
    v_fits = tl.full((1, V_PADDED), True, tl.int1)
    if V_DIM != V_PADDED:
        v_fits = (v_dims < V_DIM)[None, :]
    to_log2 = scale * LOG2E
    if HAS_SOFTCAP:
        to_log2 = LOG2E
    # After a minimum, Triton no longer knows that a bound is a multiple of BLOCK_N. It would load a block for each of a
    # thread's lines, 8 loads instead of 2, and spill: 782 instructions a tile instead of 631 (SASS, size 128).
    start = start // BLOCK_N * BLOCK_N
    if not MASKED:
        end = end // BLOCK_N * BLOCK_N
    # A tile's blocks are loaded one tile ahead. Otherwise Triton would spend its pipeline stages on the two dependent
    # loads, and leave K and V one buffer each, with no load in flight behind it.
    blocks = _blocks(block_table, start, end, BLOCK_SIZE, BLOCK_N)
    for tile in range(start, end, BLOCK_N):
        tokens = tile + tl.arange(0, BLOCK_N)
        lines = tokens % BLOCK_SIZE
        k_offsets = blocks.to(tl.int64) * k_block_stride + lines * k_line_stride
        v_offsets = blocks.to(tl.int64) * v_block_stride + lines * v_line_stride
        blocks = _blocks(block_table, tile + BLOCK_N, end, BLOCK_SIZE, BLOCK_N)
        k_mask = k_fits
        v_mask = v_fits
        if MASKED:
            k_mask = k_mask & (tokens < end)[:, None]
            v_mask = v_mask & (tokens < end)[:, None]
            if HAS_WINDOW:
                k_mask = k_mask & (tokens >= lower)[:, None]
                v_mask = v_mask & (tokens >= lower)[:, None]
        key = tl.load(k_cache + k_offsets[:, None] + k_dims[None, :], mask=k_mask, other=0.0)
        value = tl.load(v_cache + v_offsets[:, None] + v_dims[None, :], mask=v_mask, other=0.0)

        scores = tl.dot(query, tl.trans(key), input_precision="ieee")
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E * scale / softcap)) + 1.0))
        if MASKED:
            visible = (tokens[None, :] <= positions[:, None]) & (tokens < end)[None, :]
            if HAS_WINDOW:
                visible = visible & (positions[:, None] - tokens[None, :] < window)
            # Scale before masking: the fused multiply-add below would compute -1e30 * to_log2 with more digits than the
            # maximum has, and raise 2 to the difference.
            scores = tl.where(visible, scores * to_log2, -1e30)
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
        else:
            new_top = tl.maximum(top, tl.max(scores, 1) * to_log2)
            weights = tl.exp2(scores * to_log2 - new_top[:, None])
        rescale = tl.exp2(top - new_top)
        total = total * rescale + tl.sum(weights, 1)
        acc = tl.dot(weights.to(value.dtype), value, acc * rescale[:, None], input_precision="ieee")
        top = new_top
    return top, total, acc
