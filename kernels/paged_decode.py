"""Decode attention in Triton: rows of one query, whose contexts are split. Contract in ``paged_attention``."""

from __future__ import annotations

import triton
import triton.language as tl

from cbatch.kernels.page_tiles import ROWS, attend_pages
from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait

# How decode is split. A row and KV head is one program or several (flash decoding). Programs share the memory's
# bandwidth, and 2 on each of the H200's 132 multiprocessors, with 64 KiB of K and V each in flight, saturate it.
# So what counts is that the last programs end together, and that no row is split without need: a split costs about 2 us
# of latency at its end (store, fence, atomic, reading the other splits' results).
#
# The hardware places a grid larger than what is resident at once three programs to a multiprocessor from the start: the
# 256 programs of 32 rows then leave a third of the multiprocessors empty. A grid of one wave is spread evenly. So rows
# that fit in one wave get a grid of one wave, used or not. Microseconds a layer on an H200, 32 rows, 32 heads on 8 of
# 128, bfloat16, by programs in the grid (396 are resident, 256 have work):
#   context                      384    392    400    520
#   224                         11.3   11.7   13.4   13.6
#   4,192                        129    129    152    152
#   8,100                        244    244    290    290
BUSY_PROGRAMS = 2  # per multiprocessor; they take all the bandwidth
MAX_SPLITS = 64  # of a row
MIN_SPLIT_LEN = 128  # tokens that a split should have, if the rows alone leave multiprocessors idle
FULL_SPLIT_LEN = 512  # if they do not: a program alone reads that in 6 us
ITEM = tl.constexpr(8)  # int32 numbers of a split in the plan: one sector of 32 bytes

# Decode: (BLOCK_N, num_warps, num_stages) by the larger padded head size. K and V of a tile take 32 KiB and two tiles
# are in flight, or 16 KiB and three, in 72 or 54 KiB: three or four programs on a multiprocessor. 64 keys are a page.
DECODE = {64: (64, 4, 4), 128: (64, 4, 3), 256: (32, 4, 3)}
DECODE_FLOAT32 = {64: (32, 4, 3), 128: (32, 4, 3), 256: (16, 4, 3)}  # fewer keys, to compile fast
RESIDENT_PROGRAMS = {64: 4, 128: 3, 256: 3}  # per multiprocessor, by the larger padded head size


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
    """For ROWS rows: whether they decode, token, context length, first key and number of tiles to read.

    Rows that do not decode have no tiles. With a window, the first tile begins at a multiple of BLOCK_N, which may lie
    before the window.
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
def plan_decode_kernel(
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
    """A single program: plans what each program of the step's decode kernels attends to.

    The plan is a list of items, one for each split. Item i < num_rows is split 0 of row i; the num_extras items behind
    them are the further splits, in the order of the rows. An item has 8 numbers: the row, its slot, token and context
    length, the split's first key and the one past its last, the row's number of splits, and the item of its split 1,
    behind which its others follow. The row is -1 if there is nothing to do: the row does not decode, or the extra item
    is not used.

    All rows get the same split length (in tiles of BLOCK_N keys), chosen from those that cut the longest row into
    1, 2, ... MAX_SPLITS: the one with the least cost among those that need no more than num_extras items. The cost
    estimates the time, in tiles read at full bandwidth: all tiles, plus what is lost while the last wave has too few
    programs to use the bandwidth, but at least the time of one split alone; plus one for each extra item. Padding rows
    end at once and are in no wave. A row's splits are evened out: all but the last have the same length.
    """
    if PDL:
        gdc_wait()
    all_tiles = 0
    longest = 1
    num_decodes = 0
    for base in range(0, num_rows, ROWS):
        _, _, _, _, tiles = _decode_rows(base, num_rows, cu_seqlens_q, context_lens, window, BLOCK_N, MIXED, HAS_WINDOW)
        all_tiles += tl.sum(tiles)
        longest = tl.maximum(longest, tl.max(tiles))
        num_decodes += tl.sum((tiles > 0).to(tl.int32))
    if PDL:
        gdc_launch_dependents()
    lengths = tl.maximum(tl.cdiv(longest, tl.arange(0, MAX_SPLITS) + 1), min_split_tiles)  # of a split, in tiles
    items = tl.zeros_like(lengths)
    for base in range(0, num_rows, ROWS):
        _, _, _, _, tiles = _decode_rows(base, num_rows, cu_seqlens_q, context_lens, window, BLOCK_N, MIXED, HAS_WINDOW)
        splits = (tiles[None, :] + lengths[:, None] - 1) // lengths[:, None]
        items += tl.sum(tl.minimum(splits, MAX_SPLITS), 1)
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
    """Combine the splits of one row and KV head, weighted by their log-sum-exp, in order, and store the result."""
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
def decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial_out,  # [num_items, num_kv_heads, GROUP_SIZE, V_DIM] float32
    partial_lse,  # [num_items, num_kv_heads, GROUP_SIZE] float32, log2 units
    counters,  # [num_rows, num_kv_heads] int32: splits that have arrived. Zero before and after
    plan,  # [num_items, ITEM] int32, see plan_decode_kernel
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
    """One program: one item of the plan, for one KV head; the tile's rows are its group of query heads.

    The splits of a row leave their results in scratch memory, and the program that arrives last combines them.
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
    if HAS_SINKS:  # a softmax column without a value; the first split counts it
        sink = tl.load(sinks + heads, mask=group < GROUP_SIZE, other=0.0).to(tl.float32) * LOG2E
        top = tl.where(item == row, tl.maximum(sink, -1e30), top)
        total = tl.where(item == row, 1.0, total)
    top, total, acc = attend_pages(
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
        # visible to the whole GPU first: Triton 3.6 puts no barrier there by itself. The last program to arrive
        # acquires them by the same atomic, whose result reaches its other threads through a barrier. They read at L2
        # (.cg), so that they miss any stale line that an earlier launch left in L1.
        tl.debug_barrier()
        counter = counters + row * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            tl.store(counter, 0)  # for the next launch: all splits of this one have arrived
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
