"""Attention alone, as distance to the machine: `python -m benchmarks.kernels [--json FILE]`.

On CUDA: the Triton decode at 32 rows, 32 heads, 8 KV heads of 128 in bfloat16, over layers enough that nothing stays in
L2, in a CUDA graph. Beside it the read bandwidth of the same GPU in the same run (a sum over 2 GiB) and the obvious
alternative, SDPA over contiguous K and V, which no paged engine has.

On the CPU: TorchAttention at SmolLM2's shape in float32, two threads. Beside it the time to merely add up K and V, and
the naive way: gather all rows' K and V and attend once under one large mask.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cbatch.kernels import reference
from cbatch.kernels.attention import AttentionBatch, make_backend

BLOCK_SIZE = 64


class Pages:
    """A block-major pool with the given contexts in random blocks, and the metadata of one decode step over it."""

    def __init__(
        self,
        lens: list[int],
        layers: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        rows = len(lens)
        counts = [-(-n // BLOCK_SIZE) for n in lens]
        num_blocks = sum(counts) + 4
        size = BLOCK_SIZE * num_kv_heads * head_dim
        pool = torch.randn(num_blocks, 2 * layers * size, dtype=dtype, device=device)
        parts = pool.view(num_blocks, 2 * layers, BLOCK_SIZE, num_kv_heads, head_dim).unbind(1)
        self.layers = list(zip(parts[::2], parts[1::2], strict=True))
        blocks = (torch.randperm(num_blocks - 1)[: sum(counts)] + 1).int()
        tables = torch.zeros(1, rows, max(counts), dtype=torch.int32)
        for row, mine in enumerate(blocks.split(counts)):
            tables[0, row, : counts[row]] = mine
        last = torch.tensor(lens) - 1
        slots = tables[0, torch.arange(rows), last // BLOCK_SIZE] * BLOCK_SIZE + last % BLOCK_SIZE
        self.batch = AttentionBatch(
            block_tables=tables.to(device),
            slot_mapping=slots[None].int().to(device),
            row_slots=torch.arange(rows, dtype=torch.int32, device=device),
            cu_seqlens_q=torch.arange(rows + 1, dtype=torch.int32, device=device),
            context_lens=torch.tensor(lens, dtype=torch.int32, device=device),
            num_decodes=rows,
            max_query_len=1,
            max_context_len=max(lens),
        )
        self.q = torch.randn(rows, num_heads, head_dim, dtype=dtype, device=device)
        self.k, self.v = torch.randn(2, rows, num_kv_heads, head_dim, dtype=dtype, device=device).unbind(0)
        self.scale = head_dim**-0.5
        self.bytes = 2 * layers * sum(lens) * num_kv_heads * head_dim * dtype.itemsize


def cuda_ms(step: Callable[[], object], repeats: int = 15) -> float:
    """Median milliseconds of a CUDA graph of step."""
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())  # which made the inputs
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            step()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(repeats):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    return sorted(times)[repeats // 2]


def triton_decode(context_len: int, layers: int) -> tuple[int, float, float]:
    """Bytes of K and V, milliseconds over all layers, and the relative L2 error of the first layer."""
    pages = Pages([context_len] * 32, layers, 32, 8, 128, torch.bfloat16, "cuda")
    backend, b = make_backend("triton", torch.device("cuda")), pages.batch
    backend.prepare(b)

    def attend(k_cache: Tensor, v_cache: Tensor) -> Tensor:
        return backend.attend(pages.q, pages.k, pages.v, k_cache, v_cache, 0, scale=pages.scale)

    k_cache, v_cache = pages.layers[0]
    actual = attend(k_cache, v_cache).float()
    lines = (b.block_tables[0], b.row_slots, b.cu_seqlens_q, b.context_lens)
    expected = reference.paged_attention(pages.q.float(), k_cache, v_cache, *lines, scale=pages.scale)
    error = ((actual - expected).norm() / expected.norm()).item()
    return pages.bytes, cuda_ms(lambda: [attend(*layer) for layer in pages.layers]), error


def contiguous_sdpa(context_len: int, layers: int) -> float:
    """Milliseconds of torch's SDPA over all layers, K and V contiguous a row."""
    q = torch.randn(32, 32, 1, 128, dtype=torch.bfloat16, device="cuda")
    dense = torch.randn(layers, 2, 32, 8, context_len, 128, dtype=torch.bfloat16, device="cuda")
    return cuda_ms(lambda: [F.scaled_dot_product_attention(q, k, v, enable_gqa=True) for k, v in dense])


def on_cuda() -> dict[str, Any]:
    data = torch.ones(2**29, device="cuda")  # 2 GiB
    bandwidth = 2**31 / cuda_ms(data.sum) / 1e9
    del data
    print(f"{torch.cuda.get_device_name()}: reads {bandwidth:.2f} TB/s (sum over 2 GiB)")
    print("context  layers  us/layer   TB/s  of read bandwidth   SDPA us/layer   error")
    rows = []
    for context_len, layers in ((224, 16), (1024, 16), (4192, 8), (8100, 6)):
        moved, ms, error = triton_decode(context_len, layers)
        sdpa = contiguous_sdpa(context_len, layers)
        row = {
            "context_len": context_len,
            "us_per_layer": ms * 1e3 / layers,
            "tb_per_s": moved / ms / 1e9,
            "read_bandwidth_share": moved / ms / 1e9 / bandwidth,
            "sdpa_us_per_layer": sdpa * 1e3 / layers,
            "relative_error": error,
        }
        rows.append(row)
        print(
            f"{context_len:7}  {layers:6}  {row['us_per_layer']:8.1f}  {row['tb_per_s']:5.2f}"
            f"  {row['read_bandwidth_share']:17.1%}   {row['sdpa_us_per_layer']:13.1f}   {error:.5f}"
        )
    return {"device": torch.cuda.get_device_name(), "read_tb_per_s": bandwidth, "decode": rows}


def cpu_ms(layers: list[Any], attend: Callable[[Any], object], repeats: int) -> float:
    """Milliseconds over all layers: the best of each, since other processes' time is not ours."""
    best = [float("inf")] * len(layers)
    for _ in range(repeats):
        for i, layer in enumerate(layers):
            start = time.perf_counter()
            attend(layer)
            best[i] = min(best[i], time.perf_counter() - start)
    return sum(best) * 1e3


def on_cpu() -> dict[str, Any]:
    torch.set_num_threads(2)
    lens = torch.linspace(50, 400, 32).round().int().tolist()
    pages = Pages(lens, 30, 9, 3, 64, torch.float32, "cpu")
    backend, b = make_backend("torch", torch.device("cpu")), pages.batch

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
    print(f"  naive, one mask {result['naive_ms']:7.1f} ms")
    return {"device": "cpu", "decode_cpu": result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    arguments = parser.parse_args()
    result = on_cuda() if arguments.device == "cuda" else on_cpu()
    result["torch"] = torch.__version__
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
