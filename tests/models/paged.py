"""A cache of few small pages and a loop over it: the least engine that can drive a model. Slow, one file, no scheduler.

A step is a list of (sequence, number of new tokens); pages are handed out one by one, so that those of two sequences
lie interleaved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.kernels.reference import paged_attention, write_kv
from cbatch.models.base import Model

BLOCK_SIZE = 4
MAX_BLOCKS = 16


class PagedRunner:
    """Runs packed steps of a model over sequences that live in ``self.tokens``."""

    def __init__(self, model: Model, prompts: list[list[int]]) -> None:
        self.model, self.tokens = model, [list(prompt) for prompt in prompts]
        self.num_computed = [0] * len(prompts)
        self.tables = torch.zeros(len(prompts), MAX_BLOCKS, dtype=torch.int32, device=model.device)
        self.num_blocks = [0] * len(prompts)
        total = 1 + len(prompts) * MAX_BLOCKS
        # NaN wherever nothing was written: reading such a place is noticed.
        self.caches = [
            tuple(
                torch.full(
                    (total, BLOCK_SIZE, spec.num_kv_heads, dim), torch.nan, dtype=model.dtype, device=model.device
                )
                for dim in (spec.k_head_dim, spec.v_head_dim)
            )
            for spec in model.kv_specs
        ]

    def step(self, rows: list[tuple[int, int]]) -> None:
        """Compute the next ``num`` tokens of each (sequence, num); where that reaches a sequence's end, append one."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, context_lens, sampled = [0], [], []
        for sequence, num in rows:
            first = self.num_computed[sequence]
            self._grow(sequence, first + num)
            ids += self.tokens[sequence][first : first + num]
            for position in range(first, first + num):
                block = int(self.tables[sequence, position // BLOCK_SIZE])
                positions.append(position)
                slots.append(block * BLOCK_SIZE + position % BLOCK_SIZE)
            starts.append(len(ids))
            context_lens.append(first + num)
            if first + num == len(self.tokens[sequence]):
                sampled.append((sequence, len(ids) - 1))
            self.num_computed[sequence] = first + num
        device = self.model.device
        slot_mapping, cu_seqlens_q, lens, row_slots = (
            torch.tensor(x, dtype=torch.int32, device=device)
            for x in (slots, starts, context_lens, [sequence for sequence, _ in rows])
        )

        def attend(
            layer: int,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            *,
            scale: float,
            window: int,
            softcap: float,
            sinks: Tensor | None,
        ) -> Tensor:
            assert window == self.model.kv_specs[layer].window
            k_cache, v_cache = self.caches[layer]
            write_kv(k, v, k_cache, v_cache, slot_mapping)
            return paged_attention(
                q,
                k_cache,
                v_cache,
                self.tables,
                row_slots,
                cu_seqlens_q,
                lens,
                scale=scale,
                window=window,
                softcap=softcap,
                sinks=sinks,
            )

        logits = self.model.forward(
            torch.tensor(ids, device=device),
            torch.tensor(positions, device=device),
            torch.tensor([row for _, row in sampled], dtype=torch.int64, device=device),
            attend,
        )
        assert logits.shape == (len(sampled), self.model.vocab_size)
        for (sequence, _), token in zip(sampled, logits.argmax(dim=-1).tolist(), strict=True):
            self.tokens[sequence].append(token)

    def _grow(self, sequence: int, length: int) -> None:
        while self.num_blocks[sequence] * BLOCK_SIZE < length:
            self.tables[sequence, self.num_blocks[sequence]] = 1 + sum(self.num_blocks)
            self.num_blocks[sequence] += 1


def generate_together(model: Model, prompts: list[list[int]], num_tokens: int, chunk: int = 5) -> list[list[int]]:
    """Greedy tokens of all prompts: chunked prefill, one sequence joining later, decodes and chunks in one step."""
    runner = PagedRunner(model, prompts)
    ends = [len(prompt) + num_tokens for prompt in prompts]
    first_step = True
    while True:
        rows = []
        for sequence, tokens in enumerate(runner.tokens):
            left = len(tokens) - runner.num_computed[sequence]
            if len(tokens) < ends[sequence] and not (first_step and sequence):
                rows.append((sequence, min(left, chunk)))
        if not rows:
            return [tokens[len(prompt) :] for tokens, prompt in zip(runner.tokens, prompts, strict=True)]
        first_step = False
        runner.step(sorted(rows, key=lambda row: row[1] > 1))  # decodes first
