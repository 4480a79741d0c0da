"""Compiles a step's Triton kernels in parallel, before the first step would compile them one by one.

Every call below launches kernels once, on tiny inputs, in its own thread; LLVM and ptxas run in parallel. In series, 54
kernels took 20 s of an H200's cold start at the 8B shape. A kernel missing here compiles at its first launch: before a
step's capture, or, in a step that runs without a graph (log-probabilities of prompts), while requests wait.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from cbatch.buffers import Landing
from cbatch.config import EngineConfig
from cbatch.kernels.attention import AttentionBatch, make_backend
from cbatch.kv_cache import KVCache
from cbatch.models.base import Model
from cbatch.models.decoder import Decoder
from cbatch.sampler import NUM_PARAMS, make_step_ops
from cbatch.scheduler.kv_spec import KVGroup
from cbatch.slot_state import SlotState

Call = Callable[[], object]


def precompile(model: Model, config: EngineConfig, groups: tuple[KVGroup, ...]) -> None:
    """Launch every kernel once, on the current streams of other threads, and wait. CUDA only."""
    calls = list(_sampling(model))
    if isinstance(model, Decoder):
        from cbatch.kernels.skinny_gemm import ROWS

        if config.attention != "torch":
            calls += _attention(model, config, groups)
        stored = _Stored(_pages(model, config, groups, ROWS[-1] // 2, 1))
        calls += [call for num_rows in ROWS for call in model.products(num_rows, stored)]

    # The other threads' streams do not wait for the caller's, which fills in indices among other inputs.
    torch.cuda.synchronize(model.device)

    def run(call: Call) -> None:
        with torch.inference_mode(), torch.cuda.device(model.device):
            call()

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(run, calls):  # re-raises a call's exception
            pass
    torch.cuda.synchronize(model.device)
    torch._C._cuda_clearCublasWorkspaces()  # each thread that called cuBLAS left one of 32 MiB


def _sampling(model: Model) -> Iterator[Call]:
    """Each variant of sampling, on two rows that share one slot."""
    device, ops = model.device, make_step_ops(model.device)
    logits = torch.zeros(2, model.vocab_size, dtype=model.dtype, device=device)
    params = torch.zeros(2, NUM_PARAMS, dtype=torch.int32, device=device)
    zeros = torch.zeros(2, dtype=torch.int32, device=device)
    state, landing, where = SlotState(0, model.vocab_size, device), Landing(2, device), (zeros, zeros, zeros)
    kept = {"counts": state.counts, "lists": state.lists}

    def draw(logits: torch.Tensor, filtered: bool, **kept: torch.Tensor) -> None:
        ops.draw(logits, params, *where, zeros.clone(), landing.sampled, filtered=filtered, **kept)

    yield lambda: draw(logits, True)
    yield lambda: draw(logits.float(), True, **kept)
    yield lambda: draw(logits.float(), False, **kept)  # for a step without a graph
    yield lambda: draw(logits, False)
    yield lambda: ops.greedy(logits, zeros, zeros.clone(), landing.sampled)
    yield lambda: ops.process_logits(logits, params, state.counts, state.lists, *where)

    def logprobs() -> None:
        ops.logprobs(logits, landing.sampled, landing.records)
        # Of prompts, behind other rows: some vocabularies leave them unaligned to 16 bytes, and Triton specialises.
        ops.logprobs(logits[1:], landing.sampled, landing.records)

    yield logprobs


def _attention(model: Decoder, config: EngineConfig, groups: tuple[KVGroup, ...]) -> Iterator[Call]:
    """Attention of a decode step, a small mixed step and the largest step: two empty rows, with pages of their own."""

    def attend(query_len: int, max_context_len: int) -> None:
        cache = _pages(model, config, groups, query_len, max_context_len)
        for group in groups:
            model.rehearse_attention(group.layers[0], 2 * query_len, cache)

    yield lambda: attend(1, model.max_model_len)
    yield lambda: attend(2, model.max_model_len)
    yield lambda: attend(max((config.max_num_batched_tokens or 0) // 2, 2), 1)  # without splits of the keys


def _pages(
    model: Decoder, config: EngineConfig, groups: tuple[KVGroup, ...], query_len: int, max_context_len: int
) -> KVCache:
    """A cache of one page, prepared for a step of two empty rows of ``query_len`` tokens each."""
    device = model.device
    backend = make_backend(config.attention, device)
    cache = KVCache(groups, 1, config.block_size, model.dtype, device, backend)
    num_tokens = 2 * query_len
    ints = torch.zeros(num_tokens + 1, dtype=torch.int32, device=device)
    backend.prepare(
        AttentionBatch(
            block_tables=ints[:2].expand(len(groups), 2, 2).contiguous(),
            slot_mapping=ints[:num_tokens].expand(len(groups), -1).contiguous(),
            row_slots=ints[:2],
            cu_seqlens_q=torch.arange(3, dtype=torch.int32, device=device) * query_len,
            context_lens=ints[:2],
            num_decodes=0,
            max_query_len=query_len,
            max_context_len=max_context_len,
        )
    )
    return cache


class _Stored:
    """A ``PagedAttend`` whose pages can be written to, and which returns the queries."""

    def __init__(self, cache: KVCache) -> None:
        self.pages = cache.pages

    def __call__(self, layer: int, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return q
