"""Paged attention for rows of several queries, in tiles of queries, in Triton. Contract in ``paged_attention``."""

from __future__ import annotations

import triton
import triton.language as tl

from cbatch.kernels.page_tiles import ROWS, attend_pages
from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait

# Prefill: (BLOCK_M, BLOCK_N, num_warps, num_stages) by the larger padded head size. Three stages keep two tiles in
# flight; with two, each tile waits for its own load. At 64, two programs share a multiprocessor (244 registers, 4
# warps), so one's softmax hides behind the other's products. At 128 and 256 the accumulator leaves room for one, of two
# warpgroups and 224 KiB (160 at 256); at 128, tiles of 64 keys would rescale the accumulator twice as often.
PREFILL = {64: (128, 64, 4, 3), 128: (128, 128, 8, 3), 256: (128, 32, 8, 3)}
# On cards without 227 KiB of shared memory.
PREFILL_SMALL = {64: (64, 64, 4, 2), 128: (64, 64, 4, 2), 256: (64, 32, 4, 2)}
# Few prompt tokens behind a long context make few tiles: a chunk of 128 queries beside decodes is 32 programs that each
# read 100,000 keys, which takes as long as 500 queries. So a tile then has fewer queries, for all heads that share the
# keys, and the keys are split over programs, as decode splits its rows.
PROGRAMS_FOR_SPLITS = {64: 2, 128: 1, 256: 1}  # resident on a multiprocessor, by the larger padded head size
MIN_PREFILL_SPLIT = 512  # keys of a split, at least
LINES = 16  # of a tile that a program of add_up_kernel takes: 8 programs per tile and head
# IEEE float32 dots become one unrolled FMA per product: tiles of 64 x 64 would take minutes to compile.
PREFILL_FLOAT32 = (32, 32, 4, 2)
PREFILL_ROWS = 16  # rows whose partial last tiles fit the grid; with more, programs take several tiles


@triton.jit
def _num_query_tiles(
    rows,  # one or many
    num_rows,
    cu_seqlens_q,
    BLOCK_M: tl.constexpr,
):
    """Tiles of queries of each row: 0 for a row of at most one query, or beyond the last row."""
    starts = tl.load(cu_seqlens_q + rows, mask=rows < num_rows, other=0)
    ends = tl.load(cu_seqlens_q + rows + 1, mask=rows < num_rows, other=0)
    return tl.where(ends - starts > 1, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)


@triton.jit
def _num_tiles(num_rows, cu_seqlens_q, BLOCK_Q: tl.constexpr):
    """Tiles of all rows."""
    tiles = 0
    for base in range(0, num_rows, ROWS):
        tiles += tl.sum(_num_query_tiles(base + tl.arange(0, ROWS), num_rows, cu_seqlens_q, BLOCK_Q))
    return tiles


@triton.jit
def _tile_at(place, num_rows, cu_seqlens_q, BLOCK_Q: tl.constexpr):
    """The row, and the tile in it, of a place among all tiles: by row, and in a row from last to first."""
    row = 0
    end_tile = 0
    tile = place
    for base in range(0, num_rows, ROWS):
        rows = base + tl.arange(0, ROWS)
        tiles = _num_query_tiles(rows, num_rows, cu_seqlens_q, BLOCK_Q)
        before = (end_tile + tl.cumsum(tiles) <= place) & (rows < num_rows)
        row += tl.sum(before.to(tl.int32))
        tile -= tl.sum(tl.where(before, tiles, 0))
        end_tile += tl.sum(tiles)
    return row, _num_query_tiles(row, num_rows, cu_seqlens_q, BLOCK_Q) - 1 - tile


@triton.jit
def _split(num_keys, most_splits, MIN_SPLIT: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys of a tile's split, and the number of splits."""
    num_splits = tl.minimum(tl.maximum(num_keys // MIN_SPLIT, 1), most_splits)
    split_len = tl.maximum(tl.cdiv(tl.cdiv(num_keys, BLOCK_N), num_splits), 1) * BLOCK_N
    return split_len, tl.maximum(tl.cdiv(num_keys, split_len), 1)


@triton.jit(do_not_specialize=["num_rows", "most_items", "table_stride"])
def prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial_out,  # SPLIT: [most_items, heads of the grid, BLOCK_M, V_DIM] float32
    partial_lse,  # [most_items, heads of the grid, BLOCK_M] float32, log2 units
    most_items,  # with SPLIT: splits of all tiles, at most
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
    PACK: tl.constexpr,  # a query's lines in a tile: 1, or one per head that shares the KV head, padded
    SPLIT: tl.constexpr,  # whether the keys of a tile may be split
    MIN_SPLIT: tl.constexpr,  # keys of a split, a multiple of BLOCK_N
    PDL: tl.constexpr,
):
    """One program: one or more tiles of BLOCK_M queries of a row, for one head; or splits of tiles.

    With PACK, a tile has BLOCK_M / PACK queries, each for all heads of one KV head, and the grid is over KV heads.

    The grid has room for the step's tokens and a few rows' partial tiles; with very many short prompts, a program takes
    several tiles. Tiles go by row, and in a row from last to first: the last reads the most keys.

    With SPLIT, most_items is divided equally among the tiles; each uses as many splits as its keys fill. Their results
    go to the scratch, for ``add_up_kernel``.
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
    all_tiles = _num_tiles(num_rows, cu_seqlens_q, BLOCK_Q)
    most_splits = 1
    if SPLIT:
        most_splits = tl.maximum(most_items // tl.maximum(all_tiles, 1), 1)
    # Without disable_licm, loop invariants of the inner loops stay in registers across tiles, and spill.
    for item in tl.range(tl.program_id(1), all_tiles * most_splits, tl.num_programs(1), disable_licm=True):
        split = 0
        place = item
        if SPLIT:
            split = item % most_splits
            place = item // most_splits
        row, tile = _tile_at(place, num_rows, cu_seqlens_q, BLOCK_Q)
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
        if HAS_SINKS:  # a score without a value, in the first split
            sink = tl.maximum(top, tl.load(sinks + tl.where(is_line, heads, 0)).to(tl.float32) * LOG2E)
            if SPLIT:
                top = tl.where(split == 0, sink, top)
                total = tl.where(split == 0, total + 1.0, total)
            else:
                top = sink
                total = total + 1.0
        acc = tl.full((BLOCK_M, V_PADDED), 0.0, tl.float32)

        # Before full_start the window hides keys from some queries; from there to full_end every query sees every key;
        # after full_end keys lie in some queries' future. Most keys of a long row are in the middle, which needs no
        # masks: 610 instructions a tile of 128 keys, where the others take 1,016 (SASS, size 128).
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
        if SPLIT:  # clip the three ranges to the split
            split_len, num_splits = _split(end - start, most_splits, MIN_SPLIT, BLOCK_N)
            start += split * split_len
            end = tl.minimum(end, start + split_len)
            full_start = tl.minimum(tl.maximum(start, full_start), end)
            full_end = tl.minimum(tl.maximum(start, full_end), end)
        for phase in tl.static_range(3):
            if HAS_WINDOW or phase > 0:
                top, total, acc = attend_pages(
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
                if split < num_splits:
                    own = ((place * most_splits + split).to(tl.int64) * tl.num_programs(0) + head) * BLOCK_M + lines
                    tl.store(partial_out + own[:, None] * V_DIM + v_dims[None, :], acc, mask=(v_dims < V_DIM)[None, :])
                    tl.store(partial_lse + own, top + tl.log2(total))
        else:
            tl.store(at, acc.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "most_items"])
def add_up_kernel(
    partial_out,  # as prefill_kernel leaves it
    partial_lse,
    out,
    cu_seqlens_q,
    context_lens,
    num_rows,
    most_items,
    window,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    PACK: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    LINES: tl.constexpr,  # of a tile, per program
    CHUNK: tl.constexpr,  # splits whose loads are in flight together
    PDL: tl.constexpr,
):
    """One program: LINES lines of a split tile, for one head of the grid. Adds the splits in order.

    One program for a whole tile would read 64 KiB per split, one after another.
    """
    if PDL:
        gdc_wait()
    GROUP_SIZE: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    BLOCK_Q: tl.constexpr = BLOCK_M // PACK
    SLICES: tl.constexpr = BLOCK_M // LINES
    head = tl.program_id(0)
    place = tl.program_id(1) // SLICES
    all_tiles = _num_tiles(num_rows, cu_seqlens_q, BLOCK_Q)
    most_splits = tl.maximum(most_items // tl.maximum(all_tiles, 1), 1)
    if (most_splits > 1) & (place < all_tiles):  # the grid covers every split tile
        row, tile = _tile_at(place, num_rows, cu_seqlens_q, BLOCK_Q)
        token_start = tl.load(cu_seqlens_q + row)
        query_len = tl.load(cu_seqlens_q + row + 1) - token_start
        context_len = tl.load(context_lens + row)
        past = context_len - query_len + tile * BLOCK_Q
        start = 0
        if HAS_WINDOW:
            start = tl.maximum(past - window + 1, 0) // BLOCK_N * BLOCK_N
        _, num_splits = _split(tl.minimum(context_len, past + BLOCK_Q) - start, most_splits, MIN_SPLIT, BLOCK_N)
        if num_splits > 1:
            lines = tl.program_id(1) % SLICES * LINES + tl.arange(0, LINES)
            dims = tl.arange(0, V_PADDED)
            top = tl.full((LINES,), -1e30, tl.float32)
            total = tl.full((LINES,), 0.0, tl.float32)
            acc = tl.full((LINES, V_PADDED), 0.0, tl.float32)
            for base in range(0, num_splits, CHUNK):
                splits = base + tl.arange(0, CHUNK)
                items = (place * most_splits + splits).to(tl.int64)
                at = (items * tl.num_programs(0) + head)[None, :] * BLOCK_M + lines[:, None]
                live = (splits < num_splits)[None, :] & (lines >= 0)[:, None]
                lse = tl.load(partial_lse + at, mask=live, other=-1e30)
                part = tl.load(
                    partial_out + at[:, :, None] * V_DIM + dims[None, None, :],
                    mask=live[:, :, None] & (dims < V_DIM)[None, None, :],
                    other=0.0,
                )
                new_top = tl.maximum(top, tl.max(lse, 1))
                rescale = tl.exp2(top - new_top)
                weights = tl.exp2(lse - new_top[:, None])
                total = total * rescale + tl.sum(weights, 1)
                acc = acc * rescale[:, None] + tl.sum(weights[:, :, None] * part, 1)
                top = new_top
            queries = tile * BLOCK_Q + lines // PACK
            heads = head + tl.zeros_like(lines)
            is_line = queries < query_len
            if PACK > 1:
                heads = head * GROUP_SIZE + lines % PACK
                is_line = is_line & (lines % PACK < GROUP_SIZE)
            tokens = (token_start + queries).to(tl.int64)
            tl.store(
                out + (tokens * NUM_HEADS + heads)[:, None] * V_DIM + dims[None, :],
                (acc / total[:, None]).to(out.dtype.element_ty),
                mask=is_line[:, None] & (dims < V_DIM)[None, :],
            )
    if PDL:
        gdc_launch_dependents()
