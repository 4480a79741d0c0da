"""Owns the state of running sequences as numpy tables, a row for each slot. Written a row at a time, read whole."""

from __future__ import annotations

import numpy as np

FREE = np.iinfo(np.int64).min  # rank of a free slot: below all others, so argmax finds the last running sequence
NEVER = np.iinfo(np.int32).max
MAX_STOP_COLUMNS = 8  # compared with all rows at once; a request with more stop tokens is looked up by itself


class SlotTables:
    """Columns over ``max_num_seqs + 1`` slots; the last slot is the dummy of padded rows and never runs.

    ``tokens`` is as wide as the longest sequence; its memory is only taken where something is written.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        rows = max_num_seqs + 1
        self.max_num_seqs = max_num_seqs
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        self.block_size = block_size
        self.dummy_slot = max_num_seqs
        self.arange = np.arange(rows, dtype=np.int32)  # no column: 0, 1, 2 …, made once
        self.epoch = np.zeros(rows, np.int64)  # 0: the slot is free
        self.rank = np.full(rows, FREE, np.int64)
        self.decoding = np.zeros(rows, np.bool_)  # all known tokens are computed; the next input is the last sample
        self.num_computed = np.zeros(rows, np.int32)  # tokens whose KV a launched step has written or will write
        self.num_tokens = np.zeros(rows, np.int32)  # known tokens and those in flight
        self.num_landed = np.zeros(rows, np.int32)  # tokens whose value the host knows
        self.max_len = np.zeros(rows, np.int32)
        self.publish_at = np.full(rows, NEVER, np.int32)  # tokens landed that complete one more block
        self.flags = np.zeros(rows, np.uint8)
        self.stop_ids = np.full((MAX_STOP_COLUMNS, rows), -1, np.int32)
        self.num_stop_columns = 0  # in use by some running sequence
        self._num_stops = [0] * rows  # of these columns, by slot
        self._num_slots_with = [rows] + [0] * MAX_STOP_COLUMNS  # by number of stop tokens
        self.has_more_stops = np.zeros(rows, np.bool_)  # too many for the columns: looked up one by one
        self.sequences = np.full(rows, None, np.object_)
        self.tokens = np.empty((rows, self.max_blocks_per_seq * block_size), np.int32)
        self.tokens_by_block = self.tokens.reshape(rows, self.max_blocks_per_seq, block_size)

    def set_stop_ids(self, slot: int, stop_token_ids: frozenset[int]) -> None:
        """The stop tokens of a slot; none when it is free again."""
        self.has_more_stops[slot] = len(stop_token_ids) > MAX_STOP_COLUMNS
        count = 0 if self.has_more_stops[slot] else len(stop_token_ids)
        old, self._num_stops[slot] = self._num_stops[slot], count
        if old or count:
            self.stop_ids[:, slot] = -1
            for column, token in enumerate(stop_token_ids if count else ()):
                self.stop_ids[column, slot] = token
            self._num_slots_with[old] -= 1
            self._num_slots_with[count] += 1
            self.num_stop_columns = max(self.num_stop_columns, count)
            while self.num_stop_columns and not self._num_slots_with[self.num_stop_columns]:
                self.num_stop_columns -= 1
