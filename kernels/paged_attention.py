"""Paged attention in Triton: write_kv, planned and split decode, ragged prefill. Knows a step's metadata, no request.

Contract of every kernel here:
- q, k, v: [num_tokens, heads, head_dim], last dimension contiguous, any other stride (slices of a fused QKV are fine).
- k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], heads contiguous, any other stride.
- bfloat16, float16 or float32; the softmax and all sums are float32, and float32 inputs are multiplied as IEEE float32.
- head sizes up to 256, not only powers of two, K's and V's may differ; any number of query heads a KV head; scale > 0.
- offsets into caches and tokens are 64 bits wide; a pool may have more than 2^31 elements.
- nothing is read beyond a row's context, nor before the window of its first query, where its block table may have the
  dummy block: stale NaN in a page cannot leak. Rows with context 0 give zeros.
- a grid depends on the step's shape (tokens, rows, splits), which the host knows: never on what the device holds. A row
  of one query is the decode kernel's and any other the prefill kernel's, which is found out on the device.
- every program waits for the kernels before it first of all (``pdl``): they wrote what it reads, metadata included.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.attention import AttentionBatch
from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, pdl_options

MAX_HEAD_DIM = 256
FMA = {"enable_fp_fusion": True}  # said at every launch: Triton 3.9 warns where it is left to the default

# How decode is split. A row and KV head is one program or several. Programs share the memory's bandwidth, and 2 of them
# on each of the H200's 132 multiprocessors, with 64 KiB of K and V each in flight, ask for more than it gives. So what
# counts is that the last ones end together, and that nothing is split that need not be: a split ends with about 2 us of
# latency (store, fence, atomic, the last one's second look).
#
# A grid that is larger than what is resident at once is placed three programs to a multiprocessor from the first on,
# and not one here and one there: then the 256 programs of 32 rows leave a third of the multiprocessors empty. So rows
# that fit in one wave get a grid of one wave, used or not. Microseconds a layer on an H200, 32 rows, 32 heads on 8 of
# 128, bfloat16, by programs in the grid (396 are resident; up to 256 of them have work, but in the last line):
#   context                      384    392    400    520
#   224                         11.3   11.7   13.4   13.6
#   4,192                        129    129    152    152
#   8,100                        244    244    290    290
BUSY_PROGRAMS = 2  # a multiprocessor, which take all the bandwidth
MAX_SPLITS = 64  # of a row
MIN_SPLIT_LEN = 128  # tokens a split should have, where the rows leave multiprocessors idle
FULL_SPLIT_LEN = 512  # where they do not: a program alone reads that in 6 us
ITEM = tl.constexpr(8)  # int32 numbers of the plan a split: one sector of 32 bytes

# Decode: (BLOCK_N, num_warps, num_stages) by the larger padded head size. K and V of a tile take 32 KiB and two tiles
# are in flight, or 16 KiB and three, in 72 or 54 KiB: three or four programs on a multiprocessor. 64 keys are a page.
DECODE = {64: (64, 4, 4), 128: (64, 4, 3), 256: (32, 4, 3)}
DECODE_FLOAT32 = {64: (32, 4, 3), 128: (32, 4, 3), 256: (16, 4, 3)}  # fewer keys, to compile fast
RESIDENT_PROGRAMS = {64: 4, 128: 3, 256: 3}  # a multiprocessor

# Prefill: (BLOCK_M, BLOCK_N, num_warps, num_stages) by the larger padded head size. Three stages keep two tiles in
# flight; with two, each tile waits for its own load. At 64, two programs share a multiprocessor (244 registers, 4
# warps), so that one's softmax hides behind the other's products. At 128 and 256 the accumulator leaves room for one,
# of two warpgroups and 224 KiB (160 at 256); at 128, 64 keys a tile would rescale the accumulator twice as often.
PREFILL = {64: (128, 64, 4, 3), 128: (128, 128, 8, 3), 256: (128, 32, 8, 3)}
# On cards without 227 KiB of shared memory.
PREFILL_SMALL = {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2)}
# A step of few prompt tokens behind a long context has few tiles: a chunk beside those who decode is one of 128
# queries, 32 programs that would each read 100,000 keys, and take as long for it as for 500 queries. So a tile then has
# fewer queries, for all heads that share the keys, and the keys are split over programs, as decode splits its rows.
PROGRAMS_FOR_SPLITS = {64: 2, 128: 1, 256: 1}  # a multiprocessor, by the larger padded head size: what is resident
MIN_PREFILL_SPLIT = 512  # keys that a split of a tile should have
# IEEE float32 dots become one unrolled FMA a product: tiles of 64 x 64 would take minutes to compile.
PREFILL_FLOAT32 = (32, 32, 4, 2)
PREFILL_ROWS = 16  # rows whose broken ends the grid has room for; more, and programs take several tiles

ROWS = tl.constexpr(128)  # rows that a program looks at in one go, one a thread


@triton.jit
def _write_kv_kernel(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    k_block_stride,
    k_line_stride,
    k_page_head_stride,
    v_block_stride,
    v_line_stride,
    v_page_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program copies one token, all its KV heads."""
    if PDL:
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    block = slot // BLOCK_SIZE
    line = slot % BLOCK_SIZE
    heads = tl.arange(0, HEADS_PADDED)[:, None]
    k_dims = tl.arange(0, K_PADDED)[None, :]
    k_mask = (heads < NUM_KV_HEADS) & (k_dims < K_DIM)
    key = tl.load(k + token * k_token_stride + heads * k_head_stride + k_dims, mask=k_mask)
    v_dims = tl.arange(0, V_PADDED)[None, :]
    v_mask = (heads < NUM_KV_HEADS) & (v_dims < V_DIM)
    value = tl.load(v + token * v_token_stride + heads * v_head_stride + v_dims, mask=v_mask)
    if PDL:
        gdc_launch_dependents()
    k_cache += block * k_block_stride + line * k_line_stride
    v_cache += block * v_block_stride + line * v_line_stride
    tl.store(k_cache + heads * k_page_head_stride + k_dims, key, mask=k_mask)
    tl.store(v_cache + heads * v_page_head_stride + v_dims, value, mask=v_mask)


@triton.jit
def _blocks(
    block_table,  # at this row
    tile,  # its first token
    end,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The blocks of a tile of keys: one number where the tile lies in one page, else one a token."""
    if BLOCK_SIZE % BLOCK_N == 0:
        return tl.load(block_table + tile // BLOCK_SIZE, mask=tile < end, other=0)
    else:
        tokens = tile + tl.arange(0, BLOCK_N)
        return tl.load(block_table + tokens // BLOCK_SIZE, mask=tokens < end, other=0)


@triton.jit
def _attend_pages(
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
    lower,  # first key that some query sees: with a window, what lies before it may have no page any more
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
    """Online softmax over keys start to end, on top of what came before. Returns top, total and acc.

    Hidden keys score -1e30, not -inf, so that a tile with no visible key gives no NaN. What such a tile adds is wiped
    when the first visible key rescales by 2^(-1e30 - score) = 0; every query sees at least its own position.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    k_dims = tl.arange(0, K_PADDED)
    v_dims = tl.arange(0, V_PADDED)
    k_fits = tl.full((1, K_PADDED), True, tl.int1)  # a constant, which costs nothing
    if K_DIM != K_PADDED:
        k_fits = (k_dims < K_DIM)[None, :]
    v_fits = tl.full((1, V_PADDED), True, tl.int1)
    if V_DIM != V_PADDED:
        v_fits = (v_dims < V_DIM)[None, :]
    to_log2 = scale * LOG2E
    if HAS_SOFTCAP:
        to_log2 = LOG2E
    # A tile's blocks are loaded one tile ahead: were they loaded in the tile's own turn, Triton would give its stages
    # to the two loads that wait for one another and leave K and V one buffer each, with nothing in flight behind it.
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
            # Scaled before they are hidden: the fused multiply-add below would see -1e30 * to_log2 with more digits
            # than the maximum has, and take 2 to the power of the difference.
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


@triton.jit
def _decode_rows(
    base,
    num_rows,
    cu_seqlens_q,
    context_lens,
    window,
    BLOCK_N: tl.constexpr,
    MIXED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Of ROWS rows: whether they decode, their token, context, first key to read and tiles to read; 0 if they do not.

    The first tile of a window begins before it, at a multiple of BLOCK_N.
    """
    rows = base + tl.arange(0, ROWS)
    decodes = rows < num_rows
    tokens = rows
    keys = tl.load(context_lens + rows, mask=rows < num_rows, other=0)
    if MIXED:
        tokens = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
        ends = tl.load(cu_seqlens_q + rows + 1, mask=rows < num_rows, other=0)
        decodes = decodes & (ends - tokens == 1)
        keys = tl.where(decodes, keys, 0)
    starts = tl.zeros_like(keys)
    if HAS_WINDOW:
        starts = tl.maximum(keys - window, 0) // BLOCK_N * BLOCK_N
    return decodes, tokens, keys, starts, (keys - starts + BLOCK_N - 1) // BLOCK_N


@triton.jit(do_not_specialize=["num_rows", "num_extras", "num_places", "num_busy", "min_split_tiles", "window"])
def _plan_decode_kernel(
    plan,  # [num_rows + num_extras, ITEM] int32
    row_slots,
    cu_seqlens_q,
    context_lens,
    num_rows,
    num_extras,
    num_places,  # items that are resident at once
    num_busy,  # items that take all the bandwidth
    min_split_tiles,
    window,
    BLOCK_N: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIXED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program says what each program of the step's decode kernels attends to.

    Item i below num_rows is the first split of row i; the extras behind them are the other splits, in the order of the
    rows. An item is: row, its slot, token and context, the split's first key and the one past its last, the row's
    splits, and the item of its split 1, which those of the others follow. The row is -1 where there is nothing to do:
    the row does not decode, or the extra is not used.

    The longest row is cut into 1, 2, ... MAX_SPLITS, the others into splits as long as its; what should end first is
    taken, of all that the extras suffice for. Time is counted in tiles that the bandwidth is shared for: all of them,
    and what is lost while the last wave has too few programs to use it, but no less than a split takes alone; and one
    for each extra. All splits of a row have one length but the last.
    """
    if PDL:
        gdc_wait()
    all_tiles = 0
    longest = 1
    num_decodes = 0
    for base in range(0, num_rows, ROWS):
        decodes, _, _, _, tiles = _decode_rows(
            base, num_rows, cu_seqlens_q, context_lens, window, BLOCK_N, MIXED, HAS_WINDOW
        )
        all_tiles += tl.sum(tiles)
        longest = tl.maximum(longest, tl.max(tiles))
        num_decodes += tl.sum(decodes.to(tl.int32))
    if PDL:
        gdc_launch_dependents()
    lengths = tl.maximum(tl.cdiv(longest, tl.arange(0, MAX_SPLITS) + 1), min_split_tiles)  # of a split, in tiles
    items = tl.zeros_like(lengths)
    for base in range(0, num_rows, ROWS):
        decodes, _, _, _, tiles = _decode_rows(
            base, num_rows, cu_seqlens_q, context_lens, window, BLOCK_N, MIXED, HAS_WINDOW
        )
        splits = tl.maximum((tiles[None, :] + lengths[:, None] - 1) // lengths[:, None], 1)
        items += tl.sum(tl.where(decodes[None, :], tl.minimum(splits, MAX_SPLITS), 0), 1)
    beyond = items - num_decodes
    last_wave = (items - 1) % num_places + 1
    cost = all_tiles + lengths * tl.maximum(num_busy - last_wave, 0)
    cost = tl.maximum(cost, lengths * num_busy) + beyond
    cost = tl.where(beyond <= num_extras, cost, 2147483647)
    split_tiles = tl.max(tl.where(cost == tl.min(cost), lengths, 0))
    used = 0
    for base in range(0, num_rows, ROWS):
        rows = base + tl.arange(0, ROWS)
        exists = rows < num_rows
        slots = tl.load(row_slots + rows, mask=exists, other=0)
        decodes, tokens, keys, starts, tiles = _decode_rows(
            base, num_rows, cu_seqlens_q, context_lens, window, BLOCK_N, MIXED, HAS_WINDOW
        )
        splits = tl.minimum((tiles + split_tiles - 1) // split_tiles, MAX_SPLITS)
        splits = tl.maximum(splits, 1)
        row_tiles = tl.maximum((tiles + splits - 1) // splits, 1)  # evened out: 5 tiles by 4 are 3, 2
        splits = tl.maximum((tiles + row_tiles - 1) // row_tiles, 1)
        second = num_rows + used + tl.cumsum(splits - 1) - (splits - 1)
        used += tl.sum(splits - 1)
        for split in range(tl.max(splits)):
            item = plan + tl.where(split == 0, rows, second + split - 1) * ITEM
            start = starts + split * row_tiles * BLOCK_N
            mask = exists & (split < splits)
            tl.store(item, tl.where(decodes, rows, -1), mask=mask)
            tl.store(item + 1, slots, mask=mask)
            tl.store(item + 2, tokens, mask=mask)
            tl.store(item + 3, keys, mask=mask)
            tl.store(item + 4, start, mask=mask)
            tl.store(item + 5, tl.minimum(start + row_tiles * BLOCK_N, keys), mask=mask)
            tl.store(item + 6, splits, mask=mask)
            tl.store(item + 7, second, mask=mask)
    for base in range(used, num_extras, ROWS):  # behind all that was stored above: no thread writes what another does
        extras = base + tl.arange(0, ROWS)
        tl.store(plan + (num_rows + extras) * ITEM, -1, mask=extras < num_extras)


@triton.jit
def _add_up(
    partial_out,
    partial_lse,
    out,
    first,  # item of split 0
    second,  # item of split 1; those of the others follow it
    num_splits,
    token,
    kv_head,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,  # splits at once: their loads are in flight together
):
    """Weigh the splits of one row and KV head by their log-sum-exp, in order, and store the result."""
    group = tl.arange(0, GROUP_PADDED)
    heads = kv_head * GROUP_SIZE + group
    dims = tl.arange(0, V_PADDED)
    top = tl.full((GROUP_PADDED,), -1e30, tl.float32)
    total = tl.full((GROUP_PADDED,), 0.0, tl.float32)
    acc = tl.full((GROUP_PADDED, V_PADDED), 0.0, tl.float32)
    for base in range(0, num_splits, CHUNK):
        splits = base + tl.arange(0, CHUNK)
        items = tl.where(splits == 0, first, second + splits - 1).to(tl.int64)
        lines = items[None, :] * (NUM_KV_HEADS * GROUP_SIZE) + heads[:, None]
        live = (group < GROUP_SIZE)[:, None] & (splits < num_splits)[None, :]
        lse = tl.load(partial_lse + lines, mask=live, other=-1e30, cache_modifier=".cg")
        part = tl.load(
            partial_out + lines[:, :, None] * V_DIM + dims[None, None, :],
            mask=live[:, :, None] & (dims < V_DIM)[None, None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, tl.max(lse, 1))
        rescale = tl.exp2(top - new_top)
        weights = tl.exp2(lse - new_top[:, None])
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * part, 1)
        top = new_top
    acc = acc / total[:, None]
    at = token.to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + heads
    tl.store(
        out + at[:, None] * V_DIM + dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=(group < GROUP_SIZE)[:, None] & (dims < V_DIM)[None, :],
    )


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial_out,  # [num_items, num_kv_heads, GROUP_SIZE, V_DIM] float32
    partial_lse,  # [num_items, num_kv_heads, GROUP_SIZE] float32, log2 units
    counters,  # [num_rows, num_kv_heads] int32: splits that have arrived. Zero before and after
    plan,  # [num_items, ITEM] int32, see _plan_decode_kernel
    sinks,
    block_tables,
    window,
    scale,
    softcap,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_line_stride,
    k_head_stride,
    v_block_stride,
    v_line_stride,
    v_head_stride,
    table_stride,
    GROUP_SIZE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one KV head with its group of query heads as the tile, one item of the plan.

    A row's splits leave their results in the scratch, and the one that arrives last adds them up.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    if PDL:
        gdc_wait()
    item = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    row = tl.load(plan + item * ITEM)
    if row < 0:
        return
    slot = tl.load(plan + item * ITEM + 1)
    token = tl.load(plan + item * ITEM + 2)
    keys = tl.load(plan + item * ITEM + 3)
    start = tl.load(plan + item * ITEM + 4)
    end = tl.load(plan + item * ITEM + 5)
    num_splits = tl.load(plan + item * ITEM + 6)
    second = tl.load(plan + item * ITEM + 7)

    group = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP_SIZE + group
    k_dims = tl.arange(0, K_PADDED)
    query = tl.load(
        q + token.to(tl.int64) * q_token_stride + heads[:, None] * q_head_stride + k_dims[None, :],
        mask=(group < GROUP_SIZE)[:, None] & (k_dims < K_DIM)[None, :],
        other=0.0,
    )
    top = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    if HAS_SINKS:  # a column without a value: the first split's
        sink = tl.load(sinks + heads, mask=group < GROUP_SIZE, other=0.0).to(tl.float32) * LOG2E
        top = tl.where(item == row, tl.maximum(sink, -1e30), top)
        total = tl.where(item == row, 1.0, total)
    top, total, acc = _attend_pages(
        top,
        total,
        tl.full((BLOCK_M, V_PADDED), 0.0, tl.float32),
        query,
        tl.full((BLOCK_M,), -1, tl.int32) + keys,
        k_cache + kv_head * k_head_stride,
        v_cache + kv_head * v_head_stride,
        block_tables + slot.to(tl.int64) * table_stride,
        start,
        end,
        keys - window,
        window,
        scale,
        softcap,
        k_block_stride,
        k_line_stride,
        v_block_stride,
        v_line_stride,
        K_DIM,
        V_DIM,
        K_PADDED,
        V_PADDED,
        BLOCK_SIZE,
        BLOCK_N,
        True,
        HAS_WINDOW,
        HAS_SOFTCAP,
    )
    if PDL:
        gdc_launch_dependents()
    total = tl.maximum(total, 1e-20)
    acc = acc / total[:, None]
    v_dims = tl.arange(0, V_PADDED)
    mask = (group < GROUP_SIZE)[:, None] & (v_dims < V_DIM)[None, :]
    if num_splits == 1:
        lines = token.to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + heads
        tl.store(out + lines[:, None] * V_DIM + v_dims[None, :], acc.to(out.dtype.element_ty), mask=mask)
    else:
        lines = item.to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + heads
        tl.store(partial_out + lines[:, None] * V_DIM + v_dims[None, :], acc, mask=mask)
        tl.store(partial_lse + lines, top + tl.log2(total), mask=group < GROUP_SIZE)
        # One thread does the atomic. The barrier puts every thread's stores before it, and its release makes them
        # visible to the whole GPU first: Triton 3.6 puts no barrier there by itself. Whoever arrives last has acquired
        # them by the same atomic, whose result reaches its other threads over a barrier. They read at L2 (.cg), so
        # that no line that an earlier launch left in L1 can answer.
        tl.debug_barrier()
        counter = counters + row * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(counter, 0)  # for the next launch: nobody of this one is still to come
            _add_up(
                partial_out,
                partial_lse,
                out,
                row,
                second,
                num_splits,
                token,
                kv_head,
                GROUP_SIZE,
                NUM_KV_HEADS,
                V_DIM,
                V_PADDED,
                GROUP_PADDED,
                CHUNK,
            )


@triton.jit
def _num_query_tiles(
    rows,  # one or many
    num_rows,
    cu_seqlens_q,
    BLOCK_M: tl.constexpr,
):
    """Tiles of queries that the rows' prompts make: 0 for a row of one query, of none, or beyond the last."""
    starts = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
    ends = tl.load(cu_seqlens_q + rows + 1, mask=rows < num_rows, other=0)
    return tl.where(ends - starts > 1, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def _add_up_tile(
    partial_out,
    partial_lse,
    first,  # line of the first split's first query
    stride,  # lines from one split to the next
    num_splits,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Weigh the splits of one tile and head by their log-sum-exp, in order: [BLOCK_M, V_PADDED]."""
    queries = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, V_PADDED)
    top = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    acc = tl.full((BLOCK_M, V_PADDED), 0.0, tl.float32)
    for split in range(num_splits):
        lines = first + split * stride + queries
        lse = tl.load(partial_lse + lines, cache_modifier=".cg")
        part = tl.load(
            partial_out + lines[:, None] * V_DIM + dims[None, :],
            mask=(dims < V_DIM)[None, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_top = tl.maximum(top, lse)
        rescale = tl.exp2(top - new_top)
        weight = tl.exp2(lse - new_top)
        total = total * rescale + weight
        acc = acc * rescale[:, None] + weight[:, None] * part
        top = new_top
    return acc / total[:, None]


@triton.jit(do_not_specialize=["num_rows", "most_items", "table_stride"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial_out,  # SPLIT: [most_items, heads of the grid, BLOCK_M, V_DIM] float32
    partial_lse,  # [most_items, heads of the grid, BLOCK_M] float32, log2 units
    counters,  # [most_items, heads of the grid] int32: splits of a tile that have arrived. Zero before and after
    most_items,  # of tiles and their splits, where there are splits
    sinks,
    block_tables,
    row_slots,
    cu_seqlens_q,
    context_lens,
    num_rows,
    window,
    scale,
    softcap,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    k_line_stride,
    k_head_stride,
    v_block_stride,
    v_line_stride,
    v_head_stride,
    table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PACK: tl.constexpr,  # lines of a tile that each query has: 1, or those of all heads that share a KV head, padded
    SPLIT: tl.constexpr,  # whether the keys of a tile may be split
    MIN_SPLIT: tl.constexpr,  # keys of a split, a multiple of BLOCK_N
    PDL: tl.constexpr,
):
    """One program: some tiles of BLOCK_M queries of one row, for one head; or splits of tiles.

    With PACK, a tile has BLOCK_M / PACK queries, each for all heads of one KV head, and the grid is over KV heads.

    The grid has tiles for the step's tokens and a few rows' broken ends; in a step of very many short prompts a program
    takes several. Tiles go by row, and in a row from last to first: the last reads the most keys.

    With SPLIT, each tile has as many splits as most_items allow for all tiles alike; it uses those that its keys are
    enough for. They leave their results in the scratch, and the one that arrives last adds them up, in order.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    if PDL:
        gdc_wait()
    GROUP_SIZE: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // PACK
    lines = tl.arange(0, BLOCK_M)
    head = tl.program_id(0)
    kv_head = head // GROUP_SIZE
    heads = head
    if PACK > 1:
        kv_head = head
        heads = kv_head * GROUP_SIZE + lines % PACK
    all_tiles = 0
    for base in range(0, num_rows, ROWS):
        all_tiles += tl.sum(_num_query_tiles(base + tl.arange(0, ROWS), num_rows, cu_seqlens_q, BLOCK_Q))
    most_splits = 1
    if SPLIT:
        most_splits = tl.maximum(most_items // tl.maximum(all_tiles, 1), 1)
    # Without disable_licm what the inner loops compute once is kept in registers across tiles, and some is spilled.
    for item in tl.range(tl.program_id(1), all_tiles * most_splits, tl.num_programs(1), disable_licm=True):
        row = 0
        end_tile = 0
        split = 0
        tile = item
        if SPLIT:
            split = item % most_splits
            tile = item // most_splits
        place = tile
        for base in range(0, num_rows, ROWS):
            rows = base + tl.arange(0, ROWS)
            tiles = _num_query_tiles(rows, num_rows, cu_seqlens_q, BLOCK_Q)
            before = (end_tile + tl.cumsum(tiles) <= place) & (rows < num_rows)
            row += tl.sum(before.to(tl.int32))
            tile -= tl.sum(tl.where(before, tiles, 0))
            end_tile += tl.sum(tiles)
        tile = _num_query_tiles(row, num_rows, cu_seqlens_q, BLOCK_Q) - 1 - tile
        token_start = tl.load(cu_seqlens_q + row)
        query_len = tl.load(cu_seqlens_q + row + 1) - token_start
        context_len = tl.load(context_lens + row)
        slot = tl.load(row_slots + row).to(tl.int64)
        queries = tile * BLOCK_Q + lines // PACK
        tokens = (token_start + queries).to(tl.int64)
        is_line = queries < query_len
        q_lines = tokens * q_token_stride + heads * q_head_stride
        out_lines = tokens * NUM_HEADS + heads
        if GROUP_SIZE % PACK != 0:
            is_line = is_line & (lines % PACK < GROUP_SIZE)
        k_dims = tl.arange(0, K_PADDED)
        query = tl.load(
            q + q_lines[:, None] + k_dims[None, :], mask=is_line[:, None] & (k_dims < K_DIM)[None, :], other=0.0
        )
        top = tl.full((BLOCK_M,), -1e30, tl.float32)
        total = tl.full((BLOCK_M,), 0.0, tl.float32)
        if HAS_SINKS:  # a column without a value: the first split's
            sink = tl.maximum(top, tl.load(sinks + tl.where(is_line, heads, 0)).to(tl.float32) * LOG2E)
            if SPLIT:
                top = tl.where(split == 0, sink, top)
                total = tl.where(split == 0, total + 1.0, total)
            else:
                top = sink
                total = total + 1.0
        acc = tl.full((BLOCK_M, V_PADDED), 0.0, tl.float32)

        # Up to full_start the window hides some keys from some queries, from there to full_end every query sees every
        # key, and behind that some keys lie in some queries' future. Most of a long row is in the middle, which needs
        # neither masks nor bounds: 610 instructions a tile of 128 keys where the others take 1,016 (SASS, size 128).
        past = context_len - query_len + tile * BLOCK_Q  # tokens before the tile's first query
        end = tl.minimum(context_len, past + BLOCK_Q)
        start = 0
        full_start = 0
        full_end = tl.maximum(past + 1, 0) // BLOCK_N * BLOCK_N
        if HAS_WINDOW:
            start = tl.maximum(past - window + 1, 0) // BLOCK_N * BLOCK_N
            full_start = tl.cdiv(tl.maximum(past + BLOCK_Q - window, 0), BLOCK_N) * BLOCK_N
            full_end = tl.maximum(full_end, start)
            full_start = tl.minimum(full_start, full_end)
        num_splits = 1
        if SPLIT:  # the three stretches, cut to the split's own
            num_splits = tl.minimum(tl.maximum((end - start) // MIN_SPLIT, 1), most_splits)
            split_len = tl.maximum(tl.cdiv(tl.cdiv(end - start, BLOCK_N), num_splits), 1) * BLOCK_N
            num_splits = tl.maximum(tl.cdiv(end - start, split_len), 1)
            start += split * split_len
            end = tl.minimum(end, start + split_len)
            full_start = tl.minimum(tl.maximum(start, full_start), end)
            full_end = tl.minimum(tl.maximum(start, full_end), end)
        for phase in tl.static_range(3):
            if HAS_WINDOW or phase > 0:
                top, total, acc = _attend_pages(
                    top,
                    total,
                    acc,
                    query,
                    past + lines // PACK,
                    k_cache + kv_head * k_head_stride,
                    v_cache + kv_head * v_head_stride,
                    block_tables + slot * table_stride,
                    start if phase == 0 else (full_start if phase == 1 else full_end),
                    full_start if phase == 0 else (full_end if phase == 1 else end),
                    past - window + 1,
                    window,
                    scale,
                    softcap,
                    k_block_stride,
                    k_line_stride,
                    v_block_stride,
                    v_line_stride,
                    K_DIM,
                    V_DIM,
                    K_PADDED,
                    V_PADDED,
                    BLOCK_SIZE,
                    BLOCK_N,
                    phase != 1,
                    HAS_WINDOW,
                    HAS_SOFTCAP,
                )
        if PDL:
            gdc_launch_dependents()
        total = tl.maximum(total, 1e-20)
        acc = acc / total[:, None]
        v_dims = tl.arange(0, V_PADDED)
        at = out + out_lines[:, None] * V_DIM + v_dims[None, :]
        mask = is_line[:, None] & (v_dims < V_DIM)[None, :]
        if SPLIT:
            if num_splits == 1:
                if split == 0:
                    tl.store(at, acc.to(out.dtype.element_ty), mask=mask)
            else:
                if split < num_splits:  # what follows is as in _decode_kernel
                    stride = tl.num_programs(0) * BLOCK_M
                    first = (place * most_splits).to(tl.int64) * stride + head * BLOCK_M
                    own = first + split * stride + lines
                    lse = top + tl.log2(total)
                    tl.store(partial_out + own[:, None] * V_DIM + v_dims[None, :], acc, mask=(v_dims < V_DIM)[None, :])
                    tl.store(partial_lse + own, lse)
                    tl.debug_barrier()
                    counter = counters + place * tl.num_programs(0) + head
                    if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
                        tl.store(counter, 0)
                        whole = _add_up_tile(
                            partial_out,
                            partial_lse,
                            first,
                            stride,
                            num_splits,
                            V_DIM,
                            V_PADDED,
                            BLOCK_M,
                        )
                        tl.store(at, whole.to(out.dtype.element_ty), mask=mask)
        else:
            tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


def write_kv(
    k: Tensor,  # [num_tokens, num_kv_heads, k_head_dim]
    v: Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
    k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, k_head_dim]
    v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, v_head_dim]
    slot_mapping: Tensor,  # [num_tokens] int32
) -> None:
    """Put token t's K and V at slot_mapping[t] = block * block_size + offset."""
    num_tokens, num_kv_heads, k_dim = k.shape
    if not num_tokens:
        return
    _write_kv_kernel[(num_tokens,)](
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        k.stride(0),
        k.stride(1),
        v.stride(0),
        v.stride(1),
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        K_DIM=k_dim,
        V_DIM=v.shape[2],
        BLOCK_SIZE=k_cache.shape[1],
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        K_PADDED=triton.next_power_of_2(k_dim),
        V_PADDED=triton.next_power_of_2(v.shape[2]),
        num_warps=4,
        **pdl_options(k.device),
        **FMA,
    )


_PlanKey = tuple[int, int, int, int]  # window, BLOCK_N, KV heads, resident programs


class TritonAttention:
    """AttentionBackend for CUDA. Owns the scratch of its splits, so two engines in one process never share it.

    Its steps run one after another, as on one stream: the splits of two would count one another.
    """

    max_head_dim = MAX_HEAD_DIM
    capturable = True
    # Between two runs: 1 to 2% gained at 32 rows, 3% lost at 256. ``benchmarks.attention_sweep`` is to settle it.
    heads_first = False

    def __init__(self, device: torch.device) -> None:
        """Raise ValueError for a device that Triton has no kernels for."""
        if device.type == "cuda":
            self._num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            large = torch.cuda.get_device_capability(device)[0] in (9, 10)  # Hopper; Blackwell's, but not its GeForce
            self._prefill_tiles = PREFILL if large else PREFILL_SMALL
        elif os.environ.get("TRITON_INTERPRET") == "1":
            self._num_multiprocessors = 16
            self._prefill_tiles = PREFILL
        else:
            raise ValueError(f"attention='triton' runs on CUDA devices, not on {device}")
        self._device = device
        self._partials: list[Tensor] = []
        self._counters: list[Tensor] = []
        self._no_partials = torch.zeros(1, dtype=torch.float32, device=device)  # for a launch without splits
        self._no_counters = torch.zeros(1, dtype=torch.int32, device=device)
        self._plan_scratch: dict[_PlanKey, list[Tensor]] = {}
        self._plans: dict[_PlanKey, Tensor] = {}  # this step's

    def prepare(self, batch: AttentionBatch) -> None:
        """A step that is captured is prepared in the capture: its plans are made by the graph, in its first layers."""
        self._batch = batch
        self._plans.clear()
        self._tables = batch.block_tables.unbind(0)
        self._slot_mappings = batch.slot_mapping.unbind(0)

    def slot_mapping(self, group: int) -> Tensor:
        """For whoever stores k and v itself, and then attends with None for both."""
        return self._slot_mappings[group]

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, k_head_dim]
        k: Tensor | None,  # [num_tokens, num_kv_heads, k_head_dim]; None: in its pages already
        v: Tensor | None,  # [num_tokens, num_kv_heads, v_head_dim]
        k_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, k_head_dim]
        v_cache: Tensor,  # [num_blocks, block_size, num_kv_heads, v_head_dim]
        group: int,
        *,
        scale: float,
        window: int = 0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        batch = self._batch
        head_dim = max(k_cache.shape[3], v_cache.shape[3])
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head size {head_dim}: the Triton kernels take up to {MAX_HEAD_DIM}")
        if k is not None and v is not None:
            k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
            write_kv(k, v, k_cache, v_cache, self._slot_mappings[group])
        q = q if q.stride(2) == 1 else q.contiguous()
        shape = (q.shape[0], q.shape[1], v_cache.shape[3])
        num_rows = batch.context_lens.shape[0]
        # In a decode step the kernel writes every token; else there may be padding behind the last row.
        mixed = batch.max_query_len != 1 or q.shape[0] != num_rows
        out = q.new_zeros(shape) if mixed else q.new_empty(shape)
        if num_rows:
            self._decode(out, q, k_cache, v_cache, group, scale, window, softcap, sinks, mixed)
            if batch.max_query_len > 1:
                self._prefill(out, q, k_cache, v_cache, group, scale, window, softcap, sinks)
        return out

    def _decode(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        group: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
        mixed: bool,
    ) -> None:
        batch, num_rows = self._batch, self._batch.context_lens.shape[0]
        num_heads, k_dim = q.shape[1:]
        block_size, num_kv_heads, v_dim = v_cache.shape[1:]
        group_size = num_heads // num_kv_heads
        group_padded = triton.next_power_of_2(group_size)
        k_padded, v_padded = _padded(k_dim), _padded(v_dim)
        tiles = DECODE_FLOAT32 if q.element_size() == 4 else DECODE
        size = max(64, k_padded, v_padded)
        block_n, num_warps, num_stages = tiles[size]
        plan = self._plan(window, block_n, num_kv_heads, RESIDENT_PROGRAMS[size], mixed)
        num_items = plan.shape[0]
        num_lines = num_items * num_heads
        partials = self._grown(self._partials, num_lines * (v_dim + 1), torch.float32)
        _decode_kernel[(num_items * num_kv_heads,)](
            q,
            k_cache,
            v_cache,
            out,
            partials[: num_lines * v_dim],
            partials[num_lines * v_dim :],
            self._grown(self._counters, num_rows * num_kv_heads, torch.int32),
            plan,
            q if sinks is None else sinks,
            self._tables[group],
            window,
            scale,
            softcap,
            q.stride(0),
            q.stride(1),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            batch.block_tables.stride(1),
            GROUP_SIZE=group_size,
            NUM_KV_HEADS=num_kv_heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            K_PADDED=k_padded,
            V_PADDED=v_padded,
            BLOCK_SIZE=block_size,
            BLOCK_M=max(16, group_padded),
            BLOCK_N=block_n,
            GROUP_PADDED=group_padded,
            CHUNK=max(1, min(MAX_SPLITS, 4096 // (group_padded * v_padded))),  # 32 registers a thread
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=softcap > 0,
            HAS_SINKS=sinks is not None,
            num_warps=num_warps,
            num_stages=num_stages,
            **pdl_options(q.device),
            **FMA,
        )

    def _plan(self, window: int, block_n: int, num_kv_heads: int, num_resident: int, mixed: bool) -> Tensor:
        """The step's decode plan, [num_items, ITEM] int32: made for the first layer of its kind, for all of them."""
        key = (window, block_n, num_kv_heads, num_resident)
        if key in self._plans:
            return self._plans[key]
        batch, num_rows = self._batch, self._batch.context_lens.shape[0]
        context_len = min(batch.max_context_len, window + block_n - 1) if window else batch.max_context_len
        busy = num_rows * num_kv_heads >= self._num_multiprocessors // 2
        min_split_tiles = (FULL_SPLIT_LEN if busy else MIN_SPLIT_LEN) // block_n
        num_places = max(num_resident * self._num_multiprocessors // num_kv_heads, 1)
        num_extras = 0
        if (max_splits := triton.cdiv(triton.cdiv(context_len, block_n), min_split_tiles)) > 1:
            # One wave; or else enough to split the rows of a little more than one, and the long ones of very many.
            num_extras = num_places - num_rows if num_rows <= num_places else max(2 * num_places, num_rows // 2)
            num_extras = min(num_extras, num_rows * (max_splits - 1))
        num_items = num_rows + num_extras
        scratch = self._grown(self._plan_scratch.setdefault(key, []), num_items * ITEM.value, torch.int32)
        plan = scratch[: num_items * ITEM.value].view(num_items, ITEM.value)
        _plan_decode_kernel[(1,)](
            plan,
            batch.row_slots,
            batch.cu_seqlens_q,
            batch.context_lens,
            num_rows,
            num_extras,
            num_places,
            max(BUSY_PROGRAMS * self._num_multiprocessors // num_kv_heads, 1),
            min_split_tiles,
            window,
            BLOCK_N=block_n,
            MAX_SPLITS=MAX_SPLITS,
            MIXED=mixed,
            HAS_WINDOW=window > 0,
            num_warps=4,
            **pdl_options(self._device),
            **FMA,
        )
        self._plans[key] = plan
        return plan

    def _prefill(
        self,
        out: Tensor,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        group: int,
        scale: float,
        window: int,
        softcap: float,
        sinks: Tensor | None,
    ) -> None:
        batch = self._batch
        num_rows = batch.context_lens.shape[0]
        num_heads, k_dim = q.shape[1:]
        block_size, num_kv_heads, v_dim = v_cache.shape[1:]
        k_padded, v_padded = _padded(k_dim), _padded(v_dim)
        size = max(64, k_padded, v_padded)
        block_m, block_n, num_warps, num_stages = PREFILL_FLOAT32
        if q.element_size() == 2:
            block_m, block_n, num_warps, num_stages = self._prefill_tiles[size]
        pack = triton.next_power_of_2(num_heads // num_kv_heads)
        if pack > block_m // 4:
            pack = 1
        num_grid_heads = num_heads if pack == 1 else num_kv_heads
        most_items = PROGRAMS_FOR_SPLITS[size] * self._num_multiprocessors // num_grid_heads
        tiles_needed = triton.cdiv(q.shape[0] * pack, block_m)
        split = 2 * tiles_needed <= most_items and batch.max_context_len >= 2 * MIN_PREFILL_SPLIT
        partials, counters, num_lines = self._no_partials, self._no_counters, 0
        if split:
            num_lines = most_items * num_grid_heads * block_m
            num_programs = max(tiles_needed + min(num_rows, PREFILL_ROWS), most_items)
            partials = self._grown(self._partials, num_lines * (v_dim + 1), torch.float32)
            counters = self._grown(self._counters, most_items * num_grid_heads, torch.int32)
        else:
            pack, num_grid_heads = 1, num_heads
            num_programs = q.shape[0] // block_m + min(num_rows, PREFILL_ROWS)
        _prefill_kernel[(num_grid_heads, num_programs)](
            q,
            k_cache,
            v_cache,
            out,
            partials[: num_lines * v_dim],
            partials[num_lines * v_dim :],
            counters,
            most_items,
            q if sinks is None else sinks,
            self._tables[group],
            batch.row_slots,
            batch.cu_seqlens_q,
            batch.context_lens,
            num_rows,
            window,
            scale,
            softcap,
            q.stride(0),
            q.stride(1),
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            batch.block_tables.stride(1),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            K_PADDED=k_padded,
            V_PADDED=v_padded,
            BLOCK_SIZE=block_size,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=softcap > 0,
            HAS_SINKS=sinks is not None,
            PACK=pack,
            SPLIT=split,
            MIN_SPLIT=MIN_PREFILL_SPLIT,
            num_warps=num_warps,
            num_stages=num_stages,
            **pdl_options(q.device),
            **FMA,
        )

    def _grown(self, kept: list[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """The newest scratch of a kind, with at least ``size`` elements: all zeros when it was made.

        What it outgrew stays alive, because a captured CUDA graph may hold its address. It grows outside of captures
        alone, where its zeros would be written at every replay and not before: a step runs once before it is captured.
        """
        if not kept or kept[-1].numel() < size:
            capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not capturing, "run a step once before it is captured"
            if kept:  # at least doubled, so that all that is kept is no more than what is used
                size = max(size, 2 * kept[-1].numel())
            kept.append(torch.zeros(size, dtype=dtype, device=self._device))
        return kept[-1]


def _padded(head_dim: int) -> int:
    """A head size as tl.dot takes it."""
    return max(16, triton.next_power_of_2(head_dim))
