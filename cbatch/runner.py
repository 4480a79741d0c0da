"""Runs a step on the device: fills the placeholders in, calls the model, samples, and remembers the tokens by slot.

Owns the state that stays there between steps: block tables, last tokens, sampling parameters. Knows no request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cbatch.buffers import DeviceBatch, IOBuffer
from cbatch.kernels.attention import AttentionBackend, AttentionBatch
from cbatch.kv_cache import KVCache
from cbatch.models.base import Model
from cbatch.sampler import NUM_PARAMS, sample
from cbatch.scheduler.plan import StepPlan, StepSizes


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
        self.block_tables = torch.zeros(num_groups, rows, max_blocks_per_seq, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self.params = torch.zeros(rows, NUM_PARAMS, dtype=torch.int32, device=device)
        self._flat_tables = self.block_tables.view(-1)

    def step(self, batch: DeviceBatch, sizes: StepSizes, sampled: Tensor, flags: int) -> Tensor:
        """Compute a step whose arrays are on the device, and put its tokens into ``sampled``. Waits for nothing.

        Returns the logits ``[num_samples, vocab_size]``.
        """
        tokens, rows = sizes.num_tokens, sizes.num_rows
        if n := sizes.num_table_updates:
            self._flat_tables.index_put_((batch.table_index[:n],), batch.table_value[:n])
        if n := sizes.num_param_updates:
            self.params.index_put_((batch.param_slots[:n],), batch.param_values[:n])

        carry_slots = batch.carry_slots[:tokens]
        carried = self.last_tokens.index_select(0, carry_slots.clamp(min=0))
        input_ids = torch.where(carry_slots >= 0, carried, batch.input_ids[:tokens])

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
        # A step of unfinished prefills samples nothing; one row of logits is made for the model's sake and dropped.
        sample_rows = batch.sample_rows[: max(sizes.num_samples, 1)]
        logits = self.model.forward(
            input_ids.long(), batch.positions[:tokens].long(), sample_rows.long(), self.kv_cache.attend
        )
        if sizes.num_samples:
            self.sample(batch, sizes.num_samples, logits, sampled, flags)
        return logits

    def run(self, io: IOBuffer, plan: StepPlan) -> None:
        """Launch a step kernel by kernel."""
        self.step(io.batch, plan.sizes, io.device_sampled, plan.flags)

    def sample(self, batch: DeviceBatch, num_samples: int, logits: Tensor, sampled: Tensor, flags: int) -> None:
        """Draw the tokens of a step from its logits into ``sampled``, and remember them by slot."""
        out_slots = batch.out_slots[:num_samples]
        positions = batch.positions.index_select(0, batch.sample_rows[:num_samples]) + 1
        tokens = sample(logits, self.params.index_select(0, out_slots), positions, flags)
        self.last_tokens.index_put_((out_slots,), tokens)
        sampled[:num_samples].copy_(tokens)
