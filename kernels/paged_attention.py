"""Paged attention in Triton: write_kv, planned split decode, ragged prefill. Knows a step's metadata; knows no request.

Contract of every kernel here:
- q, k, v: [num_tokens, heads, head_dim], last dimension contiguous, any other stride (slices of a fused QKV are fine).
- k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], heads contiguous, any other stride.
- bfloat16, float16 or float32; the softmax and all sums are float32, and float32 inputs are multiplied as IEEE float32.
- head sizes up to 256, not only powers of two, K and V may differ; any number of query heads per KV head; scale > 0.
- offsets into caches and tokens have 64 bits: a pool may have more than 2^31 elements. Offsets between the heads of a
  token have 32 (``_within_32_bits``).
- nothing is read beyond a row's context, nor before its first query's window, where the block table may have the dummy
  block: stale NaN in a page cannot leak. Rows with context 0 give zeros.
- grids depend on the step's shape (tokens, rows, splits), which the host knows, never on device data. On the device,
  the decode kernel takes the rows of one query, and the prefill kernel all others.
- every program first waits for the kernels before it (``pdl``), which wrote its inputs, metadata included.
"""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from cbatch.kernels import paged_decode, paged_prefill
from cbatch.kernels.attention import AttentionBatch
from cbatch.kernels.pdl import gdc_launch_dependents, gdc_wait, launch_options


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
    """One program: one token, all KV heads."""
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
        **launch_options(k.device),
    )


class _Layer(NamedTuple):
    """The arguments of both kernels that a layer determines, in their order."""

    tensors: tuple[Tensor, Tensor, Tensor, Tensor]  # q, k_cache, v_cache, out
    tables: tuple[Tensor, Tensor]  # sinks, block tables
    numbers: tuple[float, ...]  # window, scale, softcap, strides
    constants: dict[str, Any]

    @property
    def size(self) -> int:
        """The larger padded head size, which chooses the tiles."""
        return max(64, self.constants["K_PADDED"], self.constants["V_PADDED"])


_PlanKey = tuple[int, int, int, int]  # window, BLOCK_N, KV heads, resident programs


class TritonAttention:
    """AttentionBackend for CUDA. Owns the scratch of its splits: two engines in one process never share it.

    Its steps must run in order, as on one stream: concurrent steps would share the counters of their splits.
    """

    max_head_dim = 256
    capturable = True
    # At 256 rows of 1,024 tokens, where either order reads at the bandwidth, both take 242 us a layer on an H200.
    heads_first = False

    def __init__(self, device: torch.device) -> None:
        """Raises ValueError if the device is not CUDA, unless Triton's interpreter is on."""
        if device.type == "cuda":
            self._num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            large = torch.cuda.get_device_capability(device)[0] in (9, 10)  # Hopper; Blackwell's, but not its GeForce
            self._prefill_tiles = paged_prefill.PREFILL if large else paged_prefill.PREFILL_SMALL
        elif os.environ.get("TRITON_INTERPRET") == "1":
            self._num_multiprocessors = 16
            self._prefill_tiles = paged_prefill.PREFILL
        else:
            raise ValueError(f"attention='triton' runs on CUDA devices, not on {device}")
        self._device = device
        self._partials: list[Tensor] = []
        self._counters: list[Tensor] = []
        self._no_partials = torch.zeros(1, dtype=torch.float32, device=device)  # for a launch without splits
        self._plan_scratch: dict[_PlanKey, list[Tensor]] = {}
        self._plans: dict[_PlanKey, Tensor] = {}  # this step's

    def prepare(self, batch: AttentionBatch) -> None:
        """Set the step's metadata. Prepare a captured step within its capture: the graph then computes the plans."""
        self._batch = batch
        self._plans.clear()
        self._tables = batch.block_tables.unbind(0)
        self._slot_mappings = batch.slot_mapping.unbind(0)

    def slot_mapping(self, group: int) -> Tensor:
        """For callers that store k and v themselves, and attend with None for both."""
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
        if k is not None and v is not None:
            k, v = _within_32_bits(k), _within_32_bits(v)
            write_kv(k, v, k_cache, v_cache, self._slot_mappings[group])
        q = _within_32_bits(q)
        shape = (q.shape[0], q.shape[1], v_cache.shape[3])
        num_rows = batch.context_lens.shape[0]
        # A decode step's kernel writes every token; otherwise padding may follow the last row.
        mixed = batch.max_query_len != 1 or q.shape[0] != num_rows
        out = q.new_zeros(shape) if mixed else q.new_empty(shape)
        if not num_rows:
            return out
        block_size, num_kv_heads, v_dim = v_cache.shape[1:]
        strides = q.stride()[:2] + k_cache.stride()[:3] + v_cache.stride()[:3] + (batch.block_tables.stride(1),)
        layer = _Layer(
            tensors=(q, k_cache, v_cache, out),
            tables=(q if sinks is None else sinks, self._tables[group]),
            numbers=(window, scale, softcap, *strides),
            constants={
                "NUM_KV_HEADS": num_kv_heads,
                "K_DIM": q.shape[2],
                "V_DIM": v_dim,
                "K_PADDED": _padded(q.shape[2]),
                "V_PADDED": _padded(v_dim),
                "BLOCK_SIZE": block_size,
                "HAS_WINDOW": window > 0,
                "HAS_SOFTCAP": softcap > 0,
                "HAS_SINKS": sinks is not None,
                **launch_options(q.device),
            },
        )
        self._decode(layer, window, mixed)
        if batch.max_query_len > 1:
            self._prefill(layer, window)
        return out

    def _decode(self, layer: _Layer, window: int, mixed: bool) -> None:
        q, _, _, out = layer.tensors
        num_rows = self._batch.context_lens.shape[0]
        num_heads, num_kv_heads, v_dim = q.shape[1], layer.constants["NUM_KV_HEADS"], out.shape[2]
        group_size = num_heads // num_kv_heads
        group_padded = triton.next_power_of_2(group_size)
        tiles = paged_decode.DECODE_FLOAT32 if q.element_size() == 4 else paged_decode.DECODE
        block_n, num_warps, num_stages = tiles[layer.size]
        plan = self._plan(window, block_n, num_kv_heads, paged_decode.RESIDENT_PROGRAMS[layer.size], mixed)
        num_items = plan.shape[0]
        num_lines = num_items * num_heads
        partials = self._grown(self._partials, num_lines * (v_dim + 1), torch.float32)
        paged_decode.decode_kernel[(num_items * num_kv_heads,)](
            *layer.tensors,
            partials[: num_lines * v_dim],
            partials[num_lines * v_dim :],
            self._grown(self._counters, num_rows * num_kv_heads, torch.int32),
            plan,
            *layer.tables,
            *layer.numbers,
            GROUP_SIZE=group_size,
            BLOCK_M=max(16, group_padded),
            BLOCK_N=block_n,
            GROUP_PADDED=group_padded,
            # 32 registers a thread
            CHUNK=max(1, min(paged_decode.MAX_SPLITS, 4096 // (group_padded * layer.constants["V_PADDED"]))),
            num_warps=num_warps,
            num_stages=num_stages,
            **layer.constants,
        )

    def _plan(self, window: int, block_n: int, num_kv_heads: int, num_resident: int, mixed: bool) -> Tensor:
        """The step's decode plan, [num_items, ITEM] int32. The first layer of a kind computes it for all."""
        key = (window, block_n, num_kv_heads, num_resident)
        if key in self._plans:
            return self._plans[key]
        batch, num_rows = self._batch, self._batch.context_lens.shape[0]
        context_len = min(batch.max_context_len, window + block_n - 1) if window else batch.max_context_len
        busy = num_rows * num_kv_heads >= self._num_multiprocessors // 2
        min_split_tiles = (paged_decode.FULL_SPLIT_LEN if busy else paged_decode.MIN_SPLIT_LEN) // block_n
        num_places = max(num_resident * self._num_multiprocessors // num_kv_heads, 1)
        num_extras = 0
        if (max_splits := triton.cdiv(triton.cdiv(context_len, block_n), min_split_tiles)) > 1:
            # Fill one wave of programs. With more rows than that: splits for just over one wave, or for the few long
            # rows among very many.
            num_extras = num_places - num_rows if num_rows <= num_places else max(2 * num_places, num_rows // 2)
            num_extras = min(num_extras, num_rows * (max_splits - 1))
        num_items = num_rows + num_extras
        scratch = self._grown(self._plan_scratch.setdefault(key, []), num_items * paged_decode.ITEM.value, torch.int32)
        plan = scratch[: num_items * paged_decode.ITEM.value].view(num_items, paged_decode.ITEM.value)
        paged_decode.plan_decode_kernel[(1,)](
            plan,
            batch.row_slots,
            batch.cu_seqlens_q,
            batch.context_lens,
            num_rows,
            num_extras,
            num_places,
            max(paged_decode.BUSY_PROGRAMS * self._num_multiprocessors // num_kv_heads, 1),
            min_split_tiles,
            window,
            BLOCK_N=block_n,
            MAX_SPLITS=paged_decode.MAX_SPLITS,
            MIXED=mixed,
            HAS_WINDOW=window > 0,
            num_warps=4,
            **launch_options(self._device),
        )
        self._plans[key] = plan
        return plan

    def _prefill(self, layer: _Layer, window: int) -> None:
        batch = self._batch
        q, _, _, out = layer.tensors
        num_rows, size = batch.context_lens.shape[0], layer.size
        num_heads, num_kv_heads, v_dim = q.shape[1], layer.constants["NUM_KV_HEADS"], out.shape[2]
        block_m, block_n, num_warps, num_stages = paged_prefill.PREFILL_FLOAT32
        if q.element_size() == 2:
            block_m, block_n, num_warps, num_stages = self._prefill_tiles[size]
        pack = triton.next_power_of_2(num_heads // num_kv_heads)
        if pack > block_m // 4:
            pack = 1
        num_grid_heads = num_heads if pack == 1 else num_kv_heads
        most_items = paged_prefill.PROGRAMS_FOR_SPLITS[size] * self._num_multiprocessors // num_grid_heads
        tiles_needed = triton.cdiv(q.shape[0] * pack, block_m)
        split = 2 * tiles_needed <= most_items and batch.max_context_len >= 2 * paged_prefill.MIN_PREFILL_SPLIT
        partials, num_lines = self._no_partials, 0
        if split:
            num_lines = most_items * num_grid_heads * block_m
            num_programs = max(tiles_needed + min(num_rows, paged_prefill.PREFILL_ROWS), most_items)
            partials = self._grown(self._partials, num_lines * (v_dim + 1), torch.float32)
        else:
            pack, num_grid_heads = 1, num_heads
            num_programs = q.shape[0] // block_m + min(num_rows, paged_prefill.PREFILL_ROWS)
        rows = batch.cu_seqlens_q, batch.context_lens, num_rows
        paged_prefill.prefill_kernel[(num_grid_heads, num_programs)](
            *layer.tensors,
            partials[: num_lines * v_dim],
            partials[num_lines * v_dim :],
            most_items,
            *layer.tables,
            batch.row_slots,
            *rows,
            *layer.numbers,
            NUM_HEADS=num_heads,
            BLOCK_M=block_m,
            BLOCK_N=block_n,
            PACK=pack,
            SPLIT=split,
            MIN_SPLIT=paged_prefill.MIN_PREFILL_SPLIT,
            num_warps=num_warps,
            num_stages=num_stages,
            **layer.constants,
        )
        if split:
            num_slices = block_m // paged_prefill.LINES
            paged_prefill.add_up_kernel[(num_grid_heads, most_items // 2 * num_slices)](
                partials[: num_lines * v_dim],
                partials[num_lines * v_dim :],
                out,
                *rows,
                most_items,
                window,
                NUM_HEADS=num_heads,
                NUM_KV_HEADS=num_kv_heads,
                V_DIM=v_dim,
                V_PADDED=layer.constants["V_PADDED"],
                BLOCK_M=block_m,
                BLOCK_N=block_n,
                HAS_WINDOW=window > 0,
                PACK=pack,
                MIN_SPLIT=paged_prefill.MIN_PREFILL_SPLIT,
                LINES=paged_prefill.LINES,
                CHUNK=max(1, 512 // layer.constants["V_PADDED"]),
                num_warps=4,
                **launch_options(q.device),
            )

    def _grown(self, kept: list[Tensor], size: int, dtype: torch.dtype) -> Tensor:
        """The newest scratch of a kind, with at least ``size`` elements, zeroed when allocated.

        Outgrown scratch stays alive, because a captured CUDA graph may hold its address. It must not grow in a capture,
        which would write the zeros at every replay: run a step once before its capture.
        """
        if not kept or kept[-1].numel() < size:
            capturing = self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
            assert not capturing, "run a step once before it is captured"
            if kept:  # doubling keeps the outgrown scratch smaller than the newest
                size = max(size, 2 * kept[-1].numel())
            kept.append(torch.zeros(size, dtype=dtype, device=self._device))
        return kept[-1]


def _within_32_bits(heads: Tensor) -> Tensor:
    """[num_tokens, heads, head_dim] with 32-bit offsets between heads; a copy if they are larger.

    In transformers' head-major layout a head's stride spans all tokens of the step: 64 heads of 128 reach 2^31 elements
    at 262,144 tokens.
    """
    fits = heads.stride(2) == 1 and heads.shape[1] * heads.stride(1) < 2**31
    return heads if fits else heads.contiguous()


def _padded(head_dim: int) -> int:
    """A head size padded for tl.dot."""
    return max(16, triton.next_power_of_2(head_dim))
