"""Has Triton compile what a step launches, many kernels at a time, before the first step would do it one by one.

Every call below launches kernels once, on next to nothing, in a thread of its own: while one kernel is in LLVM or
ptxas, the others go on. Of an H200's cold start at the 8B shape, 20 s were 54 kernels that were compiled in a row. A
kernel that is missing here is compiled when it is first launched: before a step is captured, or, where a step is no
graph because it makes log-probabilities of prompts, while requests wait for it.
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
    """Launch everything once, on the current streams of other threads, and wait for it. CUDA only."""
    calls = list(_sampling(model))
    if isinstance(model, Decoder):
        from cbatch.kernels.skinny_gemm import ROWS

        if config.attention != "torch":
            calls += _attention(model, config, groups)
        stored = _Stored(_pages(model, config, groups, ROWS[-1] // 2, 1))
        calls += [call for num_rows in ROWS for call in model.products(num_rows, stored)]

    # Of what the caller's stream fills in, some are indices; the other threads' streams do not wait for it.
    torch.cuda.synchronize(model.device)

    def run(call: Call) -> None:
        with torch.inference_mode(), torch.cuda.device(model.device):
            call()

    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        for _ in pool.map(run, calls):  # raises what a call raised
            pass
    torch.cuda.synchronize(model.device)
    torch._C._cuda_clearCublasWorkspaces()  # each thread that had a product of cuBLAS left one, of 32 MiB


def _sampling(model: Model) -> Iterator[Call]:
    """Each way to choose tokens, of two rows that share the one slot there is."""
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
    yield lambda: draw(logits.float(), False, **kept)  # of a step that is no graph, since it has log-probs of prompts
    yield lambda: draw(logits, False)
    yield lambda: ops.greedy(logits, zeros, zeros.clone(), landing.sampled)
    yield lambda: ops.process_logits(logits, params, state.counts, state.lists, *where)

    def logprobs() -> None:
        ops.logprobs(logits, landing.sampled, landing.records)
        ops.logprobs(
            logits[1:], landing.sampled, landing.records
        )  # those of prompts, at 16 bytes for some vocabularies

    yield logprobs


def _attention(model: Decoder, config: EngineConfig, groups: tuple[KVGroup, ...]) -> Iterator[Call]:
    """A decode step's, a small mixed one's and the largest's, of two empty rows, with pages and scratch of its own."""

    def attend(query_len: int, max_context_len: int) -> None:
        cache = _pages(model, config, groups, query_len, max_context_len)
        for group in groups:
            model.rehearse_attention(group.layers[0], 2 * query_len, cache)

    yield lambda: attend(1, model.max_model_len)
    yield lambda: attend(2, model.max_model_len)
    yield lambda: attend(max((config.max_num_batched_tokens or 0) // 2, 2), 1)  # whose keys are not split


def _pages(
    model: Decoder, config: EngineConfig, groups: tuple[KVGroup, ...], query_len: int, max_context_len: int
) -> KVCache:
    """One page, prepared for a step of two empty rows of so many tokens each."""
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
    """A ``PagedAttend`` that lets keys and values be stored, and attends to nothing: queries come back."""

    def __init__(self, cache: KVCache) -> None:
        self.pages = cache.pages

    def __call__(self, layer: int, q: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return q
