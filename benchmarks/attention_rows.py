"""Attention over pages as rows of the kernels' table; on the CPU, beside the naive way to do it."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernel_row import Row, error, us_per_call
from cbatch.kernels import reference
from cbatch.kernels.attention import AttentionBatch, make_backend

BLOCK_SIZE = 64
MAX_MODEL_LEN = 8192  # a captured decode step knows this of its contexts, and no more


class Pages:
    """A pool with the given contexts in random blocks, block-major if not said otherwise, and one step's metadata.

    Each row's queries are its last ``query_len`` tokens. All pages hold random numbers.
    """

    def __init__(
        self,
        lens: list[int],
        layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
        query_len: int = 1,
        *,
        heads_first: bool = False,  # a page holds head behind head, not token behind token
        layer_major: bool = False,  # a layer's pages lie together, not a block's layers
    ) -> None:
        rows = len(lens)
        counts = [-(-n // BLOCK_SIZE) for n in lens]
        num_blocks = sum(counts) + 4
        size = BLOCK_SIZE * num_kv_heads * head_dim
        shape = (2 * layers, num_blocks) if layer_major else (num_blocks, 2 * layers)
        pool = torch.randn(*shape, size, dtype=dtype, device=device)
        pool = pool.transpose(0, 1) if layer_major else pool
        if heads_first:
            pool = pool.unflatten(2, (num_kv_heads, BLOCK_SIZE, head_dim)).transpose(2, 3)
        else:
            pool = pool.unflatten(2, (BLOCK_SIZE, num_kv_heads, head_dim))
        parts = pool.unbind(1)
        self.layers = list(zip(parts[::2], parts[1::2], strict=True))
        blocks = (torch.randperm(num_blocks - 1)[: sum(counts)] + 1).int()
        tables = torch.zeros(1, rows, max(counts), dtype=torch.int32)
        for row, mine in enumerate(blocks.split(counts)):
            tables[0, row, : counts[row]] = mine
        positions = torch.cat([torch.arange(n - query_len, n) for n in lens])
        owners = torch.arange(rows).repeat_interleave(query_len)
        slots = tables[0, owners, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
        self.batch = AttentionBatch(
            block_tables=tables.to(device),
            slot_mapping=slots[None].int().to(device),
            row_slots=torch.arange(rows, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device) * query_len,
            context_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            num_decodes=rows if query_len == 1 else 0,
            max_query_len=query_len,
            max_context_len=max(lens),
        )
        num_tokens = rows * query_len
        self.q = torch.randn(num_tokens, num_heads, head_dim, dtype=dtype, device=device)
        self.k, self.v = torch.randn(2, num_tokens, num_kv_heads, head_dim, dtype=dtype, device=device).unbind(0)
        self.scale = head_dim**-0.5
        self.layer_bytes = 2 * sum(lens) * num_kv_heads * head_dim * dtype.itemsize


def decode(context_len: int, layers: int, head_dim: int) -> Row:
    """32 rows of one query, 32 heads on 8; K and V are in their pages. Beside it SDPA over contiguous K and V."""
    pages = Pages([context_len] * 32, layers, 32, 8, head_dim, torch.bfloat16, "cuda")
    pages.batch.max_context_len = MAX_MODEL_LEN
    distance, us = _on_pages(pages)
    q = torch.randn(32, 32, 1, head_dim, dtype=torch.bfloat16, device="cuda")
    dense = torch.randn(layers, 2, 32, 8, context_len, head_dim, dtype=torch.bfloat16, device="cuda")
    sdpa = us_per_call([partial(F.scaled_dot_product_attention, q, k, v, enable_gqa=True) for k, v in dense])
    return Row(
        kernel="attend, decode",
        case=f"32 rows at {context_len}, 32 heads on 8 of {head_dim}",
        us=us,
        amount=pages.layer_bytes,
        unit="TB/s",
        beside="SDPA, contiguous",
        beside_us=sdpa,
        error=distance,
    )


def prefill(length: int, head_dim: int) -> Row:
    """Two causal prompts, 32 heads on 8. Beside it SDPA over contiguous K and V."""
    pages = Pages([length] * 2, 4, 32, 8, head_dim, torch.bfloat16, "cuda", query_len=length)
    distance, us = _on_pages(pages)
    q = torch.randn(2, 32, length, head_dim, dtype=torch.bfloat16, device="cuda")
    dense = torch.randn(4, 2, 2, 8, length, head_dim, dtype=torch.bfloat16, device="cuda")
    sdpa = partial(F.scaled_dot_product_attention, is_causal=True, enable_gqa=True)
    return Row(
        kernel="attend, prefill",
        case=f"2 prompts of {length}, 32 heads on 8 of {head_dim}",
        us=us,
        amount=2 * 4 * 32 * head_dim * length * (length + 1) // 2,
        unit="TFLOP/s",
        beside="SDPA, contiguous",
        beside_us=us_per_call([partial(sdpa, q, k, v) for k, v in dense]),
        error=distance,
    )


def chunk(length: int, context_len: int) -> Row:
    """The last tokens of a long prompt, 32 heads on 8 of 128. Beside it SDPA over contiguous K and V, unmasked."""
    pages = Pages([context_len], 4, 32, 8, 128, torch.bfloat16, "cuda", query_len=length)
    distance, us = _on_pages(pages)
    q = torch.randn(1, 32, length, 128, dtype=torch.bfloat16, device="cuda")
    dense = torch.randn(4, 2, 1, 8, context_len, 128, dtype=torch.bfloat16, device="cuda")
    sdpa = partial(F.scaled_dot_product_attention, enable_gqa=True)
    return Row(
        kernel="attend, chunk",
        case=f"{length} tokens behind {context_len - length}",
        us=us,
        amount=4 * 32 * 128 * length * (context_len - length // 2),
        unit="TFLOP/s",
        beside="SDPA, contiguous",
        beside_us=us_per_call([partial(sdpa, q, k, v) for k, v in dense]),
        error=distance,
    )


def _on_pages(pages: Pages) -> tuple[float, float]:
    """The first layer's error, and microseconds a layer."""
    backend, b = make_backend("triton", torch.device("cuda")), pages.batch
    backend.prepare(b)
    calls = [
        partial(backend.attend, pages.q, None, None, k_cache, v_cache, 0, scale=pages.scale)
        for k_cache, v_cache in pages.layers
    ]
    lines = (b.block_tables[0], b.row_slots, b.cu_seqlens_q, b.context_lens)
    expected = reference.paged_attention(pages.q.float(), *pages.layers[0], *lines, scale=pages.scale)
    return error(calls[0](), expected), us_per_call(calls)


def cases() -> Iterator[tuple[str, partial[Row]]]:
    """(kernel, how to measure a row of it)."""
    for context_len, layers in ((224, 16), (1024, 16), (4192, 8), (8100, 6)):
        yield "attend", partial(decode, context_len, layers, 128)
    for context_len, layers in ((224, 16), (4192, 8)):
        yield "attend", partial(decode, context_len, layers, 64)
    for head_dim in (128, 64):
        yield "attend", partial(prefill, 4096, head_dim)
    for length, context_len in ((32, 50_000), (64, 50_000), (32, 100_000), (96, 100_000), (512, 50_000)):
        yield "attend", partial(chunk, length, context_len)


def cpu_ms(layers: list[Any], attend: Callable[[Any], object], repeats: int) -> float:
    """Milliseconds over all layers: the best of each, since other processes' time is not ours."""
    best = [float("inf")] * len(layers)
    for _ in range(repeats):
        for i, layer in enumerate(layers):
            start = time.perf_counter()
            attend(layer)
            best[i] = min(best[i], time.perf_counter() - start)
    return sum(best) * 1e3


def on_cpu() -> dict[str, float]:
    """TorchAttention at SmolLM2's shape, beside the time to read K and V and the way that gathers everything."""
    torch.set_num_threads(2)
    lens = torch.linspace(50, 400, 32).round().int().tolist()
    backend = make_backend("torch", torch.device("cpu"))
    pages = Pages(lens, 30, 9, 3, 64, torch.float32, "cpu", heads_first=backend.heads_first)
    b = pages.batch

    def attend(layer: tuple[Tensor, Tensor]) -> Tensor:
        return backend.attend(pages.q, pages.k, pages.v, *layer, 0, scale=pages.scale)

    def prepare_and_attend(layer: tuple[Tensor, Tensor]) -> Tensor:
        backend.prepare(b)
        return attend(layer)

    # One row after another, as a list of (block, offset) a token, and a mask that shows each row its own.
    tokens = torch.cat([torch.arange(n) for n in lens])
    owners = torch.arange(32).repeat_interleave(torch.tensor(lens))
    blocks, offsets = b.block_tables[0, owners, tokens // BLOCK_SIZE].long(), tokens % BLOCK_SIZE
    mask = torch.zeros(32, len(tokens)).masked_fill_(owners != torch.arange(32)[:, None], float("-inf"))

    def naive(layer: tuple[Tensor, Tensor]) -> Tensor:
        keys, values = (cache[blocks, offsets].transpose(0, 1).repeat_interleave(3, 0)[None] for cache in layer)
        q = pages.q.transpose(0, 1)[None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask[None, None], scale=pages.scale)

    with torch.inference_mode():
        backend.prepare(b)
        torch.testing.assert_close(attend(pages.layers[0]), naive(pages.layers[0])[0].transpose(0, 1))
        plan_ms = cpu_ms(pages.layers[:1], prepare_and_attend, 20) - cpu_ms(pages.layers[:1], attend, 20)
        result = {
            "threads": 2,
            "read_ms": cpu_ms(pages.layers, lambda layer: [cache[1:].sum() for cache in layer], 5),
            "step_ms": cpu_ms(pages.layers, attend, 20) + plan_ms,
            "plan_ms": plan_ms,
            "naive_ms": cpu_ms(pages.layers, naive, 3),
        }
    print(f"decode, 32 rows, contexts 50..400, 30 layers, float32, 2 threads ({platform.processor() or 'CPU'})")
    print(f"  TorchAttention  {result['step_ms']:7.1f} ms a step, {plan_ms:.2f} of it to plan")
    print(f"  read K and V    {result['read_ms']:7.1f} ms")
    print(f"  naive, one mask {result['naive_ms']:7.1f} ms", flush=True)
    return result
