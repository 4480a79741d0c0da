"""Runs a step on the device: fills the placeholders in, calls the model, samples, and remembers the tokens by slot.

Owns the state that stays there between steps: block tables, last tokens, sampling state. Knows no request.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from cbatch.buffers import DeviceBatch, IOBuffer, Landing
from cbatch.kernels.attention import AttentionBackend, AttentionBatch
from cbatch.kv_cache import KVCache
from cbatch.models.base import Model
from cbatch.prompt_logprobs import PromptRows
from cbatch.sampler import FILTERED, HELD, LOGPROBS, NUM_PARAMS, PROCESSED, RANDOM, Edit, edited, make_step_ops
from cbatch.scheduler.plan import StepPlan, StepSizes
from cbatch.slot_state import SlotState


class Runner:
    """The model with its resident state. Every tensor of it changes on the compute stream only.

    Tables over slots have one row more than ``max_num_seqs``: the dummy, which padding reads and writes.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        backend: AttentionBackend,
        *,
        num_groups: int,
        max_num_seqs: int,
        max_blocks_per_seq: int,
    ) -> None:
        self.model = model
        self.kv_cache = kv_cache
        self.backend = backend
        rows, device = max_num_seqs + 1, model.device
        self._ops = make_step_ops(device)
        self.block_tables = torch.zeros(num_groups, rows, max_blocks_per_seq, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.params = torch.zeros(rows, NUM_PARAMS, dtype=torch.int32, device=device)
        self.slot_state = SlotState(max_num_seqs, model.vocab_size, device)
        self._flat_tables = self.block_tables.view(-1)
        self._held_logits: Tensor | None = None  # of a step that was launched, and is to sample yet

    def step(
        self,
        batch: DeviceBatch,
        sizes: StepSizes,
        landing: Landing,
        flags: int,
        more_rows: Tensor | None = None,
        model: Model | None = None,
    ) -> Tensor:
        """Compute a step whose arrays are on the device; its results go into ``landing``. Waits for nothing.

        Returns the logits ``[num_samples, vocab_size]``, and behind them those of the tokens with index ``more_rows``.
        ``model``: another in place of the runner's, with the same pages.
        """
        tokens, rows = sizes.num_tokens, sizes.num_rows
        updates, new = sizes.num_table_updates, sizes.num_param_updates
        input_ids = self._ops.begin_step(
            batch.input_ids[:tokens],
            batch.carry_slots[:tokens],
            self.last_tokens,
            self._flat_tables,
            batch.table_index[:updates],
            batch.table_value[:updates],
            self.params,
            batch.param_slots[:new],
            batch.param_values[:new],
        )
        self.backend.prepare(
            AttentionBatch(
                block_tables=self.block_tables,
                slot_mapping=batch.slot_mapping[:, :tokens],
                row_slots=batch.row_slots[:rows],
                cu_seqlens_q=batch.cu_seqlens_q[: rows + 1],
                context_lens=batch.context_lens[:rows],
                num_decodes=sizes.num_decodes,
                max_query_len=sizes.max_query_len,
                max_context_len=sizes.max_context_len,
            )
        )
        # A step of unfinished prefills samples nothing; the model still computes one row of logits, which is dropped.
        sample_rows = batch.sample_rows[: max(sizes.num_samples, 1)]
        if more_rows is not None:
            sample_rows = torch.cat([sample_rows[: sizes.num_samples], more_rows])
        model = model or self.model
        logits = model.forward(input_ids, batch.positions[:tokens], sample_rows, self.kv_cache)
        if sizes.num_samples and not flags & HELD:
            sampled = logits if more_rows is None else logits[: sizes.num_samples]
            self.sample(batch, sizes.num_samples, sampled, landing, flags)
            if flags & LOGPROBS:
                self.logprobs(sampled, landing)
        return logits

    def take_spare(self, words: Tensor, sizes: StepSizes) -> None:
        """Apply a step's spare words, before it: block table changes that overflow its bucket, and blocks to copy.

        Launched kernel by kernel on the compute stream, and so behind all that steps in flight still read and write.
        """
        changes = 2 * sizes.num_overflow
        if changes:
            index, blocks = words[:changes].view(2, -1)
            self._flat_tables[index.long()] = blocks
        if sizes.num_copies:
            sources, own = words[changes:].view(2, -1)
            self.kv_cache.copy_blocks(sources, own)

    def run(self, io: IOBuffer, plan: StepPlan, prompts: PromptRows | None = None) -> None:
        """Launch a step kernel by kernel; of a HELD step, only what computes its logits."""
        if prompts is None:
            logits = self.step(io.batch, plan.sizes, io.device_landing, plan.flags)
        else:
            logits = self._run_with_prompts(io, plan, prompts)
        self._held_logits = logits[: plan.sizes.num_samples] if plan.flags & HELD else None

    def finish(self, io: IOBuffer, plan: StepPlan, edits: Sequence[Edit]) -> None:
        """Launch the rest of the HELD step that was launched last."""
        logits, self._held_logits = self._held_logits, None
        assert logits is not None, "no step was held"
        with edited(logits, edits, plan.flags):
            self.sample(io.batch, plan.sizes.num_samples, logits, io.device_landing, plan.flags)
        if plan.flags & LOGPROBS:
            self.logprobs(logits, io.device_landing)

    def _run_with_prompts(self, io: IOBuffer, plan: StepPlan, prompts: PromptRows) -> Tensor:
        """Compute a step, and log-probabilities of prompts. Allocates, on the host too; waits for nothing.

        Their records land with the step: its copy out, which ``land`` waits for, runs behind this stream.
        """
        device = self.model.device
        num_rows = prompts.index.shape[1]
        # Both rows begin at a multiple of 16 bytes: Triton would compile another kernel for unaligned ones.
        shape = 2, -(-num_rows // 4) * 4
        index = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=device.type == "cuda")
        index.numpy()[:, :num_rows] = prompts.index
        rows, targets = index.to(device, non_blocking=True)[:, :num_rows]
        logits = self.step(io.batch, plan.sizes, io.device_landing, plan.flags, rows)
        records = torch.empty(prompts.records.shape, dtype=torch.int32, device=device)
        self._ops.logprobs(logits[plan.sizes.num_samples :], targets, records)
        prompts.records.copy_(records, non_blocking=True)
        return logits

    def sample(self, batch: DeviceBatch, num_samples: int, logits: Tensor, landing: Landing, flags: int) -> None:
        """Draw the tokens of a step from its logits, put them into ``landing``, and remember them by slot."""
        out_slots = batch.out_slots[:num_samples]
        if not flags & (RANDOM | PROCESSED):
            self._ops.greedy(logits, out_slots, self.last_tokens, landing.sampled)
            return
        where = batch.positions, batch.sample_rows[:num_samples], out_slots
        kept = {}
        if flags & PROCESSED:
            state = self.slot_state
            logits = self._ops.process_logits(logits, self.params, state.counts, state.lists, *where)
            kept = {"counts": state.counts, "lists": state.lists}
        self._ops.draw(
            logits, self.params, *where, self.last_tokens, landing.sampled, filtered=bool(flags & FILTERED), **kept
        )

    def logprobs(self, logits: Tensor, landing: Landing) -> None:
        """Put the log-probabilities of a step's tokens, by its logits as the model gave them, into ``landing``."""
        self._ops.logprobs(logits, landing.sampled, landing.records)
