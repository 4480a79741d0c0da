"""Paged attention in Triton: write_kv, split decode, ragged prefill. Knows a step's metadata; knows no request.

Contract of every kernel here:
- q, k, v: [num_tokens, heads, head_dim], last dimension contiguous, any other stride (slices of a fused QKV are fine).
- k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], a block contiguous, any stride between blocks.
- bfloat16, float16 or float32; the softmax and all sums are float32, and float32 inputs are multiplied as IEEE float32.
- head sizes up to 256, not only powers of two, K's and V's may differ; any number of query heads a KV head.
- offsets into caches and tokens are 64 bits wide; a pool may have more than 2^31 elements.
- nothing is read beyond a row's context, so stale NaN in a page cannot leak. Rows with context 0 give zeros.
- a grid depends on the step's shape (tokens, rows, splits), which the host knows: never on what the device holds. A row
  of one query is the decode kernel's and any other the prefill kernel's, which they find out on the device.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels.attention import AttentionBatch

MAX_HEAD_DIM = 256
MAX_SPLITS = 64
MIN_SPLIT_LEN = 128  # tokens: a shorter split costs more to combine than it gains
FMA = {"enable_fp_fusion": True}  # said at every launch: Triton 3.9 warns where it is left to the default


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
    v_block_stride,
    NUM_KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr,
    V_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS_PADDED: tl.constexpr,
    K_PADDED: tl.constexpr,
    V_PADDED: tl.constexpr,
):
    """One program copies one token, all its KV heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    block = slot // BLOCK_SIZE
    line = slot % BLOCK_SIZE * NUM_KV_HEADS
    heads = tl.arange(0, HEADS_PADDED)[:, None]

    dims = tl.arange(0, K_PADDED)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < K_DIM)
    key = tl.load(k + token * k_token_stride + heads * k_head_stride + dims, mask=mask)
    tl.store(k_cache + block * k_block_stride + (line + heads) * K_DIM + dims, key, mask=mask)

    dims = tl.arange(0, V_PADDED)[None, :]
    mask = (heads < NUM_KV_HEADS) & (dims < V_DIM)
    value = tl.load(v + token * v_token_stride + heads * v_head_stride + dims, mask=mask)
    tl.store(v_cache + block * v_block_stride + (line + heads) * V_DIM + dims, value, mask=mask)


@triton.jit
def _attend_pages(
    query,  # [M, K_PADDED]
    positions,  # [M] int32
    k_cache,  # at this KV head
    v_cache,
    block_table,  # at this row
    start,  # first key, a multiple of BLOCK_N
    end,  # one past the last key
    window,
    scale,
    softcap,
    k_block_stride,
    v_block_stride,
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
):
    """Online softmax over keys start to end. Returns (top, total, acc): max score in log2 units, sum, weighted values.

    Hidden keys score -1e30, not -inf, so that a tile with no visible key gives no NaN. What such a tile adds is wiped
    when the first visible key rescales by 2^(-1e30 - score) = 0; every query sees at least its own position.
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    top = tl.full((BLOCK_M,), -1e30, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, V_PADDED), tl.float32)
    k_dims = tl.arange(0, K_PADDED)
    v_dims = tl.arange(0, V_PADDED)
    for tile in range(start, end, BLOCK_N):
        tokens = tile + tl.arange(0, BLOCK_N)
        if BLOCK_SIZE % BLOCK_N == 0:  # the tile lies in one page
            block = tl.load(block_table + tile // BLOCK_SIZE).to(tl.int64)
        else:
            block = tl.load(block_table + tokens // BLOCK_SIZE, mask=tokens < end, other=0).to(tl.int64)
        lines = tokens % BLOCK_SIZE * NUM_KV_HEADS
        k_offsets = block * k_block_stride + lines * K_DIM
        v_offsets = block * v_block_stride + lines * V_DIM
        k_mask = (tokens < end)[:, None]
        v_mask = (tokens < end)[:, None]
        if K_DIM != K_PADDED:
            k_mask = k_mask & (k_dims < K_DIM)[None, :]
        if V_DIM != V_PADDED:
            v_mask = v_mask & (v_dims < V_DIM)[None, :]
        key = tl.load(k_cache + k_offsets[:, None] + k_dims[None, :], mask=k_mask, other=0.0)
        value = tl.load(v_cache + v_offsets[:, None] + v_dims[None, :], mask=v_mask, other=0.0)

        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (e^2x + 1), right at both ends
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2E / softcap)) + 1.0))
        visible = (tokens[None, :] <= positions[:, None]) & (tokens < end)[None, :]
        if HAS_WINDOW:
            visible = visible & (positions[:, None] - tokens[None, :] < window)
        scores = tl.where(visible, scores * LOG2E, -1e30)

        new_top = tl.maximum(top, tl.max(scores, 1))
        rescale = tl.exp2(top - new_top)
        weights = tl.exp2(scores - new_top[:, None])
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        top = new_top
    return top, total, acc


@triton.jit(do_not_specialize=["num_splits"])
def _decode_kernel(
    q,
    k_cache,
    v_cache,
    out,
    partial_out,  # [num_rows * num_heads, num_splits, V_DIM] float32
    partial_lse,  # [num_rows * num_heads, num_splits] float32, log2 units
    sinks,
    block_tables,
    row_slots,
    cu_seqlens_q,
    context_lens,
    num_splits,
    window,
    scale,
    softcap,
    q_token_stride,
    q_head_stride,
    k_block_stride,
    v_block_stride,
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
    SPLIT: tl.constexpr,
    MIXED: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program: one row, one KV head with its group of query heads as the tile, one split of the context."""
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0) // NUM_KV_HEADS
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    split = tl.program_id(1)
    token = row
    if MIXED:
        token = tl.load(cu_seqlens_q + row)
        if tl.load(cu_seqlens_q + row + 1) - token != 1:
            return
    context_len = tl.load(context_lens + row)
    slot = tl.load(row_slots + row).to(tl.int64)

    first = 0
    if HAS_WINDOW:
        first = tl.maximum(context_len - window, 0) // BLOCK_N * BLOCK_N
    split_len = tl.cdiv(tl.cdiv(context_len - first, BLOCK_N), num_splits) * BLOCK_N
    start = first + split * split_len
    end = tl.minimum(start + split_len, context_len)

    group = tl.arange(0, BLOCK_M)
    heads = kv_head * GROUP_SIZE + group
    k_dims = tl.arange(0, K_PADDED)
    query = tl.load(
        q + token.to(tl.int64) * q_token_stride + heads[:, None] * q_head_stride + k_dims[None, :],
        mask=(group < GROUP_SIZE)[:, None] & (k_dims < K_DIM)[None, :],
        other=0.0,
    )
    positions = tl.zeros((BLOCK_M,), tl.int32) + context_len - 1
    top, total, acc = _attend_pages(
        query,
        positions,
        k_cache + kv_head * K_DIM,
        v_cache + kv_head * V_DIM,
        block_tables + slot * table_stride,
        start,
        end,
        window,
        scale,
        softcap,
        k_block_stride,
        v_block_stride,
        NUM_KV_HEADS,
        K_DIM,
        V_DIM,
        K_PADDED,
        V_PADDED,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        HAS_WINDOW,
        HAS_SOFTCAP,
    )
    v_dims = tl.arange(0, V_PADDED)
    mask = (group < GROUP_SIZE)[:, None] & (v_dims < V_DIM)[None, :]
    if not SPLIT:
        lines = token.to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + heads
        if HAS_SINKS:
            sink = tl.load(sinks + heads, mask=group < GROUP_SIZE, other=0.0).to(tl.float32) * LOG2E
            new_top = tl.maximum(top, sink)
            rescale = tl.exp2(top - new_top)
            acc = acc * rescale[:, None]
            total = total * rescale + tl.exp2(sink - new_top)
        acc = acc / tl.maximum(total, 1e-20)[:, None]
        tl.store(out + lines[:, None] * V_DIM + v_dims[None, :], acc.to(out.dtype.element_ty), mask=mask)
    else:
        # A split without keys stores zeros with a weight of 2^-1e30.
        lines = (row.to(tl.int64) * (NUM_KV_HEADS * GROUP_SIZE) + heads) * num_splits + split
        acc = acc / tl.maximum(total, 1e-20)[:, None]
        tl.store(partial_out + lines[:, None] * V_DIM + v_dims[None, :], acc, mask=mask)
        tl.store(partial_lse + lines, top + tl.log2(tl.maximum(total, 1e-20)), mask=group < GROUP_SIZE)


@triton.jit(do_not_specialize=["num_splits"])
def _combine_kernel(
    partial_out,
    partial_lse,
    sinks,
    cu_seqlens_q,
    out,
    num_splits,
    NUM_HEADS: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PADDED: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    MIXED: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One program weighs the splits of one row and head, and adds them up."""
    LOG2E: tl.constexpr = 1.4426950408889634
    line = tl.program_id(0).to(tl.int64)
    row = line // NUM_HEADS
    token = row
    if MIXED:
        token = tl.load(cu_seqlens_q + row).to(tl.int64)
        if tl.load(cu_seqlens_q + row + 1) - token != 1:
            return
    splits = tl.arange(0, MAX_SPLITS)
    dims = tl.arange(0, V_PADDED)
    lse = tl.load(partial_lse + line * num_splits + splits, mask=splits < num_splits, other=-1e30)
    top = tl.max(lse, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + line % NUM_HEADS).to(tl.float32) * LOG2E
        top = tl.maximum(top, sink)
    weights = tl.exp2(lse - top)
    total = tl.sum(weights, 0)
    if HAS_SINKS:
        total += tl.exp2(sink - top)
    mask = dims < V_DIM
    result = tl.zeros((V_PADDED,), tl.float32)
    for split in range(num_splits):
        at = line * num_splits + split
        weight = tl.exp2(tl.load(partial_lse + at) - top)
        result += weight * tl.load(partial_out + at * V_DIM + dims, mask=mask, other=0.0)
    result = result / total
    line = token * NUM_HEADS + line % NUM_HEADS
    tl.store(out + line * V_DIM + dims, result.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _prefill_kernel(
    q,
    k_cache,
    v_cache,
    out,
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
    v_block_stride,
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
):
    """One program: BLOCK_M queries of one row and one head.

    Row r's tiles begin at cu_seqlens_q[r] // BLOCK_M + r, which leaves room for a partial tile of every row before it,
    so the grid is a function of the step's shape. A program finds its row by bisection (as in vLLM's unified kernel).
    """
    LOG2E: tl.constexpr = 1.4426950408889634
    head = tl.program_id(0)
    tile = tl.program_id(1)
    row = 0
    above = num_rows
    while above - row > 1:
        middle = (row + above) // 2
        if tl.load(cu_seqlens_q + middle) // BLOCK_M + middle <= tile:
            row = middle
        else:
            above = middle
    token_start = tl.load(cu_seqlens_q + row)
    query_len = tl.load(cu_seqlens_q + row + 1) - token_start
    tile = tile - (token_start // BLOCK_M + row)
    if (tile * BLOCK_M >= query_len) | (query_len == 1):
        return
    context_len = tl.load(context_lens + row)
    slot = tl.load(row_slots + row).to(tl.int64)
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)

    queries = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    tokens = (token_start + queries).to(tl.int64)
    k_dims = tl.arange(0, K_PADDED)
    query = tl.load(
        q + tokens[:, None] * q_token_stride + head * q_head_stride + k_dims[None, :],
        mask=(queries < query_len)[:, None] & (k_dims < K_DIM)[None, :],
        other=0.0,
    )
    past = context_len - query_len
    end = tl.minimum(context_len, past + (tile + 1) * BLOCK_M)
    start = 0
    if HAS_WINDOW:
        start = tl.maximum(past + tile * BLOCK_M - window + 1, 0) // BLOCK_N * BLOCK_N
    top, total, acc = _attend_pages(
        query,
        past + queries,
        k_cache + kv_head * K_DIM,
        v_cache + kv_head * V_DIM,
        block_tables + slot * table_stride,
        start,
        end,
        window,
        scale,
        softcap,
        k_block_stride,
        v_block_stride,
        NUM_KV_HEADS,
        K_DIM,
        V_DIM,
        K_PADDED,
        V_PADDED,
        BLOCK_SIZE,
        BLOCK_M,
        BLOCK_N,
        HAS_WINDOW,
        HAS_SOFTCAP,
    )
    if HAS_SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2E
        new_top = tl.maximum(top, sink)
        rescale = tl.exp2(top - new_top)
        acc = acc * rescale[:, None]
        total = total * rescale + tl.exp2(sink - new_top)
    acc = acc / tl.maximum(total, 1e-20)[:, None]
    v_dims = tl.arange(0, V_PADDED)
    tl.store(
        out + (tokens[:, None] * NUM_HEADS + head) * V_DIM + v_dims[None, :],
        acc.to(out.dtype.element_ty),
        mask=(queries < query_len)[:, None] & (v_dims < V_DIM)[None, :],
    )


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
        k_cache.stride(0),
        v_cache.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        K_DIM=k_dim,
        V_DIM=v.shape[2],
        BLOCK_SIZE=k_cache.shape[1],
        HEADS_PADDED=triton.next_power_of_2(num_kv_heads),
        K_PADDED=triton.next_power_of_2(k_dim),
        V_PADDED=triton.next_power_of_2(v.shape[2]),
        num_warps=4,
        **FMA,
    )


class TritonAttention:
    """AttentionBackend for CUDA. Owns the scratch of its splits, so two engines in one process never share it."""

    max_head_dim = MAX_HEAD_DIM
    capturable = True

    def __init__(self, device: torch.device) -> None:
        """Raise ValueError for a device that Triton has no kernels for."""
        if device.type == "cuda":
            self._num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        elif os.environ.get("TRITON_INTERPRET") == "1":
            self._num_multiprocessors = 16
        else:
            raise ValueError(f"attention='triton' runs on CUDA devices, not on {device}")
        self._device = device
        self._scratch: list[Tensor] = []

    def prepare(self, batch: AttentionBatch) -> None:
        self._batch = batch
        self._tables = batch.block_tables.unbind(0)
        self._slot_mappings = batch.slot_mapping.unbind(0)

    def attend(
        self,
        q: Tensor,  # [num_tokens, num_heads, k_head_dim]
        k: Tensor,  # [num_tokens, num_kv_heads, k_head_dim]
        v: Tensor,  # [num_tokens, num_kv_heads, v_head_dim]
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
        if max(q.shape[2], v.shape[2]) > MAX_HEAD_DIM:
            raise ValueError(f"head size {max(q.shape[2], v.shape[2])}: the Triton kernels take up to {MAX_HEAD_DIM}")
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        write_kv(k, v, k_cache, v_cache, self._slot_mappings[group])
        shape = (q.shape[0], q.shape[1], v.shape[2])
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
        k_padded, v_padded = _padded(k_dim), _padded(v_dim)
        block_n = _tile_len(k_padded, v_padded, q.element_size())
        context_len = min(batch.max_context_len, window) if window else batch.max_context_len
        num_splits = self._num_splits(num_rows * num_kv_heads, context_len)
        partial_out, partial_lse = self._partials(num_rows * num_heads * num_splits, v_dim)
        _decode_kernel[(num_rows * num_kv_heads, num_splits)](
            q,
            k_cache,
            v_cache,
            out,
            partial_out,
            partial_lse,
            q if sinks is None else sinks,
            self._tables[group],
            batch.row_slots,
            batch.cu_seqlens_q,
            batch.context_lens,
            num_splits,
            window,
            scale,
            softcap,
            q.stride(0),
            q.stride(1),
            k_cache.stride(0),
            v_cache.stride(0),
            batch.block_tables.stride(1),
            GROUP_SIZE=group_size,
            NUM_KV_HEADS=num_kv_heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            K_PADDED=k_padded,
            V_PADDED=v_padded,
            BLOCK_SIZE=block_size,
            BLOCK_M=max(16, triton.next_power_of_2(group_size)),
            BLOCK_N=block_n,
            SPLIT=num_splits > 1,
            MIXED=mixed,
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=softcap > 0,
            HAS_SINKS=sinks is not None,
            num_warps=4,
            num_stages=3 if (k_padded + v_padded) * block_n * q.element_size() <= 32 * 1024 else 2,
            **FMA,
        )
        if num_splits > 1:
            _combine_kernel[(num_rows * num_heads,)](
                partial_out,
                partial_lse,
                q if sinks is None else sinks,
                batch.cu_seqlens_q,
                out,
                num_splits,
                NUM_HEADS=num_heads,
                V_DIM=v_dim,
                V_PADDED=v_padded,
                MAX_SPLITS=MAX_SPLITS,
                MIXED=mixed,
                HAS_SINKS=sinks is not None,
                num_warps=1,
                **FMA,
            )

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
        # IEEE float32 dots become one unrolled FMA a product: 64 x 64 tiles would take minutes to compile.
        block_m = 32 if q.element_size() == 4 else 64
        _prefill_kernel[(num_heads, q.shape[0] // block_m + num_rows)](
            q,
            k_cache,
            v_cache,
            out,
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
            k_cache.stride(0),
            v_cache.stride(0),
            batch.block_tables.stride(1),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            K_DIM=k_dim,
            V_DIM=v_dim,
            K_PADDED=k_padded,
            V_PADDED=v_padded,
            BLOCK_SIZE=block_size,
            BLOCK_M=block_m,
            BLOCK_N=_tile_len(k_padded, v_padded, q.element_size()),
            HAS_WINDOW=window > 0,
            HAS_SOFTCAP=softcap > 0,
            HAS_SINKS=sinks is not None,
            num_warps=4,
            num_stages=2,
            **FMA,
        )

    def _num_splits(self, num_programs: int, max_context_len: int) -> int:
        """Enough splits for two programs a multiprocessor; a power of two."""
        wanted = triton.next_power_of_2(triton.cdiv(2 * self._num_multiprocessors, num_programs))
        return min(wanted, max(1, triton.next_power_of_2(max_context_len) // MIN_SPLIT_LEN), MAX_SPLITS)

    def _partials(self, num_lines: int, v_dim: int) -> tuple[Tensor, Tensor]:
        """Scratch for the splits: [num_lines, v_dim] and [num_lines] float32. Allocates only when it has to grow.

        What it outgrew stays alive: a captured CUDA graph may hold its address.
        """
        size = num_lines * (v_dim + 1)
        if not self._scratch or self._scratch[-1].numel() < size:
            if self._scratch:  # at least doubled, so that all that is kept is no more than what is used
                size = max(size, 2 * self._scratch[-1].numel())
            self._scratch.append(torch.empty(size, dtype=torch.float32, device=self._device))
        return self._scratch[-1][: num_lines * v_dim], self._scratch[-1][num_lines * v_dim :]


def _padded(head_dim: int) -> int:
    """A head size as tl.dot takes it."""
    return max(16, triton.next_power_of_2(head_dim))


def _tile_len(k_padded: int, v_padded: int, element_size: int) -> int:
    """Keys of one tile: as many as fit in 64 KiB with K and V together, at most 64 (32 in float32, to compile fast)."""
    return min(32 if element_size == 4 else 64, max(16, 64 * 1024 // ((k_padded + v_padded) * element_size)))
