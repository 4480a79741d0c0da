"""Owns the rows of running sequences as numpy tables, one row a slot. Written row by row on admission, read whole."""

from __future__ import annotations

import numpy as np

MAX_STOP_COLUMNS = 8  # compared with every token of every row; a request with more is looked up by itself


class SlotTables:
    """Columns over ``max_num_seqs + 1`` slots; the last slot is the dummy of padded rows and never runs.

    ``tokens`` is as wide as the longest sequence; pages of it that nothing wrote cost no memory.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, num_groups: int, block_size: int) -> None:
        rows = max_num_seqs + 1
        self.max_num_seqs = max_num_seqs
        self.max_blocks_per_seq = -(-max_model_len // block_size)
        self.dummy_slot = max_num_seqs
        self.epoch = np.zeros(rows, np.int64)  # 0: the slot is free
        self.arrival = np.full(rows, -1, np.int64)
        self.decoding = np.zeros(rows, np.bool_)  # all known tokens are computed; the next input is the last sample
        self.num_computed = np.zeros(rows, np.int32)  # tokens whose KV a launched step has written or will write
        self.num_tokens = np.zeros(rows, np.int32)  # known tokens and those in flight
        self.num_landed = np.zeros(rows, np.int32)  # tokens whose value the host knows
        self.max_len = np.zeros(rows, np.int32)
        self.num_blocks = np.zeros(rows, np.int32)  # blocks held in each group
        self.flags = np.zeros(rows, np.uint8)
        self.stop_ids = np.full((rows, MAX_STOP_COLUMNS), -1, np.int32)
        self.has_more_stops = np.zeros(rows, np.bool_)  # too many for the columns: looked up one by one
        self.sequences = np.full(rows, None, np.object_)
        self.tokens = np.empty((rows, max_model_len), np.int32)
        self.block_tables = np.zeros((num_groups, rows, self.max_blocks_per_seq), np.int32)

    def set_stop_ids(self, slot: int, stop_token_ids: frozenset[int]) -> None:
        self.stop_ids[slot] = -1
        self.has_more_stops[slot] = len(stop_token_ids) > MAX_STOP_COLUMNS
        if not self.has_more_stops[slot]:
            self.stop_ids[slot, : len(stop_token_ids)] = list(stop_token_ids)
