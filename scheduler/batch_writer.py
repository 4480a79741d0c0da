"""Writes the arrays of a step out of the tables of slots and blocks. Decides nothing; knows no queue and no policy."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbatch.scheduler.block_tables import BlockTables
from cbatch.scheduler.blocks import DUMMY_BLOCK
from cbatch.scheduler.plan import HostBatch
from cbatch.scheduler.sequence import Sequence
from cbatch.scheduler.slots import SlotTables


def write_decodes(host: HostBatch, t: SlotTables, blocks: BlockTables, slots: NDArray[np.intp]) -> int:
    """Write the first rows: one token of each of these slots, as a zero that the device fills in.

    Counts it as computed, and the token to be sampled as one more. Returns the longest context.
    """
    n, size = int(slots.size), t.block_size
    positions = t.num_computed[slots]
    block_index, offset = np.divmod(positions, size)
    contexts = positions + 1
    host.input_ids[:n] = 0
    host.positions[:n] = positions
    host.carry_slots[:n] = slots
    host.slot_mapping[:, :n] = blocks.tables[:, slots, block_index] * size + offset
    host.row_slots[:n] = slots
    host.cu_seqlens_q[: n + 1] = t.arange[: n + 1]
    host.context_lens[:n] = contexts
    host.sample_rows[:n] = t.arange[:n]
    host.out_slots[:n] = slots
    t.num_computed[slots] = contexts
    t.num_tokens[slots] = contexts + 1
    return int(contexts.max()) if n else 0


def write_chunks(
    host: HostBatch, t: SlotTables, blocks: BlockTables, chunks: list[tuple[Sequence, int]], num_decodes: int
) -> NDArray[np.intp]:
    """Write the rows of prefill chunks, (sequence, number of tokens), behind the decode rows.

    Counts their tokens as computed. A chunk that ends at the last known token samples the next one, which counts as one
    more. Returns the slots of these.
    """
    size, tables = t.block_size, blocks.tables
    sampled = []
    token = row = sample = num_decodes
    for sequence, count in chunks:
        slot = sequence.slot
        start = int(t.num_computed[slot])
        end = start + count
        where = np.arange(start, end)
        stop = token + count
        host.input_ids[token:stop] = t.tokens[slot, start:end]
        host.positions[token:stop] = where
        host.carry_slots[token:stop] = -1
        host.slot_mapping[:, token:stop] = tables[:, slot, where // size] * size + where % size
        host.row_slots[row] = slot
        host.cu_seqlens_q[row + 1] = stop
        host.context_lens[row] = end
        t.num_computed[slot] = end
        if end == t.num_tokens[slot]:
            host.sample_rows[sample] = stop - 1
            host.out_slots[sample] = slot
            t.num_tokens[slot] = end + 1
            sampled.append(slot)
            sample += 1
        token, row = stop, row + 1
    return np.array(sampled, np.intp)


def pad(host: HostBatch, t: SlotTables, tokens: int, rows: int, samples: int, updates: int, params: int) -> None:
    """Make what the bucket has beyond the step harmless: empty rows, the dummy slot, the dummy block."""
    dummy = t.dummy_slot
    if tokens < host.bucket.num_tokens:
        host.input_ids[tokens:] = 0
        host.positions[tokens:] = 0
        host.carry_slots[tokens:] = -1
        host.slot_mapping[:, tokens:] = DUMMY_BLOCK * t.block_size
    if rows < host.bucket.num_rows:
        host.row_slots[rows:] = dummy
        host.cu_seqlens_q[rows + 1 :] = tokens
        host.context_lens[rows:] = 0
    if samples < host.bucket.num_rows:
        host.sample_rows[samples:] = 0
        host.out_slots[samples:] = dummy
    host.table_index[updates:] = dummy * t.max_blocks_per_seq
    host.table_value[updates:] = DUMMY_BLOCK
    host.param_slots[params:] = dummy
